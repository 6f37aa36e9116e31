"""Console output and number formatting."""

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from pbfl_flwr.errors import printable, some

UNLIMITED = 10_000  # line width in characters when output is not a terminal


class Screen(Console):
    """A console that prints no control characters, so that text from devices or files cannot control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments with control characters removed from their text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Discard further output without ending the command: a run must continue when its reader ends."""
        discard_output(self.file)
        self.quiet = True


def screen(*, stderr: bool = False) -> Console:
    """Return the console of a command; lines are wrapped only on a terminal or if COLUMNS is set."""
    console = Screen(stderr=stderr)
    said = os.environ.get("COLUMNS", "").isdigit()
    return console if console.is_terminal or said else Screen(width=UNLIMITED, stderr=stderr)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text unchanged: no markup, no automatic highlighting, no wrapping."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def document(text: str) -> None:
    """Print machine-readable output without control characters; the rest is discarded if the pipe is closed."""
    try:
        print(printable(text), end="", flush=True)
    except BrokenPipeError:
        discard_output(sys.stdout)


def discard_output(file: IO[str]) -> None:
    """Redirect a file to the null device, including output that is still buffered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def print_hanging(console: Console, head: str, text: str, indent: int, style: str = "bold") -> None:
    """Print a head with wrapped text beside it, or below it if the head is too long; all text lines are indented.

    Args:
        console: to print to.
        head: highlighted text at the left.
        text: to wrap, only at spaces.
        indent: number of characters before the text.
        style: of the head.
    """
    first = f"{head:<{indent}}" if len(head) <= indent else f"{head}\n{' ' * indent}"
    lines = textwrap.wrap(
        text, max(20, console.width - indent), break_long_words=False, break_on_hyphens=False
    )
    shown = Text((first + f"\n{' ' * indent}".join(lines)).rstrip())
    shown.stylize(style, 0, len(head))
    console.print(shown, soft_wrap=True)


def clients_named(names: Sequence[str], kind: str = "client") -> str:
    """Return "client 3" for one client, or the number of clients and the first few names."""
    if len(names) == 1:
        return f"{kind} {names[0]}"
    return f"{len(names)} {kind}s ({some(names)})"


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
