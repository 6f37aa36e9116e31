"""Rows as comma-separated values that a spreadsheet does not run."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from pbfl_flwr.errors import printable

FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|\t")  # how a cell begins that spreadsheets evaluate
NUMBER = re.compile(
    r"[+-]?[\d.,]+(e[+-]?\d+)?([\d.,±%() ]*|\s+to\s+[+-]?[\d.,]+)|-+", re.IGNORECASE
)  # -0.5, -1e-05, -1.2 ± 0.3 %, -0.3 to -0.1, a dash


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows, the first of which holds the column titles, as comma-separated values; None is an empty cell.

    Text that a spreadsheet would take for a formula gets a leading apostrophe, as names may come from devices; numbers
    stay numbers.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_inert, row) for row in rows)
    return text.getvalue()


def _inert(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    shown = printable(cell, lines=True)
    return f"'{shown}" if FORMULA.match(shown) and not NUMBER.fullmatch(shown) else shown
