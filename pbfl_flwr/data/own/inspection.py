"""Inspect a device's data before it takes part: sizes, values, classes, and warnings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings, parse
from pbfl_flwr.data import DATASETS, kind_of, names_file, own_pool, read_names
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.own.pflib import clients_in
from pbfl_flwr.data.partition.assign import make_partition
from pbfl_flwr.errors import PbflError, expanded

LARGE = 100.0  # absolute feature value to warn about; networks need inputs around 1
BAR = 40
# Ratio of roughness to that in another axis order; on UCI HAR 27 and 29 with swapped axes, 0.1 with correct ones.
ROUGH = 4.0
SHORTEST_SERIES = 16
_ROWS_AT_A_TIME = 4096
OWN_CLASSES = ("npz", "table", "image-folder", "flwr-datasets")  # the others have all classes of the dataset

SAME_CLASSES = (
    "the classes are those found here, and must be the same on all devices: where one may lack a class, name all of "
    "them with --labels on every device"
)


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection.

    Attributes:
        path, dataset: location of the data, and the dataset that reads it.
        samples, input_shape, dtype: of all inputs.
        minimum, maximum: of all stored values.
        columns: feature names, for tables.
        vocabulary_size: V if the values are token ids, else 0.
        labels: class names.
        train, test: samples of each class in a device's train/test split.
        notes: messages of the loader, and on what other devices must have.
        warnings: allowed but suspicious properties.
        data_client: of a PFLlib folder, the client whose files these are; None if there is only one.
    """

    path: str
    dataset: str
    samples: int
    input_shape: tuple[int, ...]
    dtype: str
    minimum: float
    maximum: float
    columns: tuple[str, ...]
    vocabulary_size: int
    labels: tuple[str, ...]
    train: tuple[int, ...]
    test: tuple[int, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    data_client: int | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each class."""
        return tuple(a + b for a, b in zip(self.train, self.test, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and ``counts``, for JSON."""
        return {**asdict(self), "counts": self.counts}

    def lines(self) -> list[str]:
        """Return a readable report, with the classes as a bar chart."""
        shape = "x".join(map(str, self.input_shape))
        report = [
            f"{self.path}: {self.dataset}{_description(self.dataset)}",
            f"{self.samples} samples of shape {shape}, {self.dtype}, values {self.minimum:g} to {self.maximum:g}",
            f"split on a device: {sum(self.train)} for training, {sum(self.test)} for testing",
        ]
        if self.columns:
            report.append(f"{len(self.columns)} feature columns: {_shown(self.columns)}")
        if self.vocabulary_size:
            report.append(f"the values are token ids in a vocabulary of {self.vocabulary_size}")
        counts, width = self.counts, max(len(name) for name in self.labels)
        digits, most = len(str(max(counts))), max(counts)
        report.append(f"{len(self.labels)} classes, samples of each (training + testing):")
        for name, train, test in zip(self.labels, self.train, self.test, strict=True):
            bar = "█" * round(BAR * (train + test) / most) or ("▏" if train + test else "")
            report.append(f"  {name:<{width}}  {train + test:>{digits}}  {bar} ({train} + {test})")
        return [*report, *(f"note: {note}" for note in self.notes), *(f"warning: {w}" for w in self.warnings)]


def settings_for(path: Path, **keys: str | float) -> DataSettings:
    """Return the settings with which a device reads its own path.

    Args:
        path: data-path of the device.
        keys: ``dataset``, ``labels`` (names, or a file with one name per line), ``label_column``, ``input_shape``,
            ``train_share``; empty ones are ignored.

    Raises:
        PbflError: if a value is not allowed, or the path is a file of an unsupported kind.
    """
    values = {key.replace("_", "-"): value for key, value in keys.items() if value}
    if (file := names_file(str(values.get("labels", "")))) is not None:
        values["labels"] = read_names(file)
    place = expanded(path).absolute()
    values.setdefault("dataset", kind_of(place))
    return parse({**values, "data-dir": str(place), "partition": "iid"}).data


def inspect(settings: DataSettings, files: int | None = None) -> Inspection:
    """Read a device's data as the device itself would.

    Args:
        settings: see :func:`settings_for`.
        files: for a PFLlib folder, the client whose files are read; None: those of all clients, one after the other,
            and the result is the first one's.

    Raises:
        PbflError: for whatever a device would refuse, with the same message; also if the inputs of two clients of a
            folder have different shapes.
    """
    clients = clients_in(Path(settings.data_dir)) if settings.dataset == "pflib" and files is None else []
    if len(clients) > 1:
        first, *others = [inspect(settings, client) for client in clients]
        for client, other in zip(clients[1:], others, strict=True):
            if other.input_shape != first.input_shape:
                raise PbflError(
                    f"the files of client {client} have inputs of shape {other.input_shape}, those of client "
                    f"{clients[0]} of {first.input_shape}; must be the same for all"
                )
        note = f"the files of {len(clients)} clients can be read; these are client {clients[0]}'s: each device needs a"
        return replace(first, notes=(*first.notes, f"{note} data-client of its own"))
    pool = own_pool(settings, files)
    split = make_partition(pool, settings, 1).splits[0]
    K = pool.num_classes
    train, test = (np.bincount(pool.labels[rows], minlength=K) for rows in (split.train, split.test))
    low, high = _ranges(pool.inputs)
    return Inspection(
        settings.data_dir,
        settings.dataset,
        len(pool.labels),
        pool.input_shape,
        str(pool.inputs.dtype),
        float(low.min()),
        float(high.max()),
        pool.columns,
        pool.vocabulary_size,
        pool.label_names,
        tuple(train.tolist()),
        tuple(test.tolist()),
        (*pool.notes, *([SAME_CLASSES] if settings.dataset in OWN_CLASSES and not settings.classes else [])),
        tuple(_warnings(pool, train, test, low, high)),
        files,
    )


def _description(dataset: str) -> str:
    return f", {DATASETS[dataset].description.partition(';')[0]}" if dataset in DATASETS else ""


def _ranges(inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the minimum and the maximum at every position of an input, read block by block."""
    blocks = [inputs[start : start + _ROWS_AT_A_TIME] for start in range(0, len(inputs), _ROWS_AT_A_TIME)]
    return np.min([b.min(axis=0) for b in blocks], axis=0), np.max([b.max(axis=0) for b in blocks], axis=0)


def _flat(pool: Pool) -> NDArray[np.bool_]:
    """Return for every class whether all values of its inputs are equal, (K,)."""
    low, high = np.full(pool.num_classes, np.inf), np.full(pool.num_classes, -np.inf)
    for start in range(0, len(pool.labels), _ROWS_AT_A_TIME):
        labels = pool.labels[start : start + _ROWS_AT_A_TIME]
        block = pool.inputs[start : start + _ROWS_AT_A_TIME].reshape(len(labels), -1)
        np.minimum.at(low, labels, block.min(axis=1))
        np.maximum.at(high, labels, block.max(axis=1))
    flat: NDArray[np.bool_] = low == high
    return flat


def _warnings(
    pool: Pool, train: NDArray[Any], test: NDArray[Any], low: NDArray[Any], high: NDArray[Any]
) -> list[str]:
    def named(which: NDArray[np.bool_]) -> str:
        return _shown([pool.label_names[j] for j in np.flatnonzero(which)])

    counts, warnings = train + test, []
    if (single := counts == 1).any():
        warnings.append(
            f"classes with one sample: {named(single)}; their prototype is the feature vector of that sample"
        )
    if (absent := counts == 0).any():
        warnings.append(f"classes without samples here: {named(absent)}")
    if (untrained := (train == 0) & (test > 0)).any():
        warnings.append(f"classes with test but no training samples: {named(untrained)}")
    if not test.sum():
        warnings.append("no samples are left for testing; this device will not be scored")
    if pool.inputs.dtype == np.uint8:
        if float(low.min()) == float(high.max()):
            warnings.append(f"every value of every image is {low.min()}: they carry no information")
        elif (flat := _flat(pool)).any():
            warnings.append(f"classes in whose images all values are equal: {named(flat)}")
    if pool.inputs.dtype == np.float32:
        largest = np.maximum(np.abs(low), np.abs(high))
        if float(largest.max()) > LARGE:
            place = int(largest.argmax())
            which = f"column '{pool.columns[place]}'" if pool.columns else f"value {place} of an input"
            digits = (
                "" if float(largest.max()) < 2**24 else ", before they become float32, which has seven digits"
            )
            warnings.append(
                f"features are not normalised, and {which} goes up to {float(largest.max()):g}; scale them in the "
                f"same way on all devices{digits}"
            )
        if constant := int((low == high).sum()):
            warnings.append(f"{constant} of {low.size} values of an input are the same in every sample")
    if swapped := swapped_axes_warning(pool):
        warnings.append(swapped)
    return warnings


def _shown(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")


def swapped_axes_warning(pool: Pool) -> str:
    """Return a warning if the axes of the inputs look swapped, else an empty string.

    It is given for windows (C, L) whose neighbouring readings differ more than in another axis order, and for float
    images (H, W, C), as in Keras.
    """
    if pool.inputs.dtype == np.float32 and len(pool.input_shape) == 3:
        height, width, channels = pool.input_shape
        if min(height, width) > 4 and (channels in (3, 4) or (channels == 1 and height == width)):
            return (
                f"inputs are read as (channels, height, width), {height} channels of {width}x{channels}: if the "
                "channels are last, move them to the front with x.transpose(0, 3, 1, 2)"
            )
    shape = tuple(side for side in pool.input_shape if side != 1)
    if pool.inputs.dtype != np.float32 or len(shape) != 2 or max(shape) < SHORTEST_SERIES:
        return ""
    windows = pool.inputs[:: max(1, len(pool.inputs) // 256)].reshape(-1, *shape)
    channels, length = shape

    def change(readings: NDArray[Any], axis: int) -> float:
        return float(np.square(np.diff(readings.astype(np.float64), axis=axis)).mean())

    other = {
        "x.transpose(0, 2, 1)": change(windows, 1),
        f"x.reshape(-1, {length}, {channels}).transpose(0, 2, 1)": change(
            windows.reshape(-1, length, channels), 1
        ),
    }
    order = min(other, key=lambda name: other[name])
    if change(windows, 2) <= ROUGH * other[order]:
        return ""
    return (
        f"inputs are read as windows (channels, length), {channels} of {length} readings, but neighbouring readings "
        f"differ far more than in {order}: were time and channel axes mixed up?"
    )
