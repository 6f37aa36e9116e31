"""Checks of a device or the server before a federation starts: ``pbfl doctor``.

Every check is a function that returns findings: subject, status, message and advice. Checks change nothing on this
machine; a SuperNode is online for a moment (:mod:`pbfl_flwr.flower.deploy.admission`). Imports nothing of Flower, of
which there may be another version.
"""

from __future__ import annotations

import errno
import http.client
import importlib.metadata
import ipaddress
import os
import platform
import shutil
import socket
import ssl
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import joblib
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from packaging.requirements import Requirement

from pbfl_flwr.config import TrainingSettings
from pbfl_flwr.errors import PbflError, expanded, format_exception, printable
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy import connection
from pbfl_flwr.flower.deploy.admission import check_admission
from pbfl_flwr.flower.deploy.connection import ANSWER_SECONDS
from pbfl_flwr.flower.deploy.findings import FAILED, OK, WARNING, Finding
from pbfl_flwr.flower.deploy.processes import health
from pbfl_flwr.util.addresses import split_address
from pbfl_flwr.util.memory import available_memory
from pbfl_flwr.util.paths import home

DEVICES: tuple[str, ...] = get_args(TrainingSettings.model_fields["device"].annotation)
MAIN_VERSIONS = ("python", "flwr", "torch")
LOW_DISK, FULL_DISK = 1e9, 1e8  # free bytes for a warning, and for a failure
NEEDS_SPACE = "free space: a client's state takes a few times its network"
NO_KERNELS = "install a torch build for this GPU, end other programs on it, or use the CPU"
LOW_MEMORY = 1e9  # bytes; a client that trains a small network on a CPU needs about as much
EXPIRES_SOON = timedelta(days=30)


@dataclass(frozen=True)
class CheckTargets:
    """What to check; None skips a check.

    Attributes:
        superlink: HOST:PORT of the Fleet API.
        ca: certificate of the authority that signed the SuperLink's.
        key: the device's private key.
        control: HOST:PORT of the Control API.
        state_dir: the device's state directory.
        device: on which to train, as in the run-config key.
        insecure: expect a SuperLink without TLS.
    """

    superlink: str | None = None
    ca: Path | None = None
    key: Path | None = None
    control: str | None = None
    state_dir: Path | None = None
    device: str = "auto"
    insecure: bool = False


def examine(targets: CheckTargets, tell: Callable[[str], None] = lambda line: None) -> list[Finding]:
    """Run all checks; basic ones come first. ``tell`` is called with a line before a check that takes a minute.

    Raises:
        PbflError: if ``device`` is not a valid value.
    """
    if targets.device not in DEVICES:
        raise PbflError(f"--device {targets.device}: must be one of {', '.join(DEVICES)}")
    findings = check_versions()
    findings += check_connection(targets, tell)
    if targets.state_dir is not None:
        findings += [check_state_dir(targets.state_dir), check_home()]
    return [*findings, check_memory(), check_gpu(targets.device)]


def check_versions() -> list[Finding]:
    """Check the versions of Python and of all required libraries; the main ones are listed even if they fit."""
    package = importlib.metadata.metadata("pbfl-flwr")
    python = f"python{package['Requires-Python']}"
    findings = []
    for requirement in map(Requirement, [python, *(package.get_all("Requires-Dist") or ())]):
        name, allowed = requirement.name, requirement.specifier
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = platform.python_version() if name == "python" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        if not allowed.contains(installed or "0", prereleases=True):
            advice = f"{'' if name == 'python' else 'pip '}install '{name}{allowed}'"
            message = f"{installed or 'not installed'}, must be {allowed}"
            findings.append(Finding(name, FAILED, message, advice))
        elif name in MAIN_VERSIONS:
            findings.append(Finding(name, OK, installed))
    return [*findings, Finding("pbfl-flwr", OK, package["Version"])]


def check_connection(targets: CheckTargets, tell: Callable[[str], None] = lambda line: None) -> list[Finding]:
    """Check key file, address, whether the SuperLink admits the device, its certificate's end, and the Control API.

    What needs the check before it is left out if that one failed.
    """
    findings = [] if targets.key is None else [check_key_file(targets.key)]
    if targets.superlink is not None:
        findings.append(check_address("superlink", targets.superlink))
        if all(finding.status is not FAILED for finding in findings):
            findings.append(
                check_admission(targets.superlink, targets.ca, targets.key, targets.insecure, tell)
            )
            if findings[-1].status is not FAILED and not targets.insecure:
                findings.append(check_certificate(targets.superlink, targets.ca))
    if targets.control is not None:
        findings.append(check_control_api(targets.control, targets.ca, targets.insecure))
    return findings


def check_key_file(path: Path) -> Finding:
    """Check that the device's private key can be read as Flower reads it, and by its owner alone."""
    try:
        load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        return Finding("key", FAILED, f"{path} cannot be read ({error.strerror})", "pbfl keys makes one")
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        advice = "give the file without .pub that pbfl keys wrote, without a passphrase"
        return Finding("key", FAILED, f"{path} is not a private key that Flower can read", advice)
    if security.readable_by_others(path):
        return Finding("key", WARNING, f"{path} is readable by others", f"chmod 600 {path}")
    return Finding("key", OK, f"{path} can be read")


def check_address(what: str, address: str) -> Finding:
    """Check that the host name resolves and the port accepts connections."""
    try:
        host, port = split_address(address)
        ip = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except PbflError as error:
        return Finding(what, FAILED, str(error))
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        advice = "check the spelling, DNS, or /etc/hosts"
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a valid host name"
        return Finding(what, FAILED, f"the name '{host}' is not found ({reason})", advice)
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        advice = "is the SuperLink running, is the port right, does it listen on more than 127.0.0.1?"
        return Finding(what, FAILED, f"{address} ({ip}) refuses connections", advice)
    except OSError as error:
        advice = "a firewall or a wrong route; open this port on the server for this device"
        return Finding(what, FAILED, f"{address} ({ip}) does not answer ({error.strerror or error})", advice)
    return Finding(what, OK, f"{address} ({ip}) answers")


def check_certificate(address: str, ca: Path | None) -> Finding:
    """Check how long the server's certificate, which a SuperNode accepts, will be valid."""
    try:
        certificate = connection.server_certificate(address, ca)
    except PbflError as error:
        return Finding("tls", WARNING, str(error), "is --ca the server's ca.pem?")
    end = certificate.not_valid_after_utc
    message = f"verified, for {', '.join(security.alternatives(certificate))}, until {end:%Y-%m-%d}"
    if end - datetime.now(UTC) < EXPIRES_SOON:
        return Finding("tls", WARNING, message, "pbfl certs --renew on the server")
    return Finding("tls", OK, message)


def check_control_api(address: str, ca: Path | None, insecure: bool) -> Finding:
    """Check that the Control API answers, and only on the loopback interface."""
    what = "control-api"
    reachable = check_address(what, address)
    if reachable.status is not OK:
        return reachable
    host, port = split_address(address)
    try:
        context = None if insecure else ssl.create_default_context(cafile=ca)
    except OSError as error:  # also ssl's
        return Finding(
            what, FAILED, f"--ca = '{ca}' cannot be read: {error.strerror or error}", "is it a ca.pem?"
        )
    try:
        health(host, port, context, ANSWER_SECONDS)
    except ssl.SSLCertVerificationError as error:
        advice = "is --ca the server's ca.pem, and the clock right? else pbfl certs --renew on the server"
        message = f"{address}: the server's certificate is refused: {error.verify_message}"
        return Finding(what, FAILED, message, advice)
    except (OSError, http.client.HTTPException) as error:
        advice = "is it the SuperLink's --port, and is --insecure set only for a server without TLS?"
        return Finding(what, FAILED, f"{address} is not a Control API ({error})", advice)
    if ipaddress.ip_address(socket.getaddrinfo(host, port)[0][4][0]).is_loopback:
        return Finding(what, OK, f"{address} answers")
    message = (
        f"{address} is reachable from this machine: anyone who reaches it can run code on server and devices"
    )
    return Finding(what, WARNING, message, "on the server: --host 127.0.0.1, or a firewall")


def check_home() -> Finding:
    """Check that the home directory can be written; a device stores its decoded data there."""
    what = "home"
    try:
        directory = home()
    except PbflError as error:
        return Finding(what, FAILED, str(error))
    existing = _nearest_existing(directory)
    if (refused := _write_error(existing)) is None:
        return Finding(what, OK, _where(directory, existing))
    has_cache = os.path.isdir(directory / "cache")
    status, data = (WARNING, "new data") if has_cache else (FAILED, "data")
    message = _cannot_write(existing, refused)
    return Finding(what, status, message, f"{data} cannot be decoded into it: set PBFL_HOME to another place")


def check_state_dir(directory: Path) -> Finding:
    """Check that the state directory can be written, and its free space."""
    what = "state-dir"
    directory = expanded(directory)
    existing = _nearest_existing(directory)
    if (refused := _write_error(existing)) is not None:
        advice = f"give it to the user who runs the SuperNode: install -d -o USER {directory}"
        if existing.is_symlink():
            advice = f"it is a link to {os.readlink(existing)}: is the disk there mounted?"
        elif refused.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = NEEDS_SPACE
        elif refused.errno == errno.EROFS:
            advice = "its file system is read-only: is the disk damaged (dmesg), or is it mounted so?"
        return Finding(what, FAILED, _cannot_write(existing, refused), advice)
    free = shutil.disk_usage(existing).free
    message = f"{_where(directory, existing)}, {free / 1e9:.1f} GB free"
    if free < FULL_DISK:
        return Finding(what, FAILED, message, NEEDS_SPACE)
    if free < LOW_DISK:
        return Finding(what, WARNING, message, "free space: data caches and logs are stored there too")
    return Finding(what, OK, message)


def _nearest_existing(directory: Path) -> Path:
    """Return a directory or its nearest existing ancestor; a broken link counts as existing."""
    place = directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def _write_error(directory: Path) -> OSError | None:
    """Return the error of writing a file in a directory, None if it can be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _cannot_write(directory: Path, error: OSError) -> str:
    return f"{directory} cannot be written ({error.strerror})"


def _where(directory: Path, existing: Path) -> str:
    return f"{directory}" if existing == directory else f"{directory} can be made in {existing}"


def check_memory() -> Finding:
    """Check the available memory."""
    available = available_memory()
    if available is None:
        return Finding("memory", OK, "unknown on this system")
    message = f"{available / 1e9:.1f} GB available"
    if available < LOW_MEMORY:
        return Finding("memory", WARNING, message, "training a small network takes about 1 GB; add swap")
    return Finding("memory", OK, message)


def check_gpu(device: str) -> Finding:
    """Check which GPU torch detects, and that it can compute there."""
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
            return Finding(what, FAILED, f"torch cannot compute on it: {format_exception(error)}", NO_KERNELS)
        status = OK if computed == 2 else FAILED
        return Finding(what, status, f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    if count := torch.cuda.device_count():  # according to the driver
        reason = f": {' '.join(str(warned[-1].message).split())}" if warned else ""
        message = f"torch {torch.__version__} cannot use the {count} in this machine{reason}"
        status = FAILED if device == "cuda" else WARNING
        return Finding(
            what, status, printable(message), "install a driver for this torch, or a torch build for it"
        )
    if torch.backends.mps.is_available():
        return Finding(what, OK, "Metal")
    if device in ("cuda", "mps"):
        message = f"torch {torch.__version__} detects none, but device='{device}' is set"
        return Finding(what, FAILED, message, "install the driver and a torch build for it, or use the CPU")
    return Finding(what, OK, f"none; training uses the CPU ({joblib.cpu_count()} cores)")
