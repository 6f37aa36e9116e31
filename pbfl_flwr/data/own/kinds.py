"""Detect what kind of data a device has at its path."""

from __future__ import annotations

from pathlib import Path

from pbfl_flwr.data.own.columns import SUFFIXES
from pbfl_flwr.errors import PbflError

_SUFFIXES = {".npz": "npz", **dict.fromkeys(SUFFIXES, "table")}


def kind_of(path: Path, *, texts: bool = False) -> str:
    """Return the dataset that reads a path, by its suffix or content; ``texts``: read tables as text.

    Raises:
        PbflError: if it is a file of an unsupported kind.
    """
    if kind := _SUFFIXES.get(path.suffix.lower()):
        return "text" if texts and kind == "table" else kind
    if path.exists() and not path.is_dir():
        raise PbflError(
            f"{path} is not a known kind of data; allowed are {', '.join(_SUFFIXES)}, a folder of images, a "
            "PFLlib folder"
        )
    return "pflib" if (path / "config.json").is_file() and (path / "train").is_dir() else "image-folder"
