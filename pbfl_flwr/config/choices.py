"""Values that are lists: ``crop, flip``, or one for every architecture: ``contiguous, cnn4=channels-last``."""

from __future__ import annotations

from collections.abc import Callable


def words(text: str) -> list[str]:
    """Return a comma list's entries."""
    return [word.strip() for word in text.split(",") if word.strip()]


def one_or_each(*allowed: str) -> Callable[[str], str]:
    """Return a validator: one of the values, or a comma list of ``architecture=value`` with one value for the rest.

    The validator raises ValueError, saying what is allowed, for anything else and for what is said twice.
    """

    def checked(text: str) -> str:
        found: set[str] = set()
        for item in text.split(","):
            architecture, _, value = item.strip().rpartition("=")
            if value.strip() not in allowed or architecture.strip() in found:
                raise ValueError(
                    f"{', '.join(allowed)}, or a comma list: <value for the rest>, <architecture>=<value>, each once"
                )
            found.add(architecture.strip())
        return text

    return checked


def choices(text: str) -> dict[str, str]:
    """Return architecture -> its value, "" standing for the rest."""
    parts = (item.rpartition("=") for item in text.split(","))
    return {architecture.strip(): value.strip() for architecture, _, value in parts}


def choice(text: str, architecture: str, otherwise: str) -> str:
    """Return the value of one architecture; ``otherwise`` where nothing is said of it, nor of the rest."""
    found = choices(text)
    return found.get(architecture, found.get("", otherwise))


def completed(text: str, otherwise: str) -> str:
    """Return the same with a value for the rest in place of "auto" or of none."""
    found = choices(text)
    rest = found.pop("", "auto")
    named = {name: otherwise if value == "auto" else value for name, value in found.items()}
    return ", ".join(
        [otherwise if rest == "auto" else rest, *(f"{name}={value}" for name, value in named.items())]
    )
