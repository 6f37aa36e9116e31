"""Child processes that lead process groups and are ended together with all their descendants."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pbfl_flwr.errors import PbflError, printable
from pbfl_flwr.flower.deploy import watchdog

CLI_SECONDS = 120.0
HELP_LINK = re.compile(r"For more information, visit: <.*>\s*$")
"""The last paragraph of Flower's messages that have an exit code."""
HANGUPS: tuple[signal.Signals, ...] = () if sys.platform == "win32" else (signal.SIGHUP,)
"""Signals sent when the terminal closes; none on Windows."""
ENDS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM, *HANGUPS)
"""Signals that end a command."""
LISTENING = "0A"  # in /proc/net/tcp


class Processes:
    """Child processes that are ended together, even if this process is killed.

    The scratch directories are removed afterwards.
    """

    def __init__(self, *scratch: Path) -> None:
        self._scratch = scratch
        self._started: list[subprocess.Popen[bytes]] = []
        self._watchdog: subprocess.Popen[bytes] | None = None
        if os.name == "posix":
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", watchdog.__file__, *map(str, scratch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str], output: BinaryIO
    ) -> subprocess.Popen[bytes]:
        """Start a process as the leader of its own group, so that it does not receive Ctrl-C.

        Standard output and error go to ``output``; the environment is complete.
        """
        with signals_deferred():  # a Ctrl-C in between would leave a process that nobody ends
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._started.append(process)
            self._tell(str(process.pid))
        return process

    def sweep(self) -> None:
        """End the groups of processes that have exited, immediately, since the system may reuse their ids."""
        for process in [process for process in self._started if process.poll() is not None]:
            self._end(process)

    def end(self) -> None:
        """End all processes with their groups, the last one first."""
        for process in reversed(self._started[:]):
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if os.name == "posix":
            watchdog.end_group(process.pid, process.poll)
        else:
            process.kill()
            process.wait()
        self._started.remove(process)
        self._tell(f"-{process.pid}")

    def close(self) -> None:
        """End all processes and remove the scratch directories."""
        self.end()
        for directory in self._scratch:
            shutil.rmtree(directory, ignore_errors=True)
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._tell("done")
            with contextlib.suppress(BrokenPipeError):  # closing flushes again what could not be written
                self._watchdog.stdin.close()
            self._watchdog.wait()

    def _tell(self, line: str) -> None:
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watchdog.stdin.write(f"{line}\n".encode())
                self._watchdog.stdin.flush()


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals during cleanup; a second Ctrl-C would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Call this process's handlers of ENDS after the block; processes started meanwhile get these signals as usual.

    Blocking them instead would be inherited, and would not keep another thread from receiving them.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers are called in that one alone
        yield
        return
    received: list[int] = []
    before = {number: handler for number in ENDS if callable(handler := signal.getsignal(number))}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: received.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


def forget_lost_terminal() -> None:
    """Redirect standard streams of a closed terminal to the null device; otherwise every further write would fail."""
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        with contextlib.suppress(OSError):
            status = os.fstat(file)
            if (
                stat.S_ISCHR(status.st_mode)
                and status.st_rdev != os.fstat(null).st_rdev
                and not os.isatty(file)
            ):
                os.dup2(null, file)
    os.close(null)


def executable(name: str) -> str:
    """Return the path of one of Flower's commands in the current Python environment.

    Raises:
        PbflError: if it is missing.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise PbflError(f"'{path}' is missing: install Flower into this environment")
    return str(path)


def flwr(
    arguments: Sequence[str], directory: Path | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``flwr`` and return what it prints with ``--format json``, which must be among the arguments.

    Without directory and environment it has those of this process.

    Raises:
        PbflError: with the last paragraph of Flower's message, if it fails or does not answer within two minutes.
    """
    try:
        done = subprocess.run(
            [executable("flwr"), *arguments],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLI_SECONDS,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PbflError(f"flwr {arguments[0]} did not answer within {CLI_SECONDS:.0f} s") from None
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        result = {}
    if done.returncode or not result.get("success", bool(result)):
        said = result.get("error-message") or done.stdout + done.stderr
        paragraphs = HELP_LINK.sub("", said).strip().split("\n\n")
        reason = printable(paragraphs[-1]) or f"exit code {done.returncode}"  # before it, what was begun
        raise PbflError(f"flwr {arguments[0]}: {reason}")
    return result


def free_port() -> int:
    """Return a port of the loopback interface that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(pid: int, port: int) -> bool:
    """Whether a process of this user listens on this port of IPv4; assumed if the system does not tell who listens."""
    try:
        table = Path("/proc/net/tcp").read_text(encoding="ascii")  # of Linux
    except OSError:
        return True
    lines = [line.split() for line in table.splitlines()]
    inodes = [line[9] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == LISTENING]
    if not (sockets := [f"socket:[{inode}]" for inode in inodes]):
        return True
    # Meanwhile it may close a file, or end: its files are then hidden from all but root.
    with contextlib.suppress(OSError):
        return any(os.readlink(file) in sockets for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def health(host: str, port: int, trust: ssl.SSLContext | None, timeout: float) -> int:
    """Return the HTTP status of Flower's health endpoint; ``trust`` None means without TLS.

    Raises:
        OSError: if nothing answers, or its certificate is refused.
        http.client.HTTPException: if the answer is not HTTP.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    if trust is not None:
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=trust)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status


def healthy(port: int, ca: Path | None) -> bool:
    """Whether Flower's health endpoint responds on this port of the loopback interface; with TLS if a CA is given."""
    try:
        return health("127.0.0.1", port, ssl.create_default_context(cafile=ca) if ca else None, 1) == 200
    except (OSError, http.client.HTTPException):
        return False
