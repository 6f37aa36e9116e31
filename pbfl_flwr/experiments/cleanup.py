"""Removes the clients' networks and states that runs leave behind: ``pbfl clean``.

Of a finished run all of them; of a device's state directory those of all runs but the newest. Files and directories are
recognised by name, others stay. Symbolic links are neither followed nor removed, and nothing whose lock is held.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.status import snapshot
from pbfl_flwr.runs.directory import SERVER_LOCK, STATES_REMOVED, RunDirectory
from pbfl_flwr.runs.locks import RUN_LOCK
from pbfl_flwr.util.atomic_files import UnsavedState, write_atomically
from pbfl_flwr.util.locks import Lock
from pbfl_flwr.util.paths import home

DEPTH = 5  # levels of directories searched below the given one
EXPERIMENT = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}(-new-\d+)?")  # the directory of a run's clients
_CLIENT = r"(client-\d{5,}|named-.+?)"
_STATE = rf"{_CLIENT}\.(safetensors|\d+\.best)"
STATE = re.compile(
    rf"{_STATE}|\.{_STATE}(\.\d+)?\.tmp"
)  # the latter of a process that was killed while it wrote
LOCK = re.compile(rf"\.{_CLIENT}\.lock")
SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True)
class States:
    """Clients' states that are removed together.

    Attributes:
        path: the run, or a device's directory of one run.
        folders: the directories that hold them, deepest first.
        run: whether ``path`` is a run directory, which then records the removal.
        reason: why they stay; empty if they can go.
    """

    path: Path
    folders: tuple[Path, ...]
    run: bool = False
    reason: str = ""

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(status.st_size for status in self._statuses())

    @property
    def changed(self) -> float:
        """Modification time of the newest state, seconds since the epoch."""
        return max((status.st_mtime for status in self._statuses()), default=0.0)

    def remove(self) -> bool:
        """Remove them, and return whether that was possible: not if a process holds a lock of the run or a client.

        Raises:
            PbflError: if the system refuses it; the message names the file.
        """
        client_locks = self._files(LOCK)
        of_run = [self.path / name for name in (RUN_LOCK, SERVER_LOCK)] if self.run else []
        with ExitStack() as stack:
            try:
                for lock in [*filter(Path.is_file, of_run), *client_locks]:
                    stack.enter_context(Lock(lock).acquire(timeout=0))
            except OSError:  # includes filelock's Timeout
                return False
            if self.run:
                note = b"the clients' states were removed by pbfl clean\n"
                write_atomically(self.path / STATES_REMOVED, note)
            try:
                for file in (*self._files(STATE), *client_locks):
                    file.unlink(missing_ok=True)
            except OSError as error:
                raise UnsavedState(f"{error.filename} cannot be removed ({error.strerror})") from None
            for folder in self.folders:
                with suppress(OSError):  # not empty
                    folder.rmdir()
        return True

    def _files(self, name: re.Pattern[str]) -> list[Path]:
        files = [path for folder in self.folders for path in sorted(folder.iterdir())]
        return [
            path for path in files if name.fullmatch(path.name) and path.is_file() and not path.is_symlink()
        ]

    def _statuses(self) -> Iterator[os.stat_result]:
        for file in self._files(STATE):
            with suppress(FileNotFoundError):  # a running run renames its temporary files
                yield file.lstat()


def parse_age(text: str) -> float:
    """Parse an age such as ``30d``, ``12h``, ``90m``, ``2w`` or ``0d`` into seconds.

    Raises:
        PbflError: if it is not of that form.
    """
    if (match := re.fullmatch(r"(\d{1,6})([mhdw])", text)) is None:
        raise PbflError(f"--older-than {text}: must be a whole number with m, h, d or w, e.g. 30d")
    return float(match[1]) * SECONDS[match[2]]


def default_directories() -> list[Path]:
    """Return the default directories of runs and states that exist."""
    usual = (Path("runs"), home() / "runs", home() / "state")
    return [path for path in usual if path.is_dir()]


def scan(directories: Iterable[Path], seconds: float, now: float) -> Iterator[States]:
    """Yield the states in these directories and below them, those that stay with the reason.

    Directories are runs, directories of runs or devices' state directories; ``seconds`` is the minimum time since the
    last change, ``now`` the time since the epoch.

    Raises:
        OSError: if one of them is not a directory.
    """
    for directory in directories:
        for states in _scan(directory, DEPTH):
            if not states.reason and now - states.changed < seconds:
                yield replace(states, reason="changed more recently than --older-than")
            else:
                yield states


def _scan(directory: Path, depth: int) -> Iterator[States]:
    if (directory / "run.json").is_file():
        yield from _of_run(directory)
        return
    folders = [folder for folder in _folders(directory) if os.access(folder, os.R_OK | os.X_OK)]
    devices = [States(folder, (folder,)) for folder in folders if EXPERIMENT.fullmatch(folder.name)]
    devices = sorted((states for states in devices if states.changed), key=lambda states: states.changed)
    yield from devices[:-1]
    for newest in devices[-1:]:
        yield replace(newest, reason="the newest state, whose run may continue")
    for folder in folders:
        if depth and not folder.name.startswith(".") and not EXPERIMENT.fullmatch(folder.name):
            yield from _scan(folder, depth - 1)


def _of_run(path: Path) -> Iterator[States]:
    try:
        about, finished = RunDirectory(path).record(), snapshot(path).state == "finished"
    except (PbflError, KeyError) as error:
        yield States(path, (), reason=str(error))
        return
    # In clients/, or in a directory per SuperNode below it; new clients after the last round have their own ones.
    name = re.compile(rf"{re.escape(about.experiment)}(-new-\d+)?")
    roots = [folder for folder in _folders(path) if folder.name == "clients"]
    roots += [folder for root in roots for folder in _folders(root)]
    folders = [folder for root in roots for folder in _folders(root) if name.fullmatch(folder.name)]
    if folders:
        parents = sorted({folder.parent for folder in folders} | {path / "clients"}, reverse=True)
        reason = "" if finished else "the run can be resumed"
        yield States(path, (*folders, *parents), True, reason)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
