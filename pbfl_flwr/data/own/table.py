"""Features in a CSV or Parquet file: one row per sample, one column per feature, one column with the classes.

All columns except class and client (:mod:`pbfl_flwr.data.own.columns`) must hold numbers in every row; they are not
normalised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.own.columns import SUFFIXES, Block, LabelColumns, opened, shown
from pbfl_flwr.data.sources.files import given_path
from pbfl_flwr.errors import PbflError

_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")


def table(settings: DataSettings) -> Pool:
    """Return the rows of the CSV or Parquet file data-dir.

    Raises:
        PbflError: if it cannot be read, a column is missing, or a cell is empty or not a number; with file, row (from
            1, below the header) and column.
    """
    path = given_path(settings, f"a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise PbflError(f"{path} is not a table; must be a file that ends in {', '.join(SUFFIXES)}")

    def decode(allocate: Allocate) -> Pool:
        return _decode(path, settings)

    options = (settings.label_column, settings.input_shape, *settings.classes)
    return cached(settings.dataset, [path], decode, options)


def features(path: Path, wanted: Sequence[str] | None, without: Sequence[str] = ()) -> NDArray[np.float32]:
    """Return columns of a file by name, (N, F), as input for a trained model.

    Args:
        path: a CSV or Parquet file.
        wanted: the columns, in this order; None takes all.
        without: names to leave out if ``wanted`` is None.

    Raises:
        PbflError: as :func:`table`.
    """
    with opened(path) as (names, blocks):
        wanted = [name for name in names if name not in without] if wanted is None else wanted
        if absent := [name for name in wanted if name not in names]:
            raise PbflError(f"{path} has no column '{absent[0]}'; it has {shown(names)}")
        if not wanted:
            raise PbflError(f"{path} has no feature column; it has {shown(names)}")
        places = [names.index(name) for name in wanted]
        parts = [_numbers(block, places, names, first, path) for first, block in blocks]
    return np.concatenate(parts) if parts else np.empty((0, len(wanted)), np.float32)


def _decode(path: Path, settings: DataSettings) -> Pool:
    parts = []
    with opened(path) as (names, blocks):
        members = LabelColumns(path, names, settings)
        if not (places := members.rest):
            raise PbflError(f"{path} has no feature column besides '{names[members.label]}'")
        if index := next((names[place] for place in places if _INDEX.fullmatch(names[place])), None):
            raise PbflError(
                f"{path}: column '{index}' looks like a pandas index or an unnamed column, and an index can reveal "
                "the class; remove it (index=False), or rename it"
            )
        for first, block in blocks:
            parts.append(_numbers(block, places, names, first, path))
            members.add(first, block)
    classes, numbers, who = members.result()
    inputs = np.concatenate(parts)
    if settings.shape:
        if math.prod(settings.shape) != len(places):
            raise PbflError(
                f"input-shape = '{settings.input_shape}' needs {math.prod(settings.shape)} numbers, {path} has "
                f"{len(places)} feature columns"
            )
        inputs = inputs.reshape(-1, *settings.shape)
    columns = tuple(names[place] for place in places)
    return Pool(inputs, numbers, classes, len(numbers), who, columns=columns)


def _numbers(
    block: Block, places: Sequence[int], names: Sequence[str], first: int, path: Path
) -> NDArray[np.float32]:
    """Return the columns at these indices as (rows, F); ``first`` is the number of the block's first row."""
    columns = []
    for place in places:
        cells = block[place]
        # Text becomes objects: in an array of strings every cell takes the size of the longest.
        column = cells if isinstance(cells, np.ndarray) else np.asarray(cells, dtype=object)
        try:
            if column.dtype.kind not in "biufOU":
                raise ValueError(f"{column.dtype} is not numeric")
            with np.errstate(over="ignore"):
                values = column.astype(np.float64).astype(np.float32)
        except (ValueError, TypeError):
            values = np.array([_float(cell) for cell in block[place]], dtype=np.float32)
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            cell = block[place][row]
            missing = cell is None or str(cell).strip().lower() in ("", "nan")
            problem = "the cell is empty" if missing else f"'{str(cell)[:40]}' is not a finite number"
            raise PbflError(
                f"{path}, row {first + row}, column '{names[place]}': {problem}; must be a number"
            )
        columns.append(values)
    return np.stack(columns, axis=1)


def _float(cell: object) -> float:
    """Return the number in a cell, NaN if there is none or float32 cannot hold it."""
    try:
        value = float(cell) if isinstance(cell, str | SupportsFloat) else math.nan
    except (ValueError, TypeError):  # NumPy dates have a __float__ that raises
        return math.nan
    return value if abs(value) <= float(np.finfo(np.float32).max) else math.nan
