"""Class names of a data source and of the whole federation.

A device often holds only some of the classes. ``labels`` then lists all of them in label order, so that class j is the
same class everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pbfl_flwr.config import MAX_CLASSES
from pbfl_flwr.data.contract import Pool, Rows
from pbfl_flwr.errors import PbflError

MAX_FILE_BYTES = 2**20
HINT = "set labels to all classes of the federation, in the order of their ids"


def known_classes(names: Sequence[str], classes: Sequence[str], where: str) -> None:
    """Check that all class names are among those of the federation.

    Raises:
        PbflError: naming those that are not.
    """
    if unknown := sorted(set(names) - set(classes)):
        shown = ", ".join(f"'{name}'" for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        allowed = ", ".join(classes[:12]) + (", ..." if len(classes) > 12 else "")
        raise PbflError(f"{where} has the class {shown}; labels allows {allowed}")


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
        PbflError: if a name is not among ``classes``, or if there are fewer than two or too many classes.
    """
    if classes:
        known_classes(distinct, classes, where)
    names = tuple(classes) or tuple(sorted(distinct))
    if not 2 <= len(names) <= MAX_CLASSES:
        raise PbflError(f"{where} has {len(names)} classes; must be 2 to {MAX_CLASSES}; {HINT}")
    number = {name: index for index, name in enumerate(names)}
    return names, np.array([number[name] for name in distinct], dtype=np.int64)[codes]


def renumbered(pool: Pool, classes: Sequence[str], where: str) -> tuple[tuple[str, ...], Rows]:
    """Return ``classes`` and the pool's labels as indices into it; see :func:`numbered_classes`."""
    distinct = np.unique(pool.labels)
    codes = np.searchsorted(distinct, pool.labels)
    return numbered_classes([pool.label_names[j] for j in distinct], codes, classes, where)


def names_file(labels: str) -> Path | None:
    """Return the file named by a value of ``labels``, None if the value lists the names itself."""
    path = Path(os.path.expanduser(labels))  # Path.expanduser raises for '~a,b'
    try:
        return path if path.is_file() else None
    except OSError:  # too long for a path
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
