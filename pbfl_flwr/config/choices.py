"""Values that are lists: ``crop, flip``, or one value per architecture: ``contiguous, cnn4=channels-last``."""

from __future__ import annotations

from collections.abc import Callable


def words(text: str) -> list[str]:
    """Return the entries of a comma list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def one_or_each(*allowed: str) -> Callable[[str], str]:
    """Return a validator: one value, or a comma list of ``architecture=value`` and at most one value for the rest.

    The validator raises ValueError, stating what is allowed, for anything else and for duplicates.
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
    """Return architecture -> value; the key "" holds the value for the rest."""
    parts = (item.rpartition("=") for item in text.split(","))
    return {architecture.strip(): value.strip() for architecture, _, value in parts}


def choice(text: str, architecture: str, otherwise: str) -> str:
    """Return the value of one architecture, else the one for the rest, else ``otherwise``."""
    found = choices(text)
    return found.get(architecture, found.get("", otherwise))


def completed(text: str, otherwise: str) -> str:
    """Return the text with ``otherwise`` for "auto" and for a missing value for the rest."""
    found = choices(text)
    rest = found.pop("", "auto")
    named = {name: otherwise if value == "auto" else value for name, value in found.items()}
    return ", ".join(
        [otherwise if rest == "auto" else rest, *(f"{name}={value}" for name, value in named.items())]
    )
