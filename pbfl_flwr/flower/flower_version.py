"""The installed and the required version of Flower. Imports nothing of Flower, since other versions may lack it."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.version import Version

from pbfl_flwr.errors import PbflError


def refuse_older() -> None:
    """Refuse a version of Flower that is too old. Newer ones may work (docs/deploy.md).

    Raises:
        PbflError: if it is older than the required one.
    """
    requirements = map(Requirement, importlib.metadata.requires("pbfl-flwr") or ())
    required = next(requirement.specifier for requirement in requirements if requirement.name == "flwr")
    if _installed() < min(Version(part.version) for part in required if part.operator == ">="):
        raise PbflError(f"flwr {_installed()} is too old; must be {required}: pip install 'flwr{required}'")


def has_one_port() -> bool:
    """Whether the SuperLink has a single port and SuperNodes use HTTP, as in Flower 1.40 and later."""
    return _installed() >= Version("1.40")


def _installed() -> Version:
    return Version(importlib.metadata.version("flwr"))
