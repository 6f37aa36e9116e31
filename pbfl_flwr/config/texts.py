"""Parse text values of keys: class names and named values."""

from __future__ import annotations

import tomllib
import unicodedata

Scalar = bool | int | float | str
"""A value of the run configuration, as in Flower."""


def class_name(text: str) -> str:
    """Return a class name in canonical form: stripped, and in Unicode's composed form (NFC).

    Unicode has 'ä' as one character or as two (folder names from a Mac), which look the same.
    """
    return unicodedata.normalize("NFC", text.strip())


def class_names(text: str) -> tuple[str, ...]:
    """Return the names in ``labels``: one per line, or, on a single line, separated by commas."""
    return tuple(map(class_name, text.strip().split("\n" if "\n" in text else ","))) if text.strip() else ()


def named_values(text: str) -> dict[str, Scalar]:
    """Read ``mu=0.1,base='fedtgp',warm=true``: the content of a TOML inline table of scalars.

    Raises:
        ValueError: saying what is allowed.
    """
    allowed = "a comma list of name=value, texts in quotes, e.g. mu=0.1,base='fedtgp',warm=true"
    try:
        read = tomllib.loads(f"found = {{{text}}}")
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{allowed} ({error})") from None
    values = read["found"]
    if len(read) > 1 or not all(isinstance(value, bool | int | float | str) for value in values.values()):
        raise ValueError(allowed)
    found: dict[str, Scalar] = values
    return found
