"""What can be found out about a device, or the server, before a federation starts: ``pbfl doctor``.

Every check is a function that returns findings: what was looked at, how it is, and what to do. Nothing is changed. The
machine is looked at here, the way to the SuperLink in :mod:`~pbfl_flwr.flower.diagnostics.connection`.
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
from pbfl_flwr.errors import PbflError, expanded, pointed, printable
from pbfl_flwr.flower.client.device import share_of_cores
from pbfl_flwr.flower.diagnostics.connection import network
from pbfl_flwr.flower.diagnostics.findings import Finding, Status, Wanted
from pbfl_flwr.flower.memory import available_memory
from pbfl_flwr.places import home

DEVICES: tuple[str, ...] = get_args(
    TrainingSettings.model_fields["device"].annotation
)  # of the run-config key
LITTLE_DISK, NO_DISK = 1e9, 1e8  # bytes
NO_KERNELS = "install a torch build for this card, free it of other programs, or use the CPU"
LITTLE_MEMORY = 1e9  # bytes; a client that trains a small network on a CPU takes about as much


def examine(wanted: Wanted) -> list[Finding]:
    """Return all findings, in the order in which a person would look.

    Raises:
        PbflError: if ``device`` is none.
    """
    if wanted.device not in DEVICES:
        raise PbflError(f"--device {wanted.device}: allowed are {', '.join(DEVICES)}")
    found = versions()
    found += network(wanted)
    if wanted.state_dir is not None:
        found += [*disk(wanted.state_dir), kept()]
    return [*found, memory(), accelerator(wanted.device)]


def versions() -> list[Finding]:
    """Python, and every library that this package asks for, against what it asks for."""
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
            there = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            there = ""
        if not requirement.specifier.contains(there or "0", prereleases=True):
            said = f"{there or 'not installed'}, allowed is {requirement.specifier}"
            found.append(
                Finding(
                    requirement.name,
                    Status.FAILED,
                    said,
                    f"pip install '{requirement.name}{requirement.specifier}'",
                )
            )
        elif requirement.name in ("flwr", "torch"):
            found.append(Finding(requirement.name, Status.OK, there))
    own = importlib.metadata.version("pbfl-flwr")
    return [*found, Finding("pbfl-flwr", Status.OK, own)]


def kept() -> Finding:
    """Whether there is a place for what outlasts a run: a device decodes its data into it, once."""
    what = "home"
    try:
        directory = home()
    except PbflError as error:
        return Finding(what, Status.FAILED, str(error))
    place = _nearest(directory)
    if (refused := _refused(place)) is None:
        return Finding(what, Status.OK, _where(directory, place))
    used = (Status.WARNING, "new data") if os.path.isdir(directory / "cache") else (Status.FAILED, "data")
    advice = f"{used[1]} cannot be decoded into it: set PBFL_HOME to another place"
    return Finding(what, used[0], refused, advice)


def disk(directory: Path) -> list[Finding]:
    """Whether the state directory can be written, and how much is free there."""
    what = "state-dir"
    directory = expanded(directory)
    place = _nearest(directory)
    if (refused := _refused(place)) is not None:
        advice = f"give it to the user who runs the SuperNode: install -d -o USER {directory}"
        if place.is_symlink():
            advice = f"it is a link to {os.readlink(place)}: is the disk there mounted?"
        return [Finding(what, Status.FAILED, refused, advice)]
    free = shutil.disk_usage(place).free
    said = f"{_where(directory, place)}, {free / 1e9:.1f} GB free"
    if free < NO_DISK:
        return [
            Finding(what, Status.FAILED, said, "make room: a client's state takes a few times its network")
        ]
    if free < LITTLE_DISK:
        return [Finding(what, Status.WARNING, said, "make room: data caches and logs lie there too")]
    return [Finding(what, Status.OK, said)]


def _nearest(directory: Path) -> Path:
    """Return a directory, or what is there of the way to it: a link that leads nowhere is there, too."""
    place = directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def _refused(place: Path) -> str | None:
    """Return what the system says to a file in a directory, None if it can be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{place} cannot be written ({error.strerror})"
    return None


def _where(directory: Path, place: Path) -> str:
    return f"{directory}" if place == directory else f"{directory} can be made in {place}"


def memory() -> Finding:
    """What is available now."""
    available = available_memory()
    if available is None:
        return Finding("memory", Status.OK, "not known on this system")
    said = f"{available / 1e9:.1f} GB available"
    if available < LITTLE_MEMORY:
        return Finding("memory", Status.WARNING, said, "training a small network takes about 1 GB; add swap")
    return Finding("memory", Status.OK, said)


def accelerator(wanted: str) -> Finding:
    """Which GPU torch sees, and whether it computes there."""
    what = "gpu"
    with warnings.catch_warnings(record=True) as warned:  # of a driver that is too old for this torch
        warnings.simplefilter("always")
        cuda = torch.cuda.is_available()
    if cuda:
        try:
            free, total = torch.cuda.mem_get_info()
            name = torch.cuda.get_device_name()
            computed = float(
                torch.ones(2, device="cuda").sum()
            )  # torch lacks kernels for cards that are too old
        except RuntimeError as error:
            return Finding(
                what, Status.FAILED, f"nothing can be computed on it: {pointed(error)}", NO_KERNELS
            )
        found = Status.OK if computed == 2 else Status.FAILED
        return Finding(what, found, f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    if cards := torch.cuda.device_count():  # as the driver counts
        reason = f": {' '.join(str(warned[-1].message).split())}" if warned else ""
        said = f"torch {torch.__version__} cannot use the {cards} that are here{reason}"
        needed = Status.FAILED if wanted == "cuda" else Status.WARNING
        return Finding(
            what, needed, printable(said), "install a driver for this torch, or a torch build for it"
        )
    if torch.backends.mps.is_available():
        return Finding(what, Status.OK, "Metal")
    if wanted in ("cuda", "mps"):
        said = f"torch {torch.__version__} sees none, and device='{wanted}' is wanted"
        return Finding(
            what, Status.FAILED, said, "install the driver and a torch build for it, or use the CPU"
        )
    return Finding(what, Status.OK, f"none; training uses the CPU ({share_of_cores()} cores)")
