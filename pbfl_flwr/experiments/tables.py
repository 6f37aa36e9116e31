"""A table of text cells, written as Markdown, CSV or LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from rich.console import Console

from pbfl_flwr.experiments.console import print_blocks, say
from pbfl_flwr.util.csv_text import csv_text

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
    "[": "{[}",  # at the start of a row, "\\" or a rule before it would parse "[" as its optional argument
    "*": "{*}",  # "\\" before it would parse it as its starred form
}
_GREEK = {
    "αβγδεζηθικλμνξπρστυφχψω": (
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
        "omega"
    ),
    "ΓΔΘΛΞΠΣΥΦΨΩ": "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega",
}
_LATEX |= {
    letter: rf"$\{name}$"
    for letters, names in _GREEK.items()
    for letter, name in zip(letters, names.split(), strict=True)
}


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: of the table.
        columns: titles of the columns.
        rows: one cell per column.
        notes: lines below the table.
        text_columns: number of leftmost columns that hold text; the others are right-aligned.
        text_last: whether the last column holds text, too, such as remarks.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: int = field(default=1)
    text_last: bool = False

    def holds_text(self, column: int) -> bool:
        """Whether a column, counted from 0, holds text, not numbers."""
        return column < self.text_columns or (self.text_last and column == len(self.columns) - 1)

    def markdown(self) -> str:
        """Return the table as Markdown, with the title in bold above and the notes below."""
        rule = ["---" if self.holds_text(number) else "---:" for number in range(len(self.columns))]
        lines = [f"**{self.title}**", "", _piped(self.columns), f"|{'|'.join(rule)}|"]
        lines += [_piped(row) for row in self.rows]
        return "\n".join([*lines, *(line for note in self.notes for line in ("", note))]) + "\n"

    def csv(self) -> str:
        """Return column titles and rows as comma-separated values."""
        return csv_text([self.columns, *self.rows])

    def latex(self) -> str:
        r"""Return the table as LaTeX, scaled down to the line width if wider; needs booktabs and graphicx."""
        kinds = "".join("l" if self.holds_text(number) else "r" for number in range(len(self.columns)))
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

    def without_first_column(self) -> Sheet:
        """Return the table without the column that names a run, for a table of one run."""
        rows = tuple(row[1:] for row in self.rows)
        return replace(self, columns=self.columns[1:], rows=rows, text_columns=max(1, self.text_columns - 1))

    def show(self, console: Console) -> None:
        """Print title, table and notes, in blocks of columns where the console is too narrow."""
        say(console, "")
        say(console, self.title, "bold")
        print_blocks(console, self.columns, self.rows, words=self.text_columns)
        for note in self.notes:
            say(console, note)

    def files(self, stem: str) -> dict[str, str]:
        """Return file name -> content of ``<stem>.md``, ``<stem>.csv`` and ``<stem>.tex``."""
        return {f"{stem}.md": self.markdown(), f"{stem}.csv": self.csv(), f"{stem}.tex": self.latex()}


@dataclass(frozen=True)
class Tables:
    """What several runs are summed up in: tables and lines as printed, and file name -> content."""

    shown: Sequence[Sheet | str]
    files: Mapping[str, str]


def tex(text: str) -> str:
    """Return text with LaTeX special characters escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def mean_cell(values: Sequence[float]) -> str:
    """Format a single value, mean ± sample standard deviation of several, or a dash for none."""
    if not len(values):
        return "-"
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(tex(cell) for cell in cells) + r" \\"
