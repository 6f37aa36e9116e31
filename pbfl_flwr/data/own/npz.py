"""NumPy archives, and the smartphone activity data (HAR) in such a file."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool, Rows
from pbfl_flwr.data.labels import HINT, names_in, numbered_classes, owner_names, shown
from pbfl_flwr.data.sources.files import UNREADABLE, check_memory, given_path
from pbfl_flwr.data.validation import check_labels
from pbfl_flwr.errors import PbflError

HAR_LABELS = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")


def npz(settings: DataSettings) -> Pool:
    """Return the arrays ``x``, ``y`` and, if present, ``client`` of the .npz file data-dir.

    ``x`` uint8 (N, C, H, W) or (N, H, W) are images; other numbers become float32 features without normalisation.
    ``y`` are names, or integers 0..K-1, without gaps unless ``labels`` names all K. ``client`` (integers or strings)
    are the natural clients.
    """
    path = given_path(settings, "the path of an .npz file with the arrays x, y and optionally client")
    return _load(settings, path, "client", None)


def har(settings: DataSettings) -> Pool:
    """Return UCI Human Activity Recognition: windows (9, 128) of smartphone signals, 6 activities.

    data-dir is an .npz file with the arrays ``x`` (N, 9, 128), ``y`` 0..5 and ``subject``, or a folder with a
    har.npz. The people (``subject``) are the natural clients; there is no official test part.
    """
    path = given_path(settings, "the path of an .npz file with the arrays x, y and subject")
    return _load(settings, path / "har.npz" if path.is_dir() else path, "subject", HAR_LABELS)


def _load(settings: DataSettings, path: Path, client_key: str, label_names: tuple[str, ...] | None) -> Pool:
    name = settings.dataset
    if not path.is_file():
        raise PbflError(f"dataset '{name}': {path} is not a file; must be an .npz file")

    def decode(allocate: Allocate) -> Pool:
        needed = ("x", "y", *((client_key,) if label_names else ()))
        arrays = read_arrays(path, f"dataset '{name}'", needed, (client_key,))
        return pool_of_arrays(arrays, str(path), settings, client_key, label_names)

    return cached(settings, [path], decode)


def pool_of_arrays(
    arrays: Mapping[str, NDArray[Any]],
    source: str,
    settings: DataSettings,
    client_key: str = "client",
    label_names: tuple[str, ...] | None = None,
) -> Pool:
    """Return the samples in arrays as :func:`npz` reads them.

    Args:
        arrays: ``x``, ``y`` and, optionally, the natural clients.
        source: where they are, for errors.
        settings: of the data.
        client_key: name of the array of clients.
        label_names: the names of the labels 0..K-1; None if ``labels`` or the data name them.

    Raises:
        PbflError: if an array does not hold what it should.
    """
    names, labels = _labels(arrays["y"], label_names, settings, source)
    clients: tuple[str, ...] = ()
    owner = None
    if client_key in arrays:
        distinct, owner = _column(arrays[client_key], source, client_key, "client")
        clients = owner_names(distinct, "id" if client_key == "client" else client_key)
    return Pool(_inputs(arrays["x"], source, settings.dataset), labels, names, len(labels), owner, clients)


def _labels(
    y: NDArray[Any], label_names: tuple[str, ...] | None, settings: DataSettings, source: str
) -> tuple[tuple[str, ...], Rows]:
    """Return the class names and the labels; numbers are positions in ``label_names`` if these are given."""
    where = f"{source}: y"
    distinct, codes = _column(y, source, "y", "class")
    if y.dtype.kind in "US" or (settings.classes and not label_names):
        return numbered_classes(distinct, codes, label_names or settings.classes, where)
    numbers = np.array([*map(int, distinct)], dtype=object)  # of any size
    if label_names:
        check_labels(numbers, where, len(label_names), f"the number of classes of '{settings.dataset}'")
        return label_names, numbers.astype(np.int64)[codes]
    if len(distinct) < 2:
        raise PbflError(f"{where} has only the label {distinct[0]}; must be 2 classes or more; {HINT}")
    if outside := [number for number in numbers if not 0 <= number < len(numbers)]:
        raise PbflError(
            f"{where} has the {len(distinct)} labels {shown(distinct)}; must be 0..{len(distinct) - 1} without gaps, "
            f"which {outside[-1]} is not; {HINT}"
        )
    return tuple(distinct), codes


def _column(values: NDArray[Any], source: str, key: str, what: str) -> tuple[list[str], Rows]:
    """Return the names in an array of classes or clients, and the number (N,) of every row's; whole numbers in order.

    Raises:
        PbflError: if it is no such array, or naming the first row that holds neither a name nor a whole number.
    """
    kind = values.dtype.kind
    if values.ndim != 1 or kind not in "iufUS":
        raise PbflError(
            f"{source}: {key} is {values.dtype} {values.shape}; must be names or whole numbers, (N,)"
        )
    if not len(values):
        raise PbflError(f"{source} has no samples; must be 1 or more")

    def place(row: int) -> str:
        return f"{source}: {key}[{row}]"

    wrong: NDArray[np.bool_] = np.zeros(len(values), dtype=np.bool_)
    fault = "it holds what is no character"
    if kind == "f":
        wrong = ~np.isfinite(values) | (values != np.round(values))
        odd = values[wrong.argmax()]
        fault = "the cell is empty" if np.isnan(odd) else f"{odd} is not a whole number"
    elif kind == "U" and values.itemsize:
        points = np.ascontiguousarray(values).view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
        wrong = points.reshape(len(values), -1).max(axis=1) > sys.maxunicode
    if wrong.any():
        raise PbflError(f"{place(int(wrong.argmax()))}: {fault}; a {what} is expected")
    distinct, codes = np.unique(values, return_inverse=True)
    codes = codes.astype(np.int64)
    if kind in "US":
        return names_in(distinct.tolist(), codes, what, place)
    return [str(int(number)) for number in distinct], codes


def read_arrays(
    path: Path, who: str, needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Return arrays of an .npz file.

    Args:
        path: the file.
        who: prefix of error messages.
        needed: names of the required arrays.
        optional: names of those that the file may lack.

    Raises:
        PbflError: if it is not an .npz file, lacks an array, or one of these holds objects or is no array.
    """
    try:
        with zipfile.ZipFile(path) as members:
            check_memory(sum(member.file_size for member in members.infolist()), path)
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise PbflError(f"{who}: {path} is a single array; must be an .npz file")
            if absent := [key for key in needed if key not in archive]:
                raise PbflError(f"{who}: {path} has no array '{absent[0]}'; it has {sorted(archive.files)}")
            arrays = {key: archive[key] for key in (*needed, *optional) if key in archive}
            if bare := [key for key, array in arrays.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"'{bare[0]}' does not begin as an array does")  # NumPy returns its bytes
            return arrays
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise PbflError(f"{who}: {path} is not a readable .npz file of plain arrays ({reason})") from error


def _inputs(values: NDArray[Any], source: str, name: str) -> NDArray[Any]:
    if values.ndim < 2 or values.dtype.kind not in "biufc":
        raise PbflError(
            f"dataset '{name}': x in {source} is {values.dtype} {values.shape}; must be numbers (N, ...)"
        )
    if np.iscomplexobj(values):
        raise PbflError(f"dataset '{name}': x in {source} is complex; must be real numbers")
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        with np.errstate(over="ignore"):  # validation refuses infinity, with its row
            return np.ascontiguousarray(values, dtype=np.float32)
    if values.ndim == 3:
        return np.ascontiguousarray(values[:, None])
    if values.shape[1] not in (1, 3, 4) and values.shape[3] in (1, 3, 4):
        raise PbflError(
            f"dataset '{name}': x in {source} has shape {values.shape}; must be images with channels first"
        )
    return np.ascontiguousarray(values)
