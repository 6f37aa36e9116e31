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
    installed, required = _versions()
    if installed is not None and installed < min(
        Version(part.version) for part in required.specifier if part.operator == ">="
    ):
        raise PbflError(f"flwr {installed} is too old; {_advice(required)}")


def has_one_port() -> bool:
    """Whether the SuperLink has a single port and SuperNodes use HTTP, as in Flower 1.40 and later."""
    return Version(importlib.metadata.version("flwr")) >= Version("1.40")


def misfit(error: ImportError) -> str | None:
    """Explain in one line an import error that is due to the installed version of Flower.

    Args:
        error: names the module that could not be imported.

    Returns:
        None if that module is not Flower's, or the installed version is allowed.
    """
    installed, required = _versions()
    if (error.name or "").partition(".")[0] != "flwr" or (installed and installed in required.specifier):
        return None
    if installed is None:
        return f"flwr is not installed; {_advice(required)}"
    return f"flwr {installed} is not supported: {error.msg}; {_advice(required)}"


def _versions() -> tuple[Version | None, Requirement]:
    """Return the installed version of Flower and the requirement of this package."""
    requirements = map(Requirement, importlib.metadata.requires("pbfl-flwr") or ())
    required = next(requirement for requirement in requirements if requirement.name == "flwr")
    try:
        return Version(importlib.metadata.version("flwr")), required
    except importlib.metadata.PackageNotFoundError:
        return None, required


def _advice(required: Requirement) -> str:
    return f"must be {required.specifier}: pip install '{required.name}{required.specifier}'"
