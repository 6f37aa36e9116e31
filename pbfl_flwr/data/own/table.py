"""Features in a CSV or Parquet file: one row per sample, one column per feature, one column with the classes.

All columns except class and client (:mod:`pbfl_flwr.data.own.columns`) must hold numbers in every row; they are not
normalised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.labels import shown
from pbfl_flwr.data.own.columns import (
    CLIENT,
    classes_and_clients,
    column_names,
    label_column,
    read_table,
    table_path,
)
from pbfl_flwr.errors import PbflError

if TYPE_CHECKING:
    import pandas as pd

_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")


def table(settings: DataSettings) -> Pool:
    """Return the rows of the CSV or Parquet file data-dir.

    Raises:
        PbflError: if it cannot be read, a column is missing, or a cell is empty or not a number; with file, row (from
            1, below the header) and column.
    """
    path = table_path(settings)

    def decode(allocate: Allocate) -> Pool:
        return _decode(path, settings)

    return cached(settings, [path], decode)


def features(path: Path, columns: Sequence[str] | None, without: Sequence[str] = ()) -> NDArray[np.float32]:
    """Return columns of a file by name, (N, F), as input for a trained model.

    Args:
        path: a CSV or Parquet file.
        columns: the columns, in this order; None takes all.
        without: names to leave out if ``columns`` is None.

    Raises:
        PbflError: as :func:`table`.
    """
    names = column_names(path)
    columns = [name for name in names if name not in without] if columns is None else columns
    if absent := [name for name in columns if name not in names]:
        raise PbflError(f"{path} has no column '{absent[0]}'; it has {shown(names)}")
    if not columns:
        raise PbflError(f"{path} has no feature column; it has {shown(names)}")
    return _numbers(read_table(path, names, ())[[*columns]], path)


def _decode(path: Path, settings: DataSettings) -> Pool:
    names = column_names(path)
    label = label_column(path, names, settings)
    columns = tuple(name for name in names if name not in (label, CLIENT))
    if not columns:
        raise PbflError(f"{path} has no feature column besides '{label}'")
    if index := next((name for name in columns if _INDEX.fullmatch(name)), None):
        raise PbflError(
            f"{path}: column '{index}' looks like a pandas index or an unnamed column, and an index can reveal "
            "the class; remove it (index=False), or rename it"
        )
    rows = read_table(path, names, {label, CLIENT})
    inputs = _numbers(rows[[*columns]], path)
    classes, labels, owner, clients = classes_and_clients(path, rows, label, settings)
    if settings.shape:
        if math.prod(settings.shape) != len(columns):
            raise PbflError(
                f"input-shape = '{settings.input_shape}' needs {math.prod(settings.shape)} numbers, {path} has "
                f"{len(columns)} feature columns"
            )
        inputs = inputs.reshape(-1, *settings.shape)
    return Pool(inputs, labels, classes, len(labels), owner, clients, columns=columns)


def _numbers(rows: pd.DataFrame, path: Path) -> NDArray[np.float32]:
    """Return the cells as (N, F).

    Raises:
        PbflError: naming the first row of a column without a finite number.
    """
    import pandas as pd

    numbers = np.empty(rows.shape, np.float32)
    for place, name in enumerate(rows):
        column = rows[name]
        cells = column if pd.api.types.is_numeric_dtype(column) else column.astype(object)
        with np.errstate(over="ignore"):
            values = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)
            numbers[:, place] = values
        finite = np.isfinite(numbers[:, place])
        if not finite.all():
            row = int(finite.argmin())
            cell = column.iloc[row]
            missing = cell is None or str(cell).strip().lower() in ("", "nan")
            what = "is beyond float32 (3.4e38)" if np.isfinite(values[row]) else "is not a finite number"
            problem = "the cell is empty" if missing else f"'{str(cell)[:40]}' {what}"
            raise PbflError(f"{path}, row {row + 1}, column '{name}': {problem}; must be a number")
    return numbers
