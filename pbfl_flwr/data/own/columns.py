"""CSV or Parquet files as pandas tables, with the class and client columns common to all of them.

CSV is UTF-8 with a header line and ',', ';' or a tab as separator. Parquet needs pyarrow. Classes are in
``label-column``, by default in the column ``label``, else in the last one but ``client``, which holds the natural
client. They are read as text and numbered in sorted order (``labels`` lists them all).

pandas is imported where it is used: it takes half a second, which a device would pay at every message.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pbfl_flwr.config import MAX_CLASSES, DataSettings
from pbfl_flwr.data.contract import Rows
from pbfl_flwr.data.labels import FRACTION, names_in, numbered_classes, owner_names, shown
from pbfl_flwr.data.sources.files import check_memory, given_path
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.extras import require

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".parquet")
MAX_COLUMNS = 65_536
LABEL, CLIENT = "label", "client"
_SEPARATORS = ",;\t"
_FORM = "separated by ',', ';' or a tab, with their names in the first line"
_QUOTED = re.compile(r'"[^"]*"')


def table_path(settings: DataSettings) -> Path:
    """Return data-dir, which must be a CSV or Parquet file.

    Raises:
        PbflError: if it is not.
    """
    what = f"a file that ends in {', '.join(SUFFIXES)}"
    path = given_path(settings, what)
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise PbflError(f"{path} is not a table; must be {what}")
    return path


def column_names(path: Path) -> tuple[str, ...]:
    """Return the column names of a table.

    Raises:
        PbflError: if the file cannot be read or is too large for this machine's memory, there are no or too many
            columns, a column holds lists, a name is missing, repeated or a number, or pandas or pyarrow is not
            installed.
    """
    require(str(path), *["pyarrow"] * (path.suffix.lower() == ".parquet"), "pandas")
    with _readable(path):
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            metadata = pq.read_metadata(path)
            fields = metadata.schema.to_arrow_schema()
            names = tuple(str(name) for name in fields.names)
            if nested := next((str(field.name) for field in fields if field.type.num_fields), ""):
                raise PbflError(f"{path}, column '{nested}' holds lists; must be numbers or names")
            check_memory(_parquet_bytes(metadata), path)
        else:
            # A number takes at least two characters, 8 bytes in pandas' table, and 4 as float32.
            check_memory(6 * path.stat().st_size, path)
            with path.open(encoding="utf-8-sig", newline="") as file:
                names, _ = _read_header(file)
    _check_names(names, path)
    return names


def read_table(path: Path, names: Sequence[str], texts: Collection[str]) -> pd.DataFrame:
    """Return the rows of a table.

    Args:
        path: the file.
        names: its :func:`column_names`.
        texts: the columns that CSV must not read as numbers.

    Raises:
        PbflError: if it cannot be read, or a row has more cells than there are columns.
    """
    import pandas as pd

    with _readable(path):
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            # Texts as the file has them, each once: it may repeat a long one a million times in a few bytes. Unlike
            # pyarrow's read_table, this takes no folder name for a column.
            with pq.ParquetFile(path, read_dictionary=names) as parquet:
                table = parquet.read()
            check_memory(sum(map(_text_bytes, table.columns)), path)
            rows: pd.DataFrame = table.cast(_without_dictionaries(table.schema)).to_pandas(
                ignore_metadata=True
            )
            return rows
        with path.open(encoding="utf-8-sig", newline="") as file, warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # float_precision: round_trip is pandas 3.1's default
            warnings.simplefilter("error", pd.errors.ParserWarning)
            separator = _read_header(file)[1]
            return pd.read_csv(
                file,
                sep=separator,
                header=None,
                names=list(names),
                index_col=False,
                dtype=dict.fromkeys(texts, str),
                keep_default_na=False,
                float_precision="round_trip",
                low_memory=False,
            )


def _parquet_bytes(metadata: Any) -> int:
    """Return the memory that a Parquet file's values take, without texts: few bytes may stand for many values."""
    # A value takes up to 8 bytes in pyarrow's and pandas' tables each, and 4 as float32; some have another length.
    widths = [max(20, 3 * metadata.schema.column(place).length) for place in range(metadata.num_columns)]
    return int(metadata.num_rows * sum(widths))


def _text_bytes(column: Any) -> int:
    """Return the bytes of a column's texts where every row has its own, 0 if they are not read as a dictionary."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return 0
    lengths = (
        pc.sum(pc.take(pc.binary_length(chunk.dictionary).cast(pa.int64()), chunk.indices))
        for chunk in column.chunks
    )
    return sum(length.as_py() or 0 for length in lengths)


def _without_dictionaries(schema: Any) -> Any:
    import pyarrow as pa

    return pa.schema(
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in schema
    )


def _read_header(file: TextIO) -> tuple[tuple[str, ...], str]:
    """Read the header of a CSV file; return the column names and the separator."""
    head = file.readline(2**24)
    separator = max(_SEPARATORS, key=_QUOTED.sub("", head).count)
    file.seek(0)
    names = next(csv.reader(file, delimiter=separator, strict=True), [])
    return tuple(name.strip() for name in names), separator


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except PbflError:
        raise
    except (
        OSError,
        ValueError,
        csv.Error,
        Warning,
        MemoryError,
    ) as error:  # ValueError: parse errors of pandas and pyarrow
        raise PbflError(f"{path} is not a readable table: {' '.join(str(error).split())}") from error


def _check_names(names: Sequence[str], path: Path) -> None:
    if not names:
        raise PbflError(f"{path} has no columns; they are {_FORM}")
    if len(names) > MAX_COLUMNS:
        raise PbflError(f"{path} has {len(names)} columns; must be at most {MAX_COLUMNS}")
    if "" in names:
        raise PbflError(f"{path}: column {names.index('') + 1} has no name; remove it if it is an index")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise PbflError(f"{path} has two columns '{twice[0]}'; does its first line name the columns?")
    if number := next((name for name in names if FRACTION.fullmatch(name)), None):
        raise PbflError(f"{path}: '{number}' is not a column name; the first line must hold the column names")


def label_column(path: Path, names: Sequence[str], settings: DataSettings) -> str:
    """Return the name of the column with the classes.

    Raises:
        PbflError: if there are fewer than two columns, or label-column is not one of them.
    """
    if len(names) < 2:
        raise PbflError(f"{path} has {len(names)} columns; must be 2 or more, {_FORM}")
    column = settings.label_column
    if column and column not in names:
        raise PbflError(f"label-column = '{column}': {path} has no such column; it has {shown(names)}")
    return column or (LABEL if LABEL in names else [name for name in names if name != CLIENT][-1])


def classes_and_clients(
    path: Path, rows: pd.DataFrame, label: str, settings: DataSettings
) -> tuple[tuple[str, ...], Rows, Rows | None, tuple[str, ...]]:
    """Return the class names, every row's class, and if there are clients every row's, and their names.

    Raises:
        PbflError: if there are no rows, a class or client is empty or a fraction, or there are more than MAX_CLASSES
            classes.
    """
    if not len(rows):
        raise PbflError(f"{path} has no rows")
    where = f"{path}, column '{label}'"
    distinct, codes = row_names(rows[label], str(path), "class")
    if len(distinct) > MAX_CLASSES:
        raise PbflError(
            f"{where} has more than {MAX_CLASSES} different values; set label-column to the one with the classes"
        )
    classes, labels = numbered_classes(distinct, codes, settings.classes, where)
    if CLIENT not in rows or label == CLIENT:
        return classes, labels, None, ()
    clients, owner = row_names(rows[CLIENT], str(path), "client")
    return classes, labels, owner, owner_names(clients)


def row_names(column: pd.Series, where: str, what: str) -> tuple[list[str], Rows]:
    """Return the names in a column of classes or clients, and every row's.

    See :func:`pbfl_flwr.data.labels.names_in`; a fraction is no name either.
    """
    import pandas as pd

    try:
        codes, cells = pd.factorize(column, use_na_sentinel=False)
    except TypeError as error:
        raise PbflError(f"{where}, column '{column.name}' holds lists; a {what} is expected") from error
    names, numbers = names_in(
        cells, codes, what, lambda row: f"{where}, row {row + 1}, column '{column.name}'"
    )
    if fraction := next((name for name in names if FRACTION.fullmatch(name)), None):
        advice = "; set label-column to the right one" if what == "class" else ""
        raise PbflError(f"{where}, column '{column.name}' holds {fraction}, which is not a {what}{advice}")
    return names, numbers
