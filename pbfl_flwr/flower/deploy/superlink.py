"""One run on a private SuperLink: ``flwr run``, its outcome, and complete cleanup.

By itself, ``flwr run`` starts a detached SuperLink that never ends and keeps the environment and working directory of
its first user, and it exits with 0 even if the run fails. So SuperLink and SuperExec are started here, with their own
FLWR_HOME, port, empty working directory (Ray puts it first on the workers' import path) and Ray directory. Each leads a
process group; the SuperExec's contains the ServerApp, or the simulation and all of Ray. Both are ended when the
:class:`ManagedSuperLink` is closed. The simulation engine is in :mod:`pbfl_flwr.flower.engines.flower_simulation`,
SuperNodes are in :mod:`pbfl_flwr.flower.deploy.local_federation`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pbfl_flwr.config import Scalar
from pbfl_flwr.config.toml import toml
from pbfl_flwr.errors import PbflError, writing
from pbfl_flwr.flower.deploy.bundle import copy_included
from pbfl_flwr.flower.deploy.processes import (
    Processes,
    executable,
    flwr,
    free_port,
    healthy,
    listens,
    signals_ignored,
)
from pbfl_flwr.runs.locks import claim, lock_of
from pbfl_flwr.util.atomic_files import private_opener

LOG = "flower.log"
ENDED = ("finished:completed", "finished:failed", "finished:stopped")
START_SECONDS = 60.0
CONNECTION = "own"  # the SuperLink's name in config.toml
ATTEMPTS = 3  # another process may take the free port before the SuperLink does


def connection(name: str, address: str, ca: Path | None) -> str:
    """Return the config.toml that tells ``flwr`` a SuperLink's Control API; ``ca`` None means without TLS."""
    trust = f"root-certificates = {json.dumps(str(ca))}" if ca else "insecure = true"
    return f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\n{trust}\n'


class ManagedSuperLink(ABC):
    """A private SuperLink with its SuperExec, as a context manager.

    Flower's log is written to the run directory, an absolute path, other files to a temporary one.

    Raises:
        PbflError: on entering, if Flower is not installed or its SuperLink does not start.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.log = run_dir / LOG
        self._lock = lock_of(run_dir)
        self._scratch = Path()
        self._processes: Processes | None = None
        self._superlink: subprocess.Popen[bytes] | None = None
        self._superexec: subprocess.Popen[bytes] | None = None
        self._follower: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        claim(self._lock, self.run_dir)
        # Not in the run directory: it contains Ray's sockets, whose paths are limited to about 100 characters.
        self._scratch = Path(tempfile.mkdtemp(prefix="pbfl-", dir="/tmp" if os.name == "posix" else None))
        self._processes = Processes(self._scratch)
        with contextlib.ExitStack() as undo:
            undo.push(self)
            for name in ("home", "empty", "ray"):
                (self._scratch / name).mkdir()
            self._prepare()
            address = next(filter(None, (self._start() for _ in range(ATTEMPTS))), None)
            if address is None:
                raise PbflError(
                    f"Flower's SuperLink did not start; the last lines of {self.log}:\n{self.tail()}"
                )
            self._complete()
            # The last one, so that it ends first, with the ServerApp: else that would complete a round without the
            # SuperNodes that have ended.
            trust = ["--root-certificates", str(self.ca)] if self.ca else ["--insecure"]
            self._superexec = self._spawn("flower-superexec", *trust, "--runtime-api-address", address)
            undo.pop_all()  # from now on __exit__ is called by the caller's with statement
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with signals_ignored():
            if self._processes is not None:
                self._processes.close()
            self._lock.release()

    def ended(self) -> bool:
        """Whether the run seems to have ended; :meth:`outcome` gives its status."""
        if self._processes is not None:
            self._processes.sweep()
        watched = (self._follower, self._superexec, self._superlink)
        return any(process is None or process.poll() is not None for process in watched)

    def outcome(self, run_id: str) -> tuple[str, str]:
        """Return Flower's (status, details) of the run; if it has not ended, continue to follow its log.

        Raises:
            PbflError: if SuperLink or SuperExec have ended.
        """
        for name, process in (("SuperLink", self._superlink), ("SuperExec", self._superexec)):
            if process is None or process.poll() is not None:
                raise PbflError(
                    f"Flower's {name} ended during the run; the last lines of {self.log}:\n{self.tail()}"
                )
        run = self._flwr("list", "--run-id", run_id, "--format", "json")["runs"][0]
        status = str(run["status"])
        if status not in ENDED and (self._follower is None or self._follower.poll() is not None):
            self._follow(run_id)
        return status, str(run.get("status-details") or "")

    def stop(self, run_id: str) -> None:
        """Ask Flower to stop the run; no error if the run or the SuperLink has already ended."""
        with contextlib.suppress(PbflError):
            self._flwr("stop", run_id, "--format", "json")

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of Flower's log, without those of HTTP requests."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        said = [line for line in text.splitlines() if line.strip() and "[uvicorn.access]" not in line]
        return "\n".join(said[-lines:])

    # Processes ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:  # noqa: B027 - optional
        """Make files that the SuperLink needs before it starts."""

    def _complete(self) -> None:  # noqa: B027 - optional
        """Start further processes once the SuperLink is ready."""

    @abstractmethod
    def _options(self, address: str) -> list[str]:
        """Return the SuperLink options of this kind of link; ``address`` is that of its Control API."""

    @property
    def ca(self) -> Path | None:
        """Certificate of the authority that signed the SuperLink's certificate; None without TLS."""
        return None

    def _start(self) -> str | None:
        """Start the SuperLink, wait until it is healthy and return its address; None if it ended or was not in time."""
        port = free_port()
        address = f"127.0.0.1:{port}"
        config = self._scratch / "home" / "config.toml"
        with writing(config):
            config.write_text(connection(CONNECTION, address, self.ca), encoding="utf-8")
        place = ["--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
        self._superlink = self._spawn("flower-superlink", *self._options(address), *place)
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._superlink.poll() is None:
            # Another SuperLink may have taken the port; without TLS its answer is as good.
            if healthy(port, self.ca) and listens(self._superlink.pid, port):
                return address
            time.sleep(0.1)
        if self._processes is not None:
            self._processes.end()
        return None

    def _run(self, app: Path, config: Mapping[str, Scalar], *more: str) -> str:
        """Submit the app, follow the run's log and return Flower's run id.

        Raises:
            PbflError: if Flower refuses the run, or the disk is full.
        """
        file = self._scratch / "home" / "run-config.toml"
        with writing(self._scratch):
            file.write_text(toml(config), encoding="utf-8")
            directory = copy_included(app, self._scratch / f"app-{time.monotonic_ns()}")
        result = self._flwr("run", str(directory), "--run-config", str(file), *more, "--format", "json")
        run_id = str(result["run-id"])
        self._follow(run_id)
        return run_id

    def _spawn(
        self, name: str, *arguments: str, log: Path | None = None, home: str = "home"
    ) -> subprocess.Popen[bytes]:
        assert self._processes is not None, "the link has not been entered"
        environment = {**self._environment(), "FLWR_HOME": str(self._scratch / home)}
        with open(log or self.log, "ab", opener=private_opener) as output:
            command = [executable(name), *arguments]
            return self._processes.start(command, self._scratch / "empty", environment, output)

    def _follow(self, run_id: str) -> None:
        """Start `flwr log --stream`, which ends with the run; cheaper than polling every second."""
        self._follower = self._spawn("flwr", "log", run_id, "--stream")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        return flwr(arguments, self._scratch / "empty", self._environment())

    def _environment(self) -> dict[str, str]:
        loopback = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1,localhost"]))
        # Flower starts a Ray of its own here; a running one would refuse its num-cpus.
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        if path := environment.get("PYTHONPATH"):  # child processes have another working directory
            environment["PYTHONPATH"] = os.pathsep.join(
                str(Path(part).absolute()) for part in path.split(os.pathsep)
            )
        return {
            **environment,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "FLWR_HOME": str(self._scratch / "home"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "NO_PROXY": loopback,
            "no_proxy": loopback,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
            "RAY_TMPDIR": str(self._scratch / "ray"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
