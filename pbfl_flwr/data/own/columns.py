"""CSV or Parquet files as blocks of named columns, with the class and client columns common to all of them.

CSV is UTF-8 with a header line and ',', ';' or a tab as separator. Parquet needs pyarrow. Classes are in
``label-column``, by default in the column ``label``, else in the last one. They are read as text and numbered in sorted
order (``labels`` lists them all). A column ``client`` holds the natural client.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import MAX_CLASSES, DataSettings, class_name
from pbfl_flwr.data.labels import numbered_classes
from pbfl_flwr.data.sources.files import check_memory
from pbfl_flwr.errors import PbflError

SUFFIXES = (".csv", ".tsv", ".parquet")
MAX_COLUMNS = 65_536
LABEL, CLIENT = "label", "client"
_SEPARATORS = ",;\t"
_FORM = "separated by ',', ';' or a tab, with their names in the first line"
_ROWS_AT_A_TIME = 4096
_FRACTION = re.compile(r"-?\d*\.\d+(e-?\d+)?", re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"')
_WHOLE = re.compile(r"(-?\d+)\.0*")

Block = Sequence[Sequence[Any] | NDArray[Any]]
"""A block of rows, column by column: text from CSV, any type from Parquet."""


@dataclass
class _Names:
    """The distinct texts of a column, numbered by first occurrence, and the number of every row."""

    numbers: dict[str, int] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)

    def add(self, texts: Iterable[str]) -> None:
        self.codes.extend(self.numbers.setdefault(text, len(self.numbers)) for text in texts)


class LabelColumns:
    """Class and client of every row, collected block by block.

    Args:
        path: the file, for messages.
        names: its column names.
        settings: ``label-column`` and ``labels``.

    Raises:
        PbflError: if there are fewer than two columns, or label-column is not one of them.
    """

    def __init__(self, path: Path, names: Sequence[str], settings: DataSettings) -> None:
        if len(names) < 2:
            raise PbflError(f"{path} has {len(names)} columns; must be 2 or more, {_FORM}")
        wanted = settings.label_column
        if wanted and wanted not in names:
            raise PbflError(f"label-column = '{wanted}': {path} has no such column; it has {shown(names)}")
        self._path, self._names, self._settings = path, names, settings
        self._labels, self._owners = _Names(), _Names()
        self.label = names.index(wanted or (LABEL if LABEL in names else names[-1]))
        owner = names.index(CLIENT) if CLIENT in names else None
        self.owner = None if owner == self.label else owner

    @property
    def rest(self) -> list[int]:
        """Indices of all other columns."""
        return [place for place in range(len(self._names)) if place not in (self.label, self.owner)]

    def add(self, first: int, block: Block) -> None:
        """Add a block, whose first row has the number ``first``.

        Raises:
            PbflError: if a class or client is empty, or there are more than MAX_CLASSES classes.
        """
        name = self._names[self.label]
        self._labels.add(_texts(block[self.label], name, first, self._path))
        if len(self._labels.numbers) > MAX_CLASSES:
            raise PbflError(
                f"{self._path}, column '{name}' has more than {MAX_CLASSES} different values; set label-column to "
                "the one with the classes"
            )
        if self.owner is not None:
            self._owners.add(_texts(block[self.owner], CLIENT, first, self._path))

    def result(self) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the class names, every row's class, and every row's client if there is such a column.

        Raises:
            PbflError: if there are no rows, or a class is a fractional number.
        """
        name = self._names[self.label]
        if not self._labels.codes:
            raise PbflError(f"{self._path} has no rows")
        if fraction := next((text for text in self._labels.numbers if _FRACTION.fullmatch(text)), None):
            raise PbflError(
                f"{self._path}, column '{name}' holds {fraction}, which is not a class; set label-column to the "
                "right one"
            )
        codes = np.array(self._labels.codes, dtype=np.int64)
        where = f"{self._path}, column '{name}'"
        classes, numbers = numbered_classes(list(self._labels.numbers), codes, self._settings.classes, where)
        who = None
        if self.owner is not None:
            clients = np.array(list(self._owners.numbers))[self._owners.codes]
            who = np.unique(clients, return_inverse=True)[1].astype(np.int64)
        return classes, numbers, who


def _texts(column: Sequence[Any] | NDArray[Any], name: str, first: int, path: Path) -> Iterator[str]:
    for row, cell in enumerate(column):
        text = "" if cell is None else class_name(str(cell))
        if text.lower() in ("", "nan"):
            raise PbflError(
                f"{path}, row {first + row}, column '{name}': the cell is empty; a class is expected"
            )
        whole = _WHOLE.fullmatch(text)  # integers from a column with missing values are written as 1.0, 2.0
        yield whole[1] if whole else text


@contextmanager
def opened(path: Path) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[int, Block]]]]:
    """Open a table: its column names, and its blocks with the number of their first row, from 1."""
    parquet = path.suffix.lower() == ".parquet"
    try:
        with _parquet(path) if parquet else _csv(path) as (names, blocks):
            _check_names(names, path)
            yield names, blocks
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PbflError(f"{path} is not a readable table: {' '.join(str(error).split())}") from error


@contextmanager
def _csv(path: Path) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[int, Block]]]]:
    # A number takes at least two characters, and four bytes in each of two copies.
    check_memory(4 * path.stat().st_size, path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline(2**24)
        separator = max(_SEPARATORS, key=_QUOTED.sub("", head).count)
        file.seek(0)
        reader = csv.reader(file, delimiter=separator, strict=True)
        names = tuple(name.strip() for name in next(reader, []))

        def blocks() -> Iterator[tuple[int, Block]]:
            first = 1
            while rows := list(islice(reader, _ROWS_AT_A_TIME)):
                filled = [row for row in rows if row]  # without empty lines
                for number, row in enumerate(filled, start=first):
                    if len(row) != len(names):
                        raise PbflError(
                            f"{path}, row {number}: {len(row)} cells, the first line names {len(names)} columns"
                        )
                if filled:
                    yield first, list(zip(*filled, strict=True))
                first += len(filled)

        yield names, blocks()


@contextmanager
def _parquet(path: Path) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[int, Block]]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise PbflError(
            f"{path} needs pyarrow: pip install 'pbfl-flwr[parquet]'; CSV works without it"
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
    if not names:
        raise PbflError(f"{path} has no columns; they are {_FORM}")
    if len(names) > MAX_COLUMNS:
        raise PbflError(f"{path} has {len(names)} columns; must be at most {MAX_COLUMNS}")
    if "" in names:
        raise PbflError(f"{path}: column {names.index('') + 1} has no name; remove it if it is an index")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise PbflError(f"{path} has two columns '{twice[0]}'; does its first line name the columns?")
    if number := next((name for name in names if _FRACTION.fullmatch(name)), None):
        raise PbflError(f"{path}: '{number}' is not a column name; the first line must hold the column names")


def shown(names: Sequence[str]) -> str:
    """Return the first twelve column names for a message."""
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
