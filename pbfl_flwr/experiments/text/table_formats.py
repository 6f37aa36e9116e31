"""A table of text cells, written as Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pbfl_flwr.experiments.results.statistics import spread
from pbfl_flwr.flower.storage.atomic_files import write_atomically

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "±": r"$\pm$",
    "−": "$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "–": "--",
    "…": r"\ldots{}",
    "λ": r"$\lambda$",
    "γ": r"$\gamma$",
    "[": "{[}",  # at the beginning of a row the end of the one before, or the rule, would take it for its argument
    "*": "{*}",  # so would that end
}


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: of the table.
        columns: their heads.
        rows: one cell a column.
        notes: lines below it.
        text_columns: how many columns from the left hold words; the others are set to the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: int = field(default=1)

    def markdown(self) -> str:
        """Return it as Markdown, the title in bold above and the notes below."""
        rule = ["---" if number < self.text_columns else "---:" for number in range(len(self.columns))]
        lines = [f"**{self.title}**", "", _piped(self.columns), f"|{'|'.join(rule)}|"]
        lines += [_piped(row) for row in self.rows]
        return "\n".join([*lines, *(line for note in self.notes for line in ("", note))]) + "\n"

    def csv(self) -> str:
        """Return heads and rows as comma-separated values."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def latex(self) -> str:
        r"""Return it as a LaTeX table, shrunk to the line where it is wider; it needs booktabs and graphicx."""
        kinds = "".join("l" if number < self.text_columns else "r" for number in range(len(self.columns)))
        notes = " ".join(self.notes)
        lines = [
            r"% needs \usepackage{booktabs,graphicx}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{tex(self.title)}{'. ' + tex(notes) if notes else ''}}}",
            r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"  \begin{{tabular}}{{{kinds}}}",
            r"    \toprule",
            f"    {_ampersands(self.columns)}",
            r"    \midrule",
            *(f"    {_ampersands(row)}" for row in self.rows),
            r"    \bottomrule",
            r"  \end{tabular}}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def write(self, stem: Path) -> None:
        """Write ``<stem>.md``, ``<stem>.csv`` and ``<stem>.tex``."""
        for suffix, text in ((".md", self.markdown()), (".csv", self.csv()), (".tex", self.latex())):
            write_atomically(stem.with_name(stem.name + suffix), text.encode())


def tex(text: str) -> str:
    """Return text with LaTeX's own characters escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def figure(values: Sequence[float]) -> str:
    """Return one value, mean ± sample deviation of several, or a dash for none."""
    if not len(values):
        return "-"
    found = spread(values)
    return f"{found.mean:.2f}" + (f" ± {found.deviation:.2f}" if found.n > 1 else "")


def plain(values: Sequence[float]) -> tuple[str, str]:
    """Return mean and sample deviation as other programs read them; what is not known is empty."""
    if not len(values):
        return "", ""
    found = spread(values)
    return f"{found.mean:.4f}", f"{found.deviation:.4f}" if found.n > 1 else ""


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(tex(cell) for cell in cells) + r" \\"
