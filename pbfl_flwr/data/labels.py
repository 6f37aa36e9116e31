"""Class names of a data source and of the whole federation.

A device often holds only some of the classes. ``labels`` then lists all of them in label order, so that class j is the
same class everywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from pbfl_flwr.config import MAX_CLASSES, class_name
from pbfl_flwr.data.contract import Pool, Rows
from pbfl_flwr.errors import PbflError

MAX_FILE_BYTES = 2**20
FRACTION = re.compile(r"-?\d*\.\d+(e-?\d+)?|-?\d+e-\d+", re.IGNORECASE)
_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")
_WHOLE_FLOAT = re.compile(r"(-?\d+)\.0*")
HINT = "set labels to all classes of the federation, in the order of their ids"


def numbers_of(found: Sequence[str], classes: Sequence[str], where: str) -> list[int]:
    """Return the number of every class that is in the data, by the same rule for every format.

    Classes are matched by name. Whole numbers are positions in ``classes`` if no name there is a whole number.

    Args:
        found: the different classes of the data.
        classes: those of the federation, in label order.
        where: named in errors.

    Raises:
        PbflError: naming a class that is not among them, or that may be meant as a name or as a position.
    """
    K, numbers = len(classes), {name: number for number, name in enumerate(classes)}
    positions = [int(name) for name in found if _WHOLE.fullmatch(name)]
    numeric = sum(bool(_WHOLE.fullmatch(name)) for name in classes)
    if len(positions) < len(found) or (numeric and max(positions, default=0) >= K):
        return by_name(found, classes, where)
    if not numeric:
        if outside := [str(position) for position in positions if position >= K]:
            raise PbflError(
                f"{where} has the class {_quoted(outside)}; labels allows {shown(classes)}, or positions in it, "
                f"0..{K - 1}"
            )
        return positions
    for name, position in zip(found, positions, strict=True):
        number = numbers.get(name)
        if number is None or (number != position and numeric < K):
            reading = "none" if number is None else f"number {number}"
            raise PbflError(
                f"{where} has the class '{name}': by name it is {reading} of labels ({shown(classes)}), by position "
                f"'{classes[position]}'; must be a name, or labels without numbers"
            )
    return [numbers[name] for name in found]


def by_name(found: Sequence[str], classes: Sequence[str], where: str) -> list[int]:
    """Return the number of every class, only by name; see :func:`numbers_of`."""
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := sorted(set(found) - set(numbers)):
        quotes = "; a name with a comma stands in double quotes there" if "," in "".join(unknown) else ""
        raise PbflError(f"{where} has the class {_quoted(unknown)}; labels allows {shown(classes)}{quotes}")
    return [numbers[name] for name in found]


def shown(names: Sequence[str]) -> str:
    """Return the first twelve names for a message."""
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + (", ..." if len(names) > 5 else "")


def numbered_classes(
    distinct: Sequence[str], codes: Rows, classes: Sequence[str], where: str
) -> tuple[tuple[str, ...], Rows]:
    """Return the class names and every sample's label.

    Args:
        distinct: the names in the data.
        codes: (N,) int64, index into ``distinct`` of every sample.
        classes: all names in label order; empty: those found, sorted.
        where: named in errors.

    Raises:
        PbflError: as :func:`numbers_of`, and if there are fewer than two or too many classes.
    """
    names = tuple(classes) or tuple(sorted(distinct))
    if not 2 <= len(names) <= MAX_CLASSES:
        raise PbflError(f"{where} has {len(names)} classes; must be 2 to {MAX_CLASSES}; {HINT}")
    return names, np.array(numbers_of(distinct, names, where), dtype=np.int64)[codes]


def names_in(
    cells: Iterable[object], codes: Rows, what: str, place: Callable[[int], str]
) -> tuple[list[str], Rows]:
    """Return the different names of classes or clients, sorted, and the index (N,) of every row's name.

    Whole numbers that were written as 1.0, as in a column with missing values, are named 1.

    Args:
        cells: the different values, of any type.
        codes: (N,) int64, index into ``cells`` of every row.
        what: what they name, for errors.
        place: number of a row, from 0 -> where it is, for errors.

    Raises:
        PbflError: naming the first row whose cell is empty, or not UTF-8.
    """
    texts, faults = [], {}
    for code, cell in enumerate(cells):
        try:
            text = _name(cell)
        except ValueError as error:
            text, faults[code] = "", str(error)
        texts.append(text)
    if faults:
        row = int(np.isin(codes, [*faults]).argmax())
        raise PbflError(f"{place(row)}: {faults[int(codes[row])]}; a {what} is expected")
    distinct = sorted(set(texts))
    number = {name: index for index, name in enumerate(distinct)}
    return distinct, np.array([number[text] for text in texts], dtype=np.int64)[codes]


def owner_names(names: Iterable[str], numbered: str = "id") -> tuple[str, ...]:
    """Return what natural clients are called; a number gets ``numbered`` before it, since clients have numbers, too."""
    return tuple(f"{numbered} {name}" if name.lstrip("-").isdecimal() else name for name in names)


def _name(cell: object) -> str:
    """Return the name in a cell; ValueError says why it has none."""
    if isinstance(cell, bytes):
        try:
            cell = cell.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{cell[:40]!r} is not UTF-8") from None
    text = "" if cell is None else class_name(str(cell))
    if text.lower() in ("", "nan") or (not isinstance(cell, str) and text in ("NaT", "<NA>")):
        raise ValueError("the cell is empty")
    whole = _WHOLE_FLOAT.fullmatch(text)
    return whole[1] if whole else text


def renumbered(pool: Pool, classes: Sequence[str], where: str) -> Pool:
    """Return a pool whose classes have names of their own with ``classes`` and the labels of these.

    Raises:
        PbflError: if one of them is not among ``classes``.
    """
    distinct, codes = np.unique(pool.labels, return_inverse=True)
    numbers = by_name([pool.label_names[j] for j in distinct], classes, where)
    return replace(pool, label_names=tuple(classes), labels=np.array(numbers, dtype=np.int64)[codes])


def names_file(labels: str) -> Path | None:
    """Return the file named by a value of ``labels``, None if the value lists the names itself.

    Raises:
        PbflError: if it is a single word, which can only be a file, and there is none.
    """
    path = Path(os.path.expanduser(labels))  # Path.expanduser raises for '~a,b'
    with suppress(OSError):  # too long for a path
        if path.is_file():
            return path
    if labels.strip() and not any(mark in labels for mark in ',"\n'):
        raise PbflError(
            f"labels = '{labels}': no such file; must be the names of all classes, separated by commas, or a file with "
            "one name per line"
        )
    return None


def read_names(path: Path) -> str:
    """Return the content of a file with one class name per line, as a value of ``labels``.

    Raises:
        PbflError: if the file is unreadable or too large.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise PbflError(f"labels = '{path}': the file is too large to be a list of class names")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PbflError(f"labels = '{path}': not a readable text file ({error})") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines) + "\n"  # the final newline keeps a comma in a single name from separating
