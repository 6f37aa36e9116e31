"""Which Flower is installed, and which this package is made for. Imports nothing of Flower: another one may lack it."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.version import Version

from pbfl_flwr.errors import PbflError


def refuse_older() -> None:
    """Refuse a Flower that is too old. Newer ones may do (docs/deploy.md).

    Raises:
        PbflError: if it is older than the pin.
    """
    there, pin = _versions()
    if there is not None and there < min(
        Version(part.version) for part in pin.specifier if part.operator == ">="
    ):
        raise PbflError(f"flwr {there} is too old; {_advice(pin)}")


def has_one_port() -> bool:
    """Whether the SuperLink has one port for everything and SuperNodes speak HTTP, as from 1.40 on."""
    return Version(importlib.metadata.version("flwr")) >= Version("1.40")


def misfit(error: ImportError) -> str | None:
    """Return in one line why Flower lacks what was to be imported.

    Args:
        error: says which module was asked.

    Returns:
        None if that module is not Flower's, or the version is an allowed one.
    """
    there, pin = _versions()
    if (error.name or "").partition(".")[0] != "flwr" or (there and there in pin.specifier):
        return None
    if there is None:
        return f"flwr is not installed; {_advice(pin)}"
    return f"flwr {there} does not fit: {error.msg}; {_advice(pin)}"


def _versions() -> tuple[Version | None, Requirement]:
    """Return what is installed and what is asked for."""
    asked = map(Requirement, importlib.metadata.requires("pbfl-flwr") or ())
    pin = next(requirement for requirement in asked if requirement.name == "flwr")
    try:
        return Version(importlib.metadata.version("flwr")), pin
    except importlib.metadata.PackageNotFoundError:
        return None, pin


def _advice(pin: Requirement) -> str:
    return f"allowed is {pin.specifier}: pip install '{pin}'"
