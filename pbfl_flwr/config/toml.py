"""Configurations as TOML, written and read."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pbfl_flwr.config.parsing import Scalar

# Texts in quotes, or a number that begins or ends with its point.
SHORT_NUMBER = re.compile(
    r"""(?P<quoted>"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
    r"""|(?<![\w.])(?:(?P<whole>\d+)\.|\.(?P<share>\d+))(?=[eE][+-]?\d|[^\w.]|$)"""
)


def toml(config: Mapping[str, Scalar]) -> str:
    """Return flat keys as TOML."""
    return "".join(f"{key} = {written(value)}\n" for key, value in config.items())


def written(value: Scalar) -> str:
    """Return a value as TOML: as in JSON, except for infinity, NaN, and texts with the character 0x7F."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document, in which a number may also begin or end with its point: .1 or 1.

    Raises:
        tomllib.TOMLDecodeError: if it is not TOML.
    """
    try:
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(text)
        return tomllib.loads(SHORT_NUMBER.sub(_in_full, text))
    except (ValueError, RecursionError) as error:  # also of thousands of digits, or of brackets in each other
        raise tomllib.TOMLDecodeError(str(error)) from None


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables as flat keys a.b, as Flower does."""
    flat: dict[str, Any] = {}
    waiting = [*tables.items()][::-1]  # no recursion: a file may have thousands of tables in each other
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{below}", each) for below, each in value.items()][::-1]
        else:
            flat[key] = value
    return flat


def _in_full(found: re.Match[str]) -> str:
    if quoted := found["quoted"]:
        return quoted
    return f"{found['whole'] or 0}.{found['share'] or 0}"
