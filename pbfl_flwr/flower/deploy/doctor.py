"""Checks of a device or the server before a federation starts: ``pbfl doctor``.

Every check is a function that returns findings: subject, status, result and advice. Checks change nothing. Those of the
machine are here, those of the connection in :mod:`~pbfl_flwr.flower.deploy.connection`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import get_args

import torch
from packaging.requirements import Requirement

from pbfl_flwr.config import TrainingSettings
from pbfl_flwr.errors import PbflError, expanded, format_exception, printable
from pbfl_flwr.flower.client.device import share_of_cores
from pbfl_flwr.flower.deploy.connection import check_connection
from pbfl_flwr.flower.deploy.findings import CheckTargets, Finding, Status
from pbfl_flwr.util.memory import available_memory
from pbfl_flwr.util.paths import home

DEVICES: tuple[str, ...] = get_args(
    TrainingSettings.model_fields["device"].annotation
)  # values of the run-config key
LOW_DISK, FULL_DISK = 1e9, 1e8  # free bytes for a warning, and for a failure
NO_KERNELS = "install a torch build for this GPU, end other programs on it, or use the CPU"
LOW_MEMORY = 1e9  # bytes; a client that trains a small network on a CPU needs about as much


def examine(targets: CheckTargets) -> list[Finding]:
    """Run all checks; basic ones come first.

    Raises:
        PbflError: if ``device`` is not a valid value.
    """
    if targets.device not in DEVICES:
        raise PbflError(f"--device {targets.device}: allowed are {', '.join(DEVICES)}")
    found = check_versions()
    found += check_connection(targets)
    if targets.state_dir is not None:
        found += [*check_state_dir(targets.state_dir), check_home()]
    return [*found, check_memory(), check_gpu(targets.device)]


def check_versions() -> list[Finding]:
    """Check the versions of Python and of all required libraries."""
    allowed = importlib.metadata.metadata("pbfl-flwr")["Requires-Python"]
    python = platform.python_version()
    fits = Requirement(f"python{allowed}").specifier.contains(python)
    found = [
        Finding("python", Status.OK, python)
        if fits
        else Finding("python", Status.FAILED, f"{python}, allowed is {allowed}", "install another Python")
    ]
    for line in importlib.metadata.requires("pbfl-flwr") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        if not requirement.specifier.contains(installed or "0", prereleases=True):
            result = f"{installed or 'not installed'}, allowed is {requirement.specifier}"
            found.append(
                Finding(
                    requirement.name,
                    Status.FAILED,
                    result,
                    f"pip install '{requirement.name}{requirement.specifier}'",
                )
            )
        elif requirement.name in ("flwr", "torch"):
            found.append(Finding(requirement.name, Status.OK, installed))
    own = importlib.metadata.version("pbfl-flwr")
    return [*found, Finding("pbfl-flwr", Status.OK, own)]


def check_home() -> Finding:
    """Check that the home directory can be written; a device stores its decoded data there."""
    what = "home"
    try:
        directory = home()
    except PbflError as error:
        return Finding(what, Status.FAILED, str(error))
    existing = _nearest_existing(directory)
    if (refused := _write_error(existing)) is None:
        return Finding(what, Status.OK, _where(directory, existing))
    has_cache = os.path.isdir(directory / "cache")
    status, data = (Status.WARNING, "new data") if has_cache else (Status.FAILED, "data")
    return Finding(what, status, refused, f"{data} cannot be decoded into it: set PBFL_HOME to another place")


def check_state_dir(directory: Path) -> list[Finding]:
    """Check that the state directory can be written, and its free space."""
    what = "state-dir"
    directory = expanded(directory)
    existing = _nearest_existing(directory)
    if (refused := _write_error(existing)) is not None:
        advice = f"give it to the user who runs the SuperNode: install -d -o USER {directory}"
        if existing.is_symlink():
            advice = f"it is a link to {os.readlink(existing)}: is the disk there mounted?"
        return [Finding(what, Status.FAILED, refused, advice)]
    free = shutil.disk_usage(existing).free
    result = f"{_where(directory, existing)}, {free / 1e9:.1f} GB free"
    if free < FULL_DISK:
        return [
            Finding(what, Status.FAILED, result, "free space: a client's state takes a few times its network")
        ]
    if free < LOW_DISK:
        return [
            Finding(what, Status.WARNING, result, "free space: data caches and logs are stored there too")
        ]
    return [Finding(what, Status.OK, result)]


def _nearest_existing(directory: Path) -> Path:
    """Return a directory or its nearest existing ancestor; a broken link counts as existing."""
    place = directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def _write_error(directory: Path) -> str | None:
    """Return the error of writing a file in a directory, None if it can be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{directory} cannot be written ({error.strerror})"
    return None


def _where(directory: Path, existing: Path) -> str:
    return f"{directory}" if existing == directory else f"{directory} can be made in {existing}"


def check_memory() -> Finding:
    """Check the available memory."""
    available = available_memory()
    if available is None:
        return Finding("memory", Status.OK, "unknown on this system")
    result = f"{available / 1e9:.1f} GB available"
    if available < LOW_MEMORY:
        return Finding(
            "memory", Status.WARNING, result, "training a small network takes about 1 GB; add swap"
        )
    return Finding("memory", Status.OK, result)


def check_gpu(device: str) -> Finding:
    """Check which GPU torch detects, and that it can compute there.

    Args:
        device: value of the run-config key.
    """
    what = "gpu"
    with warnings.catch_warnings(record=True) as warned:  # torch warns about drivers that are too old
        warnings.simplefilter("always")
        cuda = torch.cuda.is_available()
    if cuda:
        try:
            free, total = torch.cuda.mem_get_info()
            name = torch.cuda.get_device_name()
            computed = float(torch.ones(2, device="cuda").sum())  # fails if torch has no kernels for this GPU
        except RuntimeError as error:
            return Finding(
                what, Status.FAILED, f"torch cannot compute on it: {format_exception(error)}", NO_KERNELS
            )
        status = Status.OK if computed == 2 else Status.FAILED
        return Finding(what, status, f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    if count := torch.cuda.device_count():  # according to the driver
        reason = f": {' '.join(str(warned[-1].message).split())}" if warned else ""
        result = f"torch {torch.__version__} cannot use the {count} in this machine{reason}"
        status = Status.FAILED if device == "cuda" else Status.WARNING
        return Finding(
            what, status, printable(result), "install a driver for this torch, or a torch build for it"
        )
    if torch.backends.mps.is_available():
        return Finding(what, Status.OK, "Metal")
    if device in ("cuda", "mps"):
        result = f"torch {torch.__version__} detects none, but device='{device}' is set"
        return Finding(
            what, Status.FAILED, result, "install the driver and a torch build for it, or use the CPU"
        )
    return Finding(what, Status.OK, f"none; training uses the CPU ({share_of_cores()} cores)")
