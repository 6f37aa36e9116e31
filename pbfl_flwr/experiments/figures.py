"""Numbers and lines as people read them."""

from rich.console import Console


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: no markup, no colours by guess, no line breaks of ours."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def percent(share: float) -> str:
    """Return 0.812 as 81.2 %."""
    return f"{100 * share:.1f} %"


def kilobytes(count: float) -> str:
    """Return bytes with a decimal unit: 999 B, 41.2 kB, 3.1 MB."""
    if count < 1000:
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
