"""Tables wider than the terminal, printed as blocks of columns one below the other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pbfl_flwr.experiments.text.numbers import UNLIMITED, say

GAP = 2  # characters between two columns


def show(markdown: str, console: Console) -> None:
    """Print Markdown; unchanged if the output is not a terminal."""
    if not console.is_terminal:
        console.print(markdown, markup=False, highlight=False, soft_wrap=True)
        return
    for is_table, group in groupby(markdown.splitlines(), key=lambda line: line.startswith("|")):
        lines = list(group)
        if is_table and max(map(cell_len, lines)) > console.width:
            head, rule, *rows = (_cells(line) for line in lines)
            words = next((number for number, mark in enumerate(rule) if mark.endswith(":")), 1)
            print_blocks(console, head, rows, words, words)
        else:
            for line in lines:
                console.print(Text(line))


def print_blocks(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], words: int, labels: int = 1
) -> None:
    """Print a table, in blocks of columns if it is wider than the console.

    Args:
        console: to print to.
        head: title of every column.
        rows: one cell per column.
        words: number of leftmost columns that hold text; the others hold numbers and are right-aligned.
        labels: number of leftmost columns that are repeated in every block.
    """
    widths = [max(map(cell_len, column)) for column in zip(head, *rows, strict=True)]
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


def print_whole(console: Console, table: Table) -> None:
    """Print a table of plain text; in blocks of columns if the console is too narrow for its cells."""
    wanted = Measurement.get(console, console.options.update(max_width=UNLIMITED), table).maximum
    if wanted <= console.width:
        console.print(table)
        return
    say(console, str(table.title), "italic")
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    words = sum(column.justify != "right" for column in table.columns)
    head = [str(column.header) for column in table.columns]
    print_blocks(console, head, list(zip(*columns, strict=True)), words)


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


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
