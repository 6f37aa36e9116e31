"""Numbers and lines as people read them."""

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from pbfl_flwr.errors import printable, some

UNLIMITED = 10_000  # characters of a line


class Screen(Console):
    """A console on which text is text: what a device or a run directory holds cannot steer the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments without control characters in their text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Print nothing more, since nobody reads it; the command goes on: a run must not end with its reader."""
        silence(self.file)
        self.quiet = True


def screen(*, stderr: bool = False) -> Console:
    """Return where a command prints; lines break for a terminal alone, what is piped has whole ones."""
    console = Screen(stderr=stderr)
    said = os.environ.get("COLUMNS", "").isdigit()
    return console if console.is_terminal or said else Screen(width=UNLIMITED, stderr=stderr)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: no markup, no colours by guess, no line breaks of ours."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def document(text: str) -> None:
    """Print a document for other programs, without control characters; nothing more of it once nobody reads it."""
    try:
        print(printable(text), end="", flush=True)
    except BrokenPipeError:
        silence(sys.stdout)


def silence(file: IO[str]) -> None:
    """Let what is written there go nowhere, also what Python still holds of it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def hang(console: Console, head: str, text: str, indent: int, style: str = "bold") -> None:
    """Print a head and text beside it, or below where there is no room; further lines hang below the text.

    Args:
        console: where.
        head: what stands out.
        text: words, broken at spaces alone.
        indent: characters before the text.
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
    """Return "client 3", or how many they are and the first of them."""
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
