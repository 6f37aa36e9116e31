"""Features in a CSV or Parquet file: a row a sample, a column a feature, one column with the classes.

The classes stand in ``label-column``; without it in the column ``label``, else in the last one. They are text,
numbered in the order of their text (``labels`` names them all). A column ``client`` is the natural client. All other
columns must be numbers in every row; they are fed as they are. CSV is UTF-8, its first line names the columns, and
',', ';' or a tab separates them. Parquet needs pyarrow.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import MAX_CLASSES, DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.files import check_memory, given_path
from pbfl_flwr.data.labels import numbered_classes
from pbfl_flwr.errors import PbflError

SUFFIXES = (".csv", ".tsv", ".parquet")
MAX_COLUMNS = 65_536
LABEL, CLIENT = "label", "client"
_SEPARATORS = ",;\t"
_ROWS_AT_A_TIME = 4096
_FRACTION = re.compile(r"-?\d*\.\d+(e-?\d+)?", re.IGNORECASE)
_WHOLE = re.compile(r"(-?\d+)\.0*")

Block = Sequence[Sequence[Any] | NDArray[Any]]
"""Some rows of a file, column by column: text in CSV, anything in Parquet."""


@dataclass
class _Names:
    """The different texts of a column, numbered as they come, and every row's number."""

    numbers: dict[str, int] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)

    def add(self, texts: Iterable[str]) -> None:
        self.codes.extend(self.numbers.setdefault(text, len(self.numbers)) for text in texts)


def table(settings: DataSettings) -> Pool:
    """Return the rows of the CSV or Parquet file data-dir.

    Raises:
        PbflError: if it cannot be read, a column is missing, or a cell is empty or no number; with file, row (1 is the
            first one below the names) and column.
    """
    path = given_path(settings, f"a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise PbflError(f"{path} is no table; allowed is a file that ends in {', '.join(SUFFIXES)}")

    def decode(allocate: Allocate) -> Pool:
        return _decode(path, settings)

    options = (settings.label_column, settings.input_shape, *settings.classes)
    return cached(settings.dataset, [path], decode, options)


def features(path: Path, wanted: Sequence[str] | None, without: Sequence[str] = ()) -> NDArray[np.float32]:
    """Return columns of a file by their names, (N, F): what a trained model is asked about.

    Args:
        path: a CSV or Parquet file.
        wanted: the columns, in this order; None takes all.
        without: names that are left out where all are taken.

    Raises:
        PbflError: as :func:`table`.
    """
    with _opened(path) as (names, blocks):
        wanted = [name for name in names if name not in without] if wanted is None else wanted
        if absent := [name for name in wanted if name not in names]:
            raise PbflError(f"{path} has no column '{absent[0]}'; it has {_shown(names)}")
        places = [names.index(name) for name in wanted]
        parts = [_numbers(block, places, names, first, path) for first, block in blocks]
    return np.concatenate(parts) if parts else np.empty((0, len(wanted)), np.float32)


def _decode(path: Path, settings: DataSettings) -> Pool:
    labels, owners, parts = _Names(), _Names(), []
    with _opened(path) as (names, blocks):
        label = _label_place(names, settings.label_column, path)
        owner = names.index(CLIENT) if CLIENT in names and names.index(CLIENT) != label else None
        places = [place for place in range(len(names)) if place not in (label, owner)]
        if not places:
            raise PbflError(f"{path} has no feature column beside '{names[label]}'")
        for first, block in blocks:
            parts.append(_numbers(block, places, names, first, path))
            labels.add(_texts(block[label], names[label], first, path))
            if len(labels.numbers) > MAX_CLASSES:
                raise PbflError(
                    f"{path}, column '{names[label]}' has more than {MAX_CLASSES} different values; "
                    "label-column names the one with the classes"
                )
            if owner is not None:
                owners.add(_texts(block[owner], CLIENT, first, path))
    if not parts:
        raise PbflError(f"{path} has no rows")
    if fraction := next((name for name in labels.numbers if _FRACTION.fullmatch(name)), None):
        raise PbflError(
            f"{path}, column '{names[label]}' holds {fraction}, which is no class; label-column names the right one"
        )
    where = f"{path}, column '{names[label]}'"
    codes = np.array(labels.codes, dtype=np.int64)
    classes, numbers = numbered_classes(list(labels.numbers), codes, settings.classes, where)
    who = None
    if owner is not None:
        who = np.unique(np.array(list(owners.numbers))[owners.codes], return_inverse=True)[1].astype(np.int64)
    inputs = np.concatenate(parts)
    if settings.shape:
        if math.prod(settings.shape) != len(places):
            raise PbflError(
                f"input-shape = '{settings.input_shape}' takes {math.prod(settings.shape)} numbers, {path} has "
                f"{len(places)} feature columns"
            )
        inputs = inputs.reshape(-1, *settings.shape)
    columns = tuple(names[place] for place in places)
    return Pool(inputs, numbers, classes, len(numbers), who, columns=columns)


def _label_place(names: Sequence[str], wanted: str, path: Path) -> int:
    if wanted and wanted not in names:
        raise PbflError(f"label-column = '{wanted}': {path} has no such column; it has {_shown(names)}")
    chosen = wanted or (LABEL if LABEL in names else names[-1])
    return names.index(chosen)


def _numbers(
    block: Block, places: Sequence[int], names: Sequence[str], first: int, path: Path
) -> NDArray[np.float32]:
    """Return the columns at these places as (rows, F); ``first`` is the number of the block's first row."""
    columns = []
    for place in places:
        column = np.asarray(block[place])
        try:
            if column.dtype.kind not in "biufOU":
                raise ValueError(f"{column.dtype} is no number")
            with np.errstate(over="ignore"):
                values = column.astype(np.float64).astype(np.float32)
        except (ValueError, TypeError):
            values = np.array([_float(cell) for cell in block[place]], dtype=np.float32)
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            cell = block[place][row]
            missing = cell is None or str(cell).strip().lower() in ("", "nan")
            said = "the cell is empty" if missing else f"'{str(cell)[:40]}' is no finite number"
            raise PbflError(
                f"{path}, row {first + row}, column '{names[place]}': {said}; allowed are numbers"
            )
        columns.append(values)
    return np.stack(columns, axis=1)


def _float(cell: object) -> float:
    """Return the number in a cell as a float32 can hold it, NaN if there is none."""
    try:
        value = float(cell) if isinstance(cell, str | SupportsFloat) else math.nan
    except (ValueError, TypeError):  # NumPy's dates have __float__ and refuse
        return math.nan
    return value if abs(value) <= float(np.finfo(np.float32).max) else math.nan


def _texts(column: Sequence[Any] | NDArray[Any], name: str, first: int, path: Path) -> Iterator[str]:
    for row, cell in enumerate(column):
        text = "" if cell is None else str(cell).strip()
        if text.lower() in ("", "nan"):
            raise PbflError(
                f"{path}, row {first + row}, column '{name}': the cell is empty; a class is expected"
            )
        whole = _WHOLE.fullmatch(text)  # a column of whole numbers that once had a gap is written 1.0, 2.0
        yield whole[1] if whole else text


@contextmanager
def _opened(path: Path) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[int, Block]]]]:
    """Open a table: the names of its columns, and its blocks with the number of their first row, from 1."""
    parquet = path.suffix.lower() == ".parquet"
    try:
        with _parquet(path) if parquet else _csv(path) as (names, blocks):
            _check_names(names, path)
            yield names, blocks
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PbflError(f"{path} is not a readable table: {' '.join(str(error).split())}") from error


@contextmanager
def _csv(path: Path) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[int, Block]]]]:
    check_memory(
        4 * path.stat().st_size, path
    )  # a number takes two characters or more, and becomes four bytes, twice
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline(2**24)
        separator = max(_SEPARATORS, key=head.count)
        file.seek(0)
        reader = csv.reader(file, delimiter=separator, strict=True)
        names = tuple(name.strip() for name in next(reader, []))

        def blocks() -> Iterator[tuple[int, Block]]:
            first = 1
            while rows := list(islice(reader, _ROWS_AT_A_TIME)):
                kept = [row for row in rows if row]  # an empty line is no row
                for number, row in enumerate(kept, start=first):
                    if len(row) != len(names):
                        raise PbflError(
                            f"{path}, row {number}: {len(row)} cells, the first line names {len(names)} columns"
                        )
                if kept:
                    yield first, list(zip(*kept, strict=True))
                first += len(kept)

        yield names, blocks()


@contextmanager
def _parquet(path: Path) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[int, Block]]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise PbflError(
            f"{path} needs pyarrow: pip install 'pbfl-flwr[parquet]'; CSV needs nothing"
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            names = tuple(str(name) for name in file.schema_arrow.names)
            check_memory(8 * file.metadata.num_rows * len(names), path)

            def blocks() -> Iterator[tuple[int, Block]]:
                first = 1
                for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                    yield first, [column.to_numpy(zero_copy_only=False) for column in batch.columns]
                    first += batch.num_rows

            yield names, blocks()
    except pa.ArrowException as error:
        raise PbflError(f"{path} is not a readable Parquet file: {' '.join(str(error).split())}") from error


def _check_names(names: Sequence[str], path: Path) -> None:
    if len(names) < 2:
        raise PbflError(
            f"{path} has {len(names)} columns; allowed are 2 or more, separated by ',', ';' or a tab, with their names "
            "in the first line"
        )
    if len(names) > MAX_COLUMNS:
        raise PbflError(f"{path} has {len(names)} columns; allowed are {MAX_COLUMNS}")
    if "" in names:
        raise PbflError(f"{path}: column {names.index('') + 1} has no name; leave an index column out")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise PbflError(f"{path} has two columns '{twice[0]}'; does its first line name the columns?")
    if number := next((name for name in names if _FRACTION.fullmatch(name)), None):
        raise PbflError(f"{path}: '{number}' is no name of a column; the first line must name the columns")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
