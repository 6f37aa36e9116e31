"""A network of the command's own, in which Flower's Control API can be reached by nobody else.

Flower's SuperLink opens that API on the loopback interface, where it asks nobody who he is: every account of the
machine could submit a run, which is code that then runs as the user of this command. On Linux a command can have a
network namespace of its own: it starts itself again in one (``unshare``), with a loopback interface and nothing else.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from pbfl_flwr.config import HUB, Settings
from pbfl_flwr.util.user_code import interpreter

INSIDE = "PBFL_PRIVATE_NETWORK"  # environment variable of a command that was started in a network of its own
PROBE_SECONDS = 60
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def inside() -> bool:
    """Whether this command was started in a network of its own."""
    return os.environ.get(INSIDE) == "1"


def needs_network(settings: Settings) -> str:
    """Return the setting for which a run must reach other machines or be reached from outside, "" if there is none."""
    run, data = settings.run, settings.data
    if run.sinks:
        return f"sinks = '{run.sinks}'"
    if data.download or data.data_dir.startswith(HUB):
        return "download = true" if data.download else f"data-dir = '{data.data_dir}'"
    return ""


def warning(reason: str) -> str:
    """Return the line that says who can reach the Control API, and why it was not closed."""
    return (
        "other accounts of this machine can reach Flower's Control API of this run, which asks nobody who he is, and "
        f"run code as you (it has no network of its own: {reason}); on a shared machine use --engine processes or ray, "
        "which open no such port"
    )


def refusal() -> str:
    """Return why a command cannot have a network of its own here; empty if it can."""
    if shutil.which("unshare") is None:
        return "the system has no command unshare"
    command = [*_unshare(), sys.executable, "-I", "-c", ""]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"unshare did not answer within {PROBE_SECONDS} s"
    said = " ".join(probe.stderr.split())[:200] or f"unshare ended with exit code {probe.returncode}"
    return said if probe.returncode else ""


def enter(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the same command in a network of its own.

    Args:
        arguments: of the command ``pbfl``.
    """
    os.environ[INSIDE] = "1"
    module = find_spec("pbfl_flwr.cli")
    assert module is not None
    sys.stdout.flush()
    os.execvp("unshare", [*_unshare(), *interpreter(), "-m", module.name, *arguments])


def bring_up() -> None:
    """Switch on the loopback interface of the network that this process is in.

    Raises:
        OSError: if it may not.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        import fcntl

        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))
        if not flags & IFF_UP:
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def _unshare() -> list[str]:
    """Return the command that starts another one in a new network; only root needs no namespace of users for it."""
    own_users = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    return ["unshare", *own_users, "--net", "--"]
