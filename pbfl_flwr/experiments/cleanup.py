"""Removes the clients' networks and states that runs leave behind: ``pbfl clean``.

Of a finished run all of them; of a device's state directory those of all runs but the newest. Files are recognised by
name and content, others stay. Symbolic links are neither followed nor removed, and nothing whose lock is held.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pbfl_flwr.errors import PbflError, abbreviate
from pbfl_flwr.experiments.console import kilobytes
from pbfl_flwr.experiments.results import new_client_rounds
from pbfl_flwr.runs.directory import SERVER_LOCK, STATES_REMOVED, RunDirectory
from pbfl_flwr.runs.locks import RUN_LOCK
from pbfl_flwr.runs.records import RunRecord
from pbfl_flwr.util.atomic_files import UnsavedState, write_atomically
from pbfl_flwr.util.locks import Lock
from pbfl_flwr.util.paths import home

DEPTH = 5  # levels of directories searched below the given one
STATE = re.compile(r"(client-\d{5,}|named-.+?)\.(safetensors|\d+\.best)")
LOCK = re.compile(r"\.(client-\d{5,}|named-.+)\.lock")
TORN = re.compile(rf"\.{STATE.pattern}(\.\d+)?\.tmp")  # of a process that was killed while it wrote
PATHS_NAMED = 3  # in a line
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
    def files(self) -> list[Path]:
        """The state files, and parts of such files."""
        parts = [file for folder in self.folders for file in _files(folder) if TORN.fullmatch(file.name)]
        return [*_states_in(self.folders), *parts]

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(status.st_size for status in _statuses(self.files))

    @property
    def changed(self) -> float:
        """Modification time of the newest state, seconds since the epoch."""
        return max((status.st_mtime for status in _statuses(self.files)), default=0.0)

    @property
    def used(self) -> float:
        """Time of the last use by a client, seconds since the epoch: a lock file is touched by readers, too."""
        return max(self.changed, *(status.st_mtime for status in _statuses(self._client_locks)), 0.0)

    @property
    def locks(self) -> list[Path]:
        """Lock files; a process that uses the states holds one of them."""
        of_run = [self.path / RUN_LOCK, self.path / SERVER_LOCK] if self.run else []
        return [lock for lock in of_run if lock.is_file()] + self._client_locks

    @property
    def _client_locks(self) -> list[Path]:
        return [file for folder in self.folders for file in _files(folder) if LOCK.fullmatch(file.name)]

    def remove(self) -> str:
        """Remove them unless they have come into use, and return the reason in that case.

        Raises:
            PbflError: if the system refuses it; the message names the file.
        """
        with ExitStack() as locks:
            if not _acquire(self.locks, locks):
                return "is in use"
            if self.run:
                write_atomically(
                    self.path / STATES_REMOVED, b"the clients' states were removed by pbfl clean\n"
                )
            try:
                for file in (*self.files, *self._client_locks):
                    file.unlink(missing_ok=True)
            except OSError as error:
                raise UnsavedState(f"{error.filename} cannot be removed ({error.strerror})") from None
            for folder in self.folders:
                with suppress(OSError):  # not empty
                    folder.rmdir()
        return ""


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

    Args:
        directories: runs, directories of runs, devices' state directories.
        seconds: minimum time since the last use.
        now: current time in seconds since the epoch.

    Raises:
        PbflError: if one of them is not a directory.
    """
    for directory in directories:
        if not directory.is_dir():
            raise PbflError(
                f"'{directory}' is not a directory; needed are runs, directories of runs, state directories"
            )
        for states in _scan(directory, DEPTH):
            yield states if states.reason else replace(states, reason=_reason(states, seconds, now))


def reason_lines(states: Iterable[States]) -> list[str]:
    """Return one line per reason: size, reason and paths of the states that stay."""
    by_reason: dict[str, list[States]] = {}
    for one in states:
        by_reason.setdefault(one.reason, []).append(one)
    return [
        f"{kilobytes(sum(one.size for one in ones))}, {reason}: "
        f"{abbreviate([str(one.path) for one in ones], PATHS_NAMED)}"
        for reason, ones in by_reason.items()
    ]


def _reason(states: States, seconds: float, now: float) -> str:
    if now - states.used < seconds:
        return "used more recently than --older-than"
    with ExitStack() as locks:
        return "" if _acquire(states.locks, locks) else "is in use"


def _acquire(locks: Iterable[Path], stack: ExitStack) -> bool:
    """Acquire all locks; return False if another process holds one."""
    try:
        for lock in locks:
            stack.enter_context(Lock(lock).acquire(timeout=0))
    except OSError:  # includes filelock's Timeout
        return False
    return True


def _scan(directory: Path, depth: int) -> Iterator[States]:
    if (directory / "run.json").is_file():
        yield from _of_run(directory)
        return
    folders = [folder for folder in _folders(directory) if os.access(folder, os.R_OK | os.X_OK)]
    devices = [States(folder, (folder,)) for folder in folders if any(_states_in([folder]))]
    devices.sort(key=lambda states: states.changed)
    yield from devices[:-1]
    for newest in devices[-1:]:
        yield replace(newest, reason="the newest state, whose run may continue")
    for folder in folders:
        if depth and not folder.name.startswith(".") and not any(folder == one.path for one in devices):
            yield from _scan(folder, depth - 1)


def _of_run(path: Path) -> Iterator[States]:
    run = RunDirectory(path)
    try:
        about = run.record()
        complete = _is_complete(run, about)
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
        reason = "" if complete else "clients' states of runs that can be resumed"
        yield States(path, (*folders, *parents), True, reason)


def _is_complete(run: RunDirectory, about: RunRecord) -> bool:
    """Whether a run is complete, including the new clients' rounds after the last one."""
    new_clients = run.new_client_records(about.last_round)
    return len(run.round_records()) >= about.last_round and len(new_clients) >= new_client_rounds(about)


def _states_in(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that hold a client's state, of the experiment that their directory is named after."""
    for file in [file for folder in folders for file in _files(folder)]:
        if not (name := STATE.fullmatch(file.name)):
            continue
        try:
            with safe_open(file, framework="np") as opened:
                about = dict(opened.metadata() or {})
        except (SafetensorError, OSError):
            continue
        client = about.get("client", "")
        stem = f"client-{int(client):05d}" if client.isdecimal() else f"named-{client}"
        is_state = about.get("schema", "").isdecimal()  # any schema version
        if is_state and about.get("experiment") == file.parent.name and name[1] == stem:
            yield file


def _statuses(files: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the status of the files that still exist: a running run renames its temporary files."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file.lstat()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
