"""Console output: text, numbers, and tables, in blocks of columns where the terminal is too narrow."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pbfl_flwr.errors import abbreviate, printable

GAP = 2  # characters between two columns
UNLIMITED = 10_000  # line width in characters when output is not a terminal


class Screen(Console):
    """A console that prints no control characters, so that text from devices or files cannot control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments with control characters removed from their text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, lines=True), style, control)

    def on_broken_pipe(self) -> None:
        """Discard further output without ending the command: a run must continue when its reader ends."""
        discard_output(self.file)
        self.quiet = True


def screen(*, stderr: bool = False) -> Console:
    """Return the console of a command; lines are wrapped only on a terminal or if COLUMNS is set."""
    console = Screen(stderr=stderr)
    width_set = os.environ.get("COLUMNS", "").isdigit()
    return console if console.is_terminal or width_set else Screen(width=UNLIMITED, stderr=stderr)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text unchanged: no markup, no automatic highlighting, no wrapping."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def document(text: str) -> None:
    """Print machine-readable output without control characters; the rest is discarded if the pipe is closed."""
    try:
        print(printable(text, lines=True), end="", flush=True)
    except BrokenPipeError:
        discard_output(sys.stdout)


def discard_output(file: IO[str]) -> None:
    """Redirect a file to the null device, including output that is still buffered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def print_hanging(console: Console, head: str, text: str, indent: int, style: str = "bold") -> None:
    """Print a head with wrapped text beside it, or below it if the head is too long; all text lines are indented.

    The text is wrapped at spaces only.
    """
    first = f"{head:<{indent}}" if len(head) <= indent else f"{head}\n{' ' * indent}"
    lines = textwrap.wrap(
        text, max(20, console.width - indent), break_long_words=False, break_on_hyphens=False
    )
    shown = Text((first + f"\n{' ' * indent}".join(lines)).rstrip())
    shown.stylize(style, 0, len(head))
    console.print(shown, soft_wrap=True)


def clients_named(names: Sequence[str]) -> str:
    """Return "client 3" for one client, or the number of clients and the first few names."""
    if len(names) == 1:
        return f"client {names[0]}"
    return f"{len(names)} clients ({abbreviate(names)})"


def percent(share: float) -> str:
    """Return 0.812 as 81.2 %."""
    return f"{100 * share:.1f} %"


def kilobytes(count: float) -> str:
    """Return bytes with a decimal unit: 999 B, 41.2 kB, 3.1 MB."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95 or unit == "GB":
            break
    return f"{count:.1f} {unit}"


def clock(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_blocks(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> None:
    """Print a table, in blocks of columns if it is wider than the console.

    Every block begins with the columns of text, or only the first of them if they fill half of a line.

    Args:
        console: to print to.
        head: title of every column.
        rows: one cell per column.
        words: number of leftmost columns that hold text; the others hold numbers and are right-aligned.
    """
    widths = [max(map(cell_len, column)) for column in zip(head, *rows, strict=True)]
    labels = max(1, words if sum(widths[:words]) <= console.width // 2 else 1)
    for number, block in enumerate(blocks(widths, labels, console.width)):
        if number:
            console.print()
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        columns = [*range(labels), *block]
        for at in columns:
            left = at < words or widths[at] > console.width // 2  # a wide column is text in any position
            table.add_column(Text(head[at]), justify="left" if left else "right")
        for row in rows:
            table.add_row(*(Text(row[at]) for at in columns))
        console.print(table)


def blocks(widths: Sequence[int], labels: int, room: int) -> Iterator[range]:
    """Yield the columns of each block, without the label columns: as many as fit, at least one.

    Args:
        widths: width of each column in characters.
        labels: number of leftmost columns that are repeated in every block.
        room: line width in characters.
    """
    left = room - sum(width + GAP for width in widths[:labels])
    start, used = labels, 0
    for number in range(labels, len(widths)):
        if number > start and used + widths[number] > left:
            yield range(start, number)
            start, used = number, 0
        used += widths[number] + GAP
    yield range(start, len(widths))
