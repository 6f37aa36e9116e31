"""Datasets in Hugging Face's format, as Flower's users have them, and Flower's own partitioners.

data-dir is a folder written by ``save_to_disk`` (``flwr-datasets create`` writes one per client), a folder that
``datasets.load_dataset`` reads, or ``hf://`` and the id of a dataset on the hub. The split ``train`` is the official
training part, ``test`` the official test part; a dataset without splits has only samples.

Classes are in ``label-column``, by default ``label``, else in the only column of type ``ClassLabel`` but ``client``.
Inputs are the column of images, else the only column of arrays, else all columns of numbers, among which is any other
``ClassLabel``.
The format of a dataset (``set_format``) and ``Image(decode=False)`` change nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import HUB, DataSettings, named_arguments
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool, Rows
from pbfl_flwr.data.labels import by_name, names_in, numbered_classes, owner_names, shown
from pbfl_flwr.data.own.columns import CLIENT, LABEL, row_names
from pbfl_flwr.data.own.image_folder import image_size
from pbfl_flwr.data.own.images import decode_images, small_enough
from pbfl_flwr.data.sources.files import files_under, given_path
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.extras import require

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset
    from PIL.Image import Image

SHUFFLE_SEED = 42  # FederatedDataset shuffles with it before a partitioner is applied
ROW = "pbfl row"
NUMBERS = ("bool", "decimal", "float", "int", "uint")  # types whose names begin so; texts and times are none
QUANTITY = "ContinuousPartitioner"  # whose partition-by is a number that belongs to the inputs


def flwr_datasets(settings: DataSettings) -> Pool:
    """Return the samples of data-dir; with ``partitioner`` those of ``train``, with its partitions as natural clients.

    Raises:
        PbflError: if flwr-datasets is not installed, the dataset cannot be read, a column is missing or of another
            type, or the partitioner refuses the data.
    """
    require("dataset 'flwr-datasets'", "flwr_datasets")
    where = settings.data_dir
    files: list[Path] = []
    if not where.startswith(HUB):
        files = files_under(given_path(settings, "a folder written by save_to_disk, or hf://<id on the hub>"))
    elif not settings.download:
        raise PbflError(f"data-dir = '{where}' is on the hub; set download=true, or name a local copy")

    def decode(allocate: Allocate) -> Pool:
        return _decode(settings, allocate)

    return cached(settings, files, decode)


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk``."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _decode(settings: DataSettings, allocate: Allocate) -> Pool:
    train, test = _splits(settings)
    owner, notes, clients = None, list[str](), tuple[str, ...]()
    parts = [train] if test is None else [train, test]
    if settings.partitioner:
        ids, notes = _partition_ids(train, settings)
        dealt = np.flatnonzero(ids >= 0)
        owner, train = ids[dealt], train.select(dealt)
        if left := sum(map(len, parts)) - len(train):
            notes.append(
                f"{left:,} samples are not used: {settings.partitioner} deals 'train', maybe not all of it"
            )
        parts = [train]
    elif absent := [name for part in parts for name in train.column_names if name not in part.column_names]:
        raise PbflError(f"{settings.data_dir}: 'test' has no column '{absent[0]}', which 'train' has")
    elif CLIENT in train.column_names:
        distinct, owner = row_names(_column(parts, CLIENT), settings.data_dir, "client")
        clients = owner_names(distinct)
    label = _label_column(train, settings)
    classes, labels = _labels(parts, label, settings)
    inputs, more, columns = _inputs(parts, label, settings, allocate)
    return Pool(inputs, labels, classes, len(train), owner, clients, notes=(*notes, *more), columns=columns)


def _column(parts: Sequence[Dataset], name: str) -> pd.Series:
    import pandas as pd

    return pd.Series([value for part in parts for value in part[name]], name=name, dtype=object)


def _splits(settings: DataSettings) -> tuple[Dataset, Dataset | None]:
    """Return the training and the test part; None: it has no samples."""
    import datasets

    where = settings.data_dir
    try:
        if where.startswith(HUB):
            content = datasets.load_dataset(where.removeprefix(HUB))
        else:
            with _quietly():
                saved = is_saved_dataset(Path(where))
                content = _saved_splits(Path(where)) if saved else datasets.load_dataset(where)
    except Exception as error:  # the library raises what its many formats raise
        raise PbflError(f"dataset 'flwr-datasets': {where} cannot be read ({_line(error)})") from error
    parts = {split: _plain(part) for split, part in content.items() if len(part)}
    if "train" not in parts:
        raise PbflError(f"{where} has samples in {', '.join(parts) or 'no split'}; must be in 'train'")
    return parts["train"], parts.get("test")


def _saved_splits(folder: Path) -> dict[str, Dataset]:
    """Return the parts that ``save_to_disk`` wrote, but for those without samples, which cannot be loaded."""
    from datasets import load_from_disk

    index, splits = folder / "dataset_dict.json", {"train": folder}
    if index.is_file():
        splits = {split: folder / split for split in json.loads(index.read_bytes())["splits"]}
    states = {split: json.loads((part / "state.json").read_bytes()) for split, part in splits.items()}
    return {split: load_from_disk(str(splits[split])) for split in splits if states[split]["_data_files"]}


def _plain(part: Dataset) -> Dataset:
    """Return all columns of a part as Python's values and decoded images, whatever it was saved to give."""
    from datasets import Image

    part = part.with_format(None)
    for name, feature in part.features.items():
        if isinstance(feature, Image) and not feature.decode:
            part = part.cast_column(name, replace(feature, decode=True))
    return part


def _partition_ids(train: Dataset, settings: DataSettings) -> tuple[Rows, list[str]]:
    """Return the partition of every row, as ``FederatedDataset`` deals it, -1 for none, and its warnings."""
    from datasets import Dataset, Image
    from flwr_datasets import partitioner as partitioners

    name, who = settings.partitioner, f"partitioner = '{settings.partitioner}'"
    kind = getattr(partitioners, name, None)
    names = [entry for entry in sorted(partitioners.__all__) if entry != "Partitioner"]
    if name not in names or kind is None:
        raise PbflError(f"{who}: flwr-datasets has no such class; must be one of {', '.join(names)}")
    columns = [column for column, feature in train.features.items() if not isinstance(feature, Image)]
    numbered = train.select_columns(columns).add_column(ROW, np.arange(len(train)))
    ids = np.full(len(train), -1, dtype=np.int64)
    try:
        with _quietly() as said:
            partitioner = kind(**_arguments(settings))
            # Of a dataset in files the library would cache indices beside them, in the data folder.
            in_memory = Dataset(numbered.with_format("arrow")[:], info=numbered.info)
            partitioner.dataset = in_memory.shuffle(seed=SHUFFLE_SEED)
            partitions = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
            dealt = [np.asarray(rows[ROW], dtype=np.int64) for rows in partitions if ROW in rows.column_names]
    except Exception as error:  # the library raises what its many classes raise
        raise PbflError(f"{who} refuses this: {_line(error)}; 'train' has {len(train)} samples") from error
    if len(dealt) < len(partitions):
        raise PbflError(f"{who} deals columns, and clients have rows; must be another class of flwr-datasets")
    if not all(map(len, dealt)):
        empty = [len(rows) for rows in dealt].index(0)
        raise PbflError(f"{who} gives partition {empty} of {len(dealt)} no sample; must be fewer partitions")
    for number, rows in enumerate(dealt):
        ids[rows] = number
    return ids, [
        *dict.fromkeys(f"{name}: {_line(each.message)}" for each in said if each.category is UserWarning)
    ]


@contextmanager
def _quietly() -> Iterator[list[warnings.WarningMessage]]:
    """Keep the library's warnings and progress bars from standard error; yield the list of warnings."""
    with warnings.catch_warnings(record=True) as said, redirect_stderr(StringIO()):
        warnings.simplefilter("always")
        yield said


def _arguments(settings: DataSettings) -> dict[str, Any]:
    """Return the partitioner's arguments; a list of lists is an array."""
    options = named_arguments(settings.partitioner_settings)
    return {
        name.replace("-", "_"): np.array(value)
        if isinstance(value, list) and value and all(isinstance(row, list) for row in value)
        else value
        for name, value in options.items()
    }


def _label_column(train: Dataset, settings: DataSettings) -> str:
    from datasets import ClassLabel

    names, where = train.column_names, settings.data_dir
    if column := settings.label_column or (LABEL if LABEL in names else ""):
        if column not in names:
            raise PbflError(f"label-column = '{column}': {where} has no such column; it has {shown(names)}")
        return str(column)
    named = [name for name, feature in train.features.items() if isinstance(feature, ClassLabel)]
    classes = [name for name in named if name != CLIENT]
    if len(classes) != 1:
        raise PbflError(f"{where}: set label-column to the column with the classes; it has {shown(names)}")
    return str(classes[0])


def _labels(parts: Sequence[Dataset], column: str, settings: DataSettings) -> tuple[tuple[str, ...], Rows]:
    from datasets import ClassLabel

    where, features = settings.data_dir, [part.features[column] for part in parts]
    place = f"{where}, column '{column}'"
    values = _column(parts, column)
    if not isinstance(features[0], ClassLabel):
        return numbered_classes(*row_names(values, where, "class"), settings.classes, place)
    if any(feature != features[0] for feature in features):
        raise PbflError(f"{place}: 'train' and 'test' do not have the same classes")
    names = features[0].names
    known = np.array([value in range(len(names)) for value in values], dtype=bool)
    if not known.all():
        row = int(known.argmin())
        found = "the cell is empty" if values[row] is None else f"{values[row]} stands for no class"
        raise PbflError(f"{where}, row {row + 1}, column '{column}': {found}; a class is expected")
    distinct, numbers = names_in(
        names, np.arange(len(names)), "class", lambda id_: f"{place}, name {id_ + 1}"
    )
    codes = numbers[values.to_numpy(np.int64)]
    if settings.classes:  # only those that occur must be among them
        present, codes = np.unique(codes, return_inverse=True)
        return numbered_classes([distinct[code] for code in present], codes, settings.classes, place)
    classes = tuple(dict.fromkeys(distinct[number] for number in numbers))  # in the order of the ClassLabel
    return classes, np.array(by_name(distinct, classes, place), dtype=np.int64)[codes]


def _inputs(
    parts: Sequence[Dataset], label: str, settings: DataSettings, allocate: Allocate
) -> tuple[NDArray[Any], tuple[str, ...], tuple[str, ...]]:
    """Return the inputs (N, ...), notes, and the names of features."""
    from datasets import ClassLabel, Image, Value

    features, where = parts[0].features, settings.data_dir
    about = {label, CLIENT}
    if settings.partitioner and settings.partitioner != QUANTITY:  # a client's name, or a class
        about.add(str(_arguments(settings).get("partition_by")))
    others = {name: feature for name, feature in features.items() if name not in about}
    images = [name for name, feature in others.items() if isinstance(feature, Image)]
    if len(images) == 1:
        with small_enough(Path(where)):
            channels, side = image_size(settings, channels=None)
            samples = _images(parts, images[0], where)
            total = sum(map(len, parts))
            inputs, _, notes = decode_images(samples, total, allocate, side, Path(where), channels)
        return inputs, notes, ()
    arrays = [name for name, feature in others.items() if not isinstance(feature, (Value, ClassLabel))]
    if len(images) > 1 or len(arrays) > 1:
        raise PbflError(f"{where} has several columns of inputs: {', '.join(images or arrays)}; must be one")
    names = arrays or list(others)
    if not names:
        raise PbflError(f"{where} has no column besides '{label}'")
    types = {name: _type_of_cells(features[name]) for name in names}
    if odd := {name: type_ for name, type_ in types.items() if not type_.startswith(NUMBERS)}:
        raise PbflError(
            f"{where}, columns {shown([*odd])}: must be numbers, arrays of one shape, or an image, not "
            f"{' and '.join(sorted({*odd.values()}))}"
        )
    try:
        columns = [
            np.concatenate(
                [np.asarray(part.with_format("numpy")[name][:], dtype=np.float32) for part in parts]
            )
            for name in names
        ]
    except (TypeError, ValueError) as error:
        raise PbflError(
            f"{where}, columns {shown(names)}: must be numbers, arrays of one shape, or an image "
            f"({_line(error)})"
        ) from error
    for name, column in zip(names, columns, strict=True):
        finite = np.isfinite(column).reshape(len(column), -1).all(axis=1)
        if not finite.all():
            raise PbflError(
                f"{where}, row {finite.argmin() + 1}, column '{name}': the cell is empty or not finite; must be numbers"
            )
    return (columns[0], (), ()) if arrays else (np.stack(columns, axis=1), (), tuple(names))


def _type_of_cells(feature: Any) -> str:
    """Return the name of a column's type, of lists that of their entries."""
    while (entries := getattr(feature, "feature", None)) is not None:
        feature = entries
    return str(getattr(feature, "dtype", type(feature).__name__))


def _images(parts: Sequence[Dataset], column: str, where: str) -> Iterator[tuple[Image, int]]:
    """Yield every row's image, and 0."""
    from PIL.Image import Image

    for row, cells in enumerate(chain(*(part.select_columns([column]) for part in parts)), start=1):
        if not isinstance(cells[column], Image):
            raise PbflError(f"{where}, row {row}, column '{column}': the cell holds no image")
        yield cells[column], 0


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
