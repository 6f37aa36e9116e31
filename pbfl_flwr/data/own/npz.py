"""NumPy archives, and the smartphone activity data (HAR) in such a file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings, class_name
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool, Rows
from pbfl_flwr.data.labels import numbered_classes
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
        arrays = read_arrays(path, f"dataset '{name}'", ("x", "y", *((client_key,) if label_names else ())))
        names, labels = _labels(arrays["y"], label_names, settings, path)
        owner = None
        if client_key in arrays:
            column = arrays[client_key]
            if column.ndim != 1:
                raise PbflError(
                    f"dataset '{name}': array '{client_key}' has shape {column.shape}; must be (N,)"
                )
            owner = np.unique(column, return_inverse=True)[1].astype(np.int64)
        return Pool(_inputs(arrays["x"], path, name), labels, names, len(labels), owner)

    return cached(settings, [path], decode)


def _labels(
    y: NDArray[Any], label_names: tuple[str, ...] | None, settings: DataSettings, path: Path
) -> tuple[tuple[str, ...], Rows]:
    """Return the class names and the labels; integers in y are indices into the list of names."""
    if y.dtype.kind == "U" and y.ndim == 1 and not label_names:
        distinct, codes = np.unique(
            np.array([class_name(name) for name in y], dtype=str), return_inverse=True
        )
        if "" in distinct:
            raise PbflError(f"{path}: y holds an empty string; expected is a class name")
        return numbered_classes(distinct.tolist(), codes.astype(np.int64), settings.classes, str(path))
    names = label_names or settings.classes
    check_labels(y, settings.dataset, len(names) or None)
    return names or tuple(str(k) for k in range(int(y.max()) + 1)), y.astype(np.int64)


def read_arrays(path: Path, who: str, needed: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file.

    Args:
        path: the file.
        who: prefix of error messages.
        needed: names of the required arrays.

    Raises:
        PbflError: if it is not an .npz file, holds objects, or lacks an array.
    """
    try:
        with zipfile.ZipFile(path) as members:
            check_memory(sum(member.file_size for member in members.infolist()), path)
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise PbflError(f"{who}: {path} is a single array; must be an .npz file")
            if absent := [key for key in needed if key not in archive]:
                raise PbflError(f"{who}: {path} has no array '{absent[0]}'; it has {sorted(archive.files)}")
            return dict(archive)
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise PbflError(f"{who}: {path} is not a readable .npz file of plain arrays ({reason})") from error


def _inputs(values: NDArray[Any], path: Path, name: str) -> NDArray[Any]:
    if values.ndim < 2 or not (np.issubdtype(values.dtype, np.number) or values.dtype == np.bool_):
        raise PbflError(
            f"dataset '{name}': x in {path} is {values.dtype} {values.shape}; must be numbers (N, ...)"
        )
    if np.iscomplexobj(values):
        raise PbflError(f"dataset '{name}': x in {path} is complex; must be real numbers")
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        with np.errstate(over="ignore"):  # validation refuses infinity, with its row
            return np.ascontiguousarray(values, dtype=np.float32)
    if values.ndim == 3:
        return np.ascontiguousarray(values[:, None])
    if values.shape[1] not in (1, 3, 4) and values.shape[3] in (1, 3, 4):
        raise PbflError(
            f"dataset '{name}': x in {path} has shape {values.shape}; must be images with channels first"
        )
    return np.ascontiguousarray(values)
