"""Finds and removes files left behind by finished and crashed runs: ``pbfl clean``.

Only files recognised as this project's by name and content are found; a directory that also holds other files is not
removed. Symbolic links are neither followed nor removed. Files whose lock is held are in use and not removed.

::

    torn        temporary files of processes that were killed while writing
    states      clients' networks and state: of finished runs, and on a device of all runs but the newest
    unfinished  directories of runs that never finished a round
    cache       decoded data in <home>/cache; it is decoded again when needed
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from pbfl_flwr.data import cache
from pbfl_flwr.errors import PbflError, abbreviate
from pbfl_flwr.experiments.console import kilobytes
from pbfl_flwr.experiments.results import NODES, new_client_rounds
from pbfl_flwr.flower.deploy.superlink import LOG
from pbfl_flwr.runs.directory import FILES, SERVER_LOCK, STATES_REMOVED, RunDirectory
from pbfl_flwr.runs.locks import RUN_LOCK
from pbfl_flwr.runs.records import RunRecord
from pbfl_flwr.util.atomic_files import UnsavedState, write_atomically
from pbfl_flwr.util.locks import Lock
from pbfl_flwr.util.paths import home

Kind = Literal["torn", "states", "unfinished", "cache"]
KINDS: dict[Kind, str] = {
    "torn": "torn temporary files",
    "states": "clients' states",
    "unfinished": "runs without a finished round",
    "cache": "decoded data",
}
DEPTH = 5  # levels of directories searched below the given one
STATE = re.compile(r"(client-\d{5,}|named-.+?)\.(safetensors|\d+\.best)")
LOCK = re.compile(r"\.(client-\d{5,}|named-.+)\.lock")
TORN = re.compile(r"\.(.+?)(\.\d+)?\.tmp")
RUN = re.compile(
    "|".join([*map(re.escape, (*FILES, LOG, NODES, "pbfl.log", RUN_LOCK)), r"supernode-\d+\.log"])
)
ENTRY = re.compile(r"[a-z0-9-]+-[0-9a-f]{16}")
NAMED = 3  # paths listed per line
SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True)
class Removable:
    """Files that can be removed together.

    Attributes:
        path: the run, the state directory or cache entry that they belong to.
        kind: one of ``KINDS``.
        description: the files in words.
        files: to remove.
        folders: to remove if empty then, deepest first.
        locks: lock files; a process that uses the files holds one of them.
        run: the run whose clients' states these are, in which their removal is recorded; None for other files.
    """

    path: Path
    kind: Kind
    description: str
    files: tuple[Path, ...]
    folders: tuple[Path, ...] = ()
    locks: tuple[Path, ...] = ()
    run: Path | None = None

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(status.st_size for status in _statuses(self.files))

    @property
    def changed(self) -> float:
        """Modification time of the newest file, seconds since the epoch; infinity if none exists any more."""
        return max((status.st_mtime for status in _statuses(self.files)), default=math.inf)


@dataclass(frozen=True)
class Retained:
    """Files that are not removed.

    Attributes:
        path: their path.
        reason: the reason.
        size: bytes that could be freed; 0 if unknown.
    """

    path: Path
    reason: str
    size: int = 0


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


def scan(directories: Iterable[Path]) -> Iterator[Removable | Retained]:
    """Yield what can and cannot be removed in these directories and below them.

    Args:
        directories: runs, directories of runs, devices' state directories.

    Raises:
        PbflError: if one of them is not a directory.
    """
    for directory in directories:
        if not directory.is_dir():
            raise PbflError(
                f"'{directory}' is not a directory; needed are runs, directories of runs, state directories"
            )
        yield from _scan(directory, DEPTH)


def scan_cache() -> Iterator[Removable | Retained]:
    """Yield the entries of the cache of decoded data, and partial ones left by killed processes."""
    for folder in _folders(home() / "cache"):
        name = folder.name.removesuffix(".partial")
        files = _files(folder)
        lock = folder.with_name(f"{name}.lock")
        locks = (lock,) if lock.is_file() else ()
        names = {file.name for file in files}
        if not ENTRY.fullmatch(name) or not files or not names <= set(cache.FILES) or _folders(folder):
            yield Retained(folder, "is not an entry of the cache")
        elif folder.name != name:
            yield Removable(folder, "torn", "partially decoded data", files, (folder,), locks)
        elif set(cache.FILES[:2]) < names:
            yield Removable(folder, "cache", "decoded data", (*files, *locks), (folder,), locks)


def select(
    candidates: Iterable[Removable | Retained], kinds: Sequence[Kind], seconds: float, now: float
) -> tuple[list[Removable], list[Retained]]:
    """Return (what to remove, what to leave).

    Args:
        candidates: see :func:`scan` and :func:`scan_cache`.
        kinds: selected for removal.
        seconds: minimum age; what changed more recently is left.
        now: current time in seconds since the epoch.
    """
    to_remove: list[Removable] = []
    retained: list[Retained] = []
    for one in candidates:
        if isinstance(one, Retained):
            retained.append(one)
        elif one.kind not in kinds:
            retained.append(Retained(one.path, f"{KINDS[one.kind]} (--{one.kind})", one.size))
        elif now - one.changed < seconds:
            retained.append(Retained(one.path, "changed more recently than --older-than", one.size))
        elif _in_use(one):
            retained.append(Retained(one.path, "is in use", one.size))
        else:
            to_remove.append(one)
            retained += [Retained(other, "is not this project's") for other in _foreign_paths(one)]
    return to_remove, retained


def remove(item: Removable) -> Retained | None:
    """Remove files unless they have come into use; return what is left in that case.

    Raises:
        PbflError: if the system refuses it; the message names the file.
    """
    with ExitStack() as locks:
        if not _acquire(item.locks, locks):
            return Retained(item.path, "is in use", item.size)
        if item.run is not None:
            write_atomically(item.run / STATES_REMOVED, b"the clients' states were removed by pbfl clean\n")
        try:
            for file in item.files:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise UnsavedState(f"{error.filename} cannot be removed ({error.strerror})") from None
        for folder in item.folders:
            with suppress(OSError):  # not empty: another process has written into it
                folder.rmdir()
    return None


def reason_lines(left: Iterable[Retained]) -> list[str]:
    """Return one line per reason: size, reason and paths of what is left."""
    by_reason: dict[str, list[Retained]] = {}
    for one in left:
        by_reason.setdefault(one.reason, []).append(one)
    lines = []
    for why, ones in by_reason.items():
        size = f"{kilobytes(sum(one.size for one in ones))}, " if any(one.size for one in ones) else ""
        lines.append(f"{size}{why}: {abbreviate([str(one.path) for one in ones], NAMED)}")
    return lines


def _acquire(locks: Iterable[Path], stack: ExitStack) -> bool:
    """Acquire all locks; return False if another process holds one."""
    try:
        for lock in locks:
            stack.enter_context(Lock(lock).acquire(timeout=0))
    except OSError:  # includes filelock's Timeout
        return False
    return True


def _in_use(item: Removable) -> bool:
    with ExitStack() as locks:
        if not _acquire(item.locks, locks):
            return True
    return item.kind == "cache" and _memory_mapped(item.path)


def _memory_mapped(folder: Path) -> bool:
    """Whether a process visible to this user has memory-mapped a file of the folder; detected on Linux only."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"{folder}/" in maps.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def _foreign_paths(item: Removable) -> Iterator[Path]:
    """Yield other files and directories in the folders to remove; these folders are then not removed."""
    known = {*item.files, *item.folders}
    for folder in item.folders:
        for path in sorted(folder.iterdir()):
            if path not in known and (path.is_symlink() or not _is_torn(path)):
                yield path


def _scan(directory: Path, depth: int) -> Iterator[Removable | Retained]:
    names = {path.name for path in (*_files(directory), *_folders(directory))}
    started = SERVER_LOCK in names or {RUN_LOCK, LOG} <= names  # a run that ended before it wrote run.json
    if "run.json" in names or (started and all(RUN.fullmatch(name) for name in names)):
        yield from _scan_run(directory)
        return
    if torn := tuple(_torn_files(directory)):
        yield Removable(directory, "torn", "torn temporary files", torn, locks=_lock_files(directory))
    folders = [folder for folder in _folders(directory) if os.access(folder, os.R_OK | os.X_OK)]
    states = [folder for folder in folders if any(_states(folder, folder.name))]
    yield from _device_states(states)
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and path.is_dir():
            yield Retained(path, "is a symbolic link")
        elif path.is_dir() and path not in folders:
            yield Retained(path, "cannot be read")
    for folder in folders:
        if folder not in states and depth and not folder.name.startswith("."):
            yield from _scan(folder, depth - 1)


def _scan_run(path: Path) -> Iterator[Removable | Retained]:
    run = RunDirectory(path)
    try:
        about = run.record() if run.taken else None
        if about and not {"method", "num-server-rounds"} <= set(about.configuration):
            raise PbflError(f"{path / 'run.json'} is not this project's")
        started, complete = bool(run.round_records()), about is not None and _is_complete(run, about)
    except PbflError as error:
        yield Retained(path, str(error))
        return
    locks = tuple(lock for lock in (path / RUN_LOCK, path / SERVER_LOCK) if lock.is_file())
    state_folders = _state_folders(path, about.experiment) if about else ()
    states = tuple(file for folder in state_folders for file in _states(folder, folder.name))
    lock_files = tuple(file for folder in state_folders for file in _lock_files(folder))
    parents = (
        tuple(sorted({folder.parent for folder in state_folders} | {path / "clients"}, reverse=True))
        if state_folders
        else ()
    )
    if torn := tuple(file for folder in (path, *state_folders) for file in _torn_files(folder)):
        yield Removable(path, "torn", "torn temporary files", torn, locks=(*locks, *lock_files))
    if not started:
        own = tuple(file for file in _files(path) if RUN.fullmatch(file.name) and file not in locks)
        files, folders = (*own, *states, *lock_files, *locks), (*state_folders, *parents, path)
        yield Removable(
            path, "unfinished", "a run without a finished round", files, folders, (*locks, *lock_files)
        )
    elif states and not complete:
        size = sum(status.st_size for status in _statuses(states))
        yield Retained(path, "clients' states of runs that can be resumed", size)
    elif states:
        what, files = "clients' states of a finished run", (*states, *lock_files)
        yield Removable(path, "states", what, files, (*state_folders, *parents), (*locks, *lock_files), path)


def _state_folders(path: Path, experiment: str) -> tuple[Path, ...]:
    """Return a run's directories of clients' states: in ``clients/``, or in a directory per SuperNode below it.

    New clients after the last round have their own ones there, see :mod:`pbfl_flwr.flower.server.strategy`.
    """
    roots = [folder for folder in _folders(path) if folder.name == "clients"]
    roots += [folder for root in roots for folder in _folders(root)]
    pattern = re.compile(rf"{re.escape(experiment)}(-new-\d+)?")
    return tuple(folder for root in roots for folder in _folders(root) if pattern.fullmatch(folder.name))


def _is_complete(run: RunDirectory, about: RunRecord) -> bool:
    """Whether a run is complete, including the new clients' rounds after the last one."""
    new_clients = run.new_client_records(about.last_round)
    return len(run.round_records()) >= about.last_round and len(new_clients) >= new_client_rounds(about)


def _device_states(state_folders: Sequence[Path]) -> Iterator[Removable | Retained]:
    """Yield the states in one state directory; the newest may belong to a running run and is left."""
    states = []
    for folder in state_folders:
        lock_files = _lock_files(folder)
        if torn := tuple(_torn_files(folder)):
            yield Removable(folder, "torn", "torn temporary files", torn, locks=lock_files)
        files = (*_states(folder, folder.name), *lock_files)
        states.append(
            Removable(folder, "states", "a device's state of an older run", files, (folder,), lock_files)
        )
    # By the states' times only: lock files of old runs are touched by readers, too.
    states.sort(key=lambda item: replace(item, files=tuple(_states(item.path, item.path.name))).changed)
    yield from states[:-1]
    for newest in states[-1:]:
        yield Retained(newest.path, "the newest state, whose run may continue", newest.size)


def _states(folder: Path, experiment: str) -> Iterator[Path]:
    """Yield the files that hold a client's state of this experiment, according to their metadata."""
    for file in _files(folder):
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
        if is_state and about.get("experiment") == experiment and name[1] == stem:
            yield file


def _lock_files(folder: Path) -> tuple[Path, ...]:
    return tuple(file for file in _files(folder) if LOCK.fullmatch(file.name))


def _torn_files(folder: Path) -> Iterator[Path]:
    yield from filter(_is_torn, _files(folder))


def _is_torn(file: Path) -> bool:
    match = TORN.fullmatch(file.name)
    return bool(match and (RUN.fullmatch(match[1]) or STATE.fullmatch(match[1])))


def _statuses(files: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the status of the files that still exist: a running run renames its temporary files."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file.lstat()


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink()))


def _folders(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    return tuple(sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()))
