"""Processes of one's own: started in groups, ended with everything they started."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pbfl_flwr.errors import PbflError

GRACE_SECONDS = 10.0

# On Linux a process gets SIGTERM when the one that started it dies, even by SIGKILL; the request survives exec.
_FOLLOW_PARENT = (
    "import ctypes, os, signal, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def spawn(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], output: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start a process that leads a group of its own, so that Ctrl-C reaches only us."""
    return subprocess.Popen(
        [sys.executable, "-c", _FOLLOW_PARENT, *command],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Let nobody interrupt the clearing up: a second Ctrl-C would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started: politely, then for certain."""
    if os.name != "posix":
        process.kill()
        process.wait()
        return
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            process.poll()  # reaps it, so that only what it started keeps the group alive
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def executable(name: str) -> str:
    """Return one of Flower's commands, from the environment that runs this.

    Raises:
        PbflError: if it is not there.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise PbflError(f"'{path}' is missing: install Flower with its simulation engine, flwr[simulation]")
    return str(path)


def free_port() -> int:
    """Return a port of the loopback interface that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def healthy(port: int) -> bool:
    """Whether Flower's HTTP endpoint answers on this port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
