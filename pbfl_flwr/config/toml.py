"""Configurations as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pbfl_flwr.config.parsing import Scalar


def toml(config: Mapping[str, Scalar]) -> str:
    """Return flat keys as TOML; JSON's strings, numbers and booleans are valid TOML, except for the character 0x7F."""
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items())
    return "".join(lines).replace("\x7f", "\\u007f")
