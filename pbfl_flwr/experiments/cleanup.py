"""What crashed and finished runs leave behind, and what of it may go: ``pbfl clean``.

Found is only what is recognisably this project's, by name and by what it holds; a directory that holds something else
beside it stays. Symbolic links are neither followed nor removed. What a lock says is in use is left alone.

::

    torn        temporary files of processes that were killed while they wrote
    states      clients' networks and state: of finished runs, and on a device of all runs but the newest
    unfinished  directories of runs that never finished a round
    cache       decoded data in <home>/cache; it is decoded anew when it is wanted
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from pbfl_flwr.data import cache
from pbfl_flwr.errors import PbflError, some
from pbfl_flwr.experiments.running.runner import NODES
from pbfl_flwr.experiments.text.numbers import kilobytes
from pbfl_flwr.flower.engines.flwr_engine import LOG
from pbfl_flwr.flower.storage.atomic_files import UnsavedState, write_atomically
from pbfl_flwr.flower.storage.history import FILES, SERVER_LOCK, STATES_REMOVED, RunDirectory, last_round
from pbfl_flwr.flower.storage.run_locks import RUN_LOCK
from pbfl_flwr.locks import Lock
from pbfl_flwr.places import home

Kind = Literal["torn", "states", "unfinished", "cache"]
KINDS: dict[Kind, str] = {
    "torn": "torn temporary files",
    "states": "clients' states",
    "unfinished": "runs without a finished round",
    "cache": "decoded data",
}
DEPTH = 5  # directories below the one that was given
STATE = re.compile(r"(client-\d{5,}|named-.+?)\.(safetensors|\d+\.best)")
LOCK = re.compile(r"\.(client-\d{5,}|named-.+)\.lock")
TORN = re.compile(r"\.(.+?)(\.\d+)?\.tmp")
RUN = re.compile(
    "|".join([*map(re.escape, (*FILES, LOG, NODES, "pbfl.log", RUN_LOCK)), r"supernode-\d+\.log"])
)
ENTRY = re.compile(r"[a-z0-9-]+-[0-9a-f]{16}")
NAMED = 3  # places in a line
SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True)
class Find:
    """Something that can be removed in one piece.

    Attributes:
        place: the run, the directory of states or the cache entry that it belongs to.
        kind: what it is.
        what: the same in words.
        files: that would be removed.
        folders: that would be removed once they are empty, the deepest first.
        locks: whoever uses it holds one of these.
        marked: the run whose clients' states these are; it is written down there that they are gone.
    """

    place: Path
    kind: Kind
    what: str
    files: tuple[Path, ...]
    folders: tuple[Path, ...] = ()
    locks: tuple[Path, ...] = ()
    marked: Path | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(status.st_size for status in _statuses(self.files))

    @property
    def changed(self) -> float:
        """When the newest file was written, seconds since the epoch; never, where they have just gone."""
        return max((status.st_mtime for status in _statuses(self.files)), default=math.inf)


@dataclass(frozen=True)
class Left:
    """Something that stays.

    Attributes:
        place: where.
        why: in words.
        size: bytes that could be freed; 0 where nothing is known of it.
    """

    place: Path
    why: str
    size: int = 0


def age(text: str) -> float:
    """Return seconds of ``30d``, ``12h``, ``90m``, ``2w`` or ``0d``.

    Raises:
        PbflError: if it is none of that form.
    """
    if (found := re.fullmatch(r"(\d{1,6})([mhdw])", text)) is None:
        raise PbflError(f"--older-than {text}: allowed is a whole number with m, h, d or w, e.g. 30d")
    return float(found[1]) * SECONDS[found[2]]


def places() -> list[Path]:
    """Return where this project leaves things when nothing else is said, as far as they are there."""
    usual = (Path("runs"), home() / "runs", home() / "state")
    return [path for path in usual if path.is_dir()]


def look(directories: Iterable[Path]) -> Iterator[Find | Left]:
    """Yield what there is in these directories and below them.

    Args:
        directories: runs, directories of runs, a device's state directory; as a person names them.

    Raises:
        PbflError: if one of them is no directory.
    """
    for directory in directories:
        if not directory.is_dir():
            raise PbflError(
                f"'{directory}' is no directory; allowed are runs, directories of runs, state directories"
            )
        yield from _walk(directory, DEPTH)


def cached() -> Iterator[Find | Left]:
    """Yield the entries of the cache of decoded data, and what killed processes left of them."""
    for folder in _folders(home() / "cache"):
        name = folder.name.removesuffix(".partial")
        files = _files(folder)
        lock = folder.with_name(f"{name}.lock")
        locks = (lock,) if lock.is_file() else ()
        names = {file.name for file in files}
        if not ENTRY.fullmatch(name) or not files or not names <= set(cache.FILES) or _folders(folder):
            yield Left(folder, "is no entry of the cache")
        elif folder.name != name:
            yield Find(folder, "torn", "half decoded data", files, (folder,), locks)
        elif set(cache.FILES[:2]) < names:
            yield Find(folder, "cache", "decoded data", (*files, *locks), (folder,), locks)


def choose(
    found: Iterable[Find | Left], kinds: Sequence[Kind], seconds: float, now: float
) -> tuple[list[Find], list[Left]]:
    """Return (what may go, what stays).

    Args:
        found: see :func:`look` and :func:`cached`.
        kinds: that were asked for.
        seconds: what changed more recently stays.
        now: seconds since the epoch.
    """
    go: list[Find] = []
    stay: list[Left] = []
    for one in found:
        if isinstance(one, Left):
            stay.append(one)
        elif one.kind not in kinds:
            stay.append(Left(one.place, f"{KINDS[one.kind]} (--{one.kind})", one.size))
        elif now - one.changed < seconds:
            stay.append(Left(one.place, "changed more recently than --older-than", one.size))
        elif _in_use(one):
            stay.append(Left(one.place, "is in use", one.size))
        else:
            go.append(one)
            stay += [Left(other, "is not this project's") for other in _others(one)]
    return go, stay


def remove(find: Find) -> Left | None:
    """Remove what was found, unless somebody has begun to use it; return what then stays.

    Raises:
        PbflError: if the system refuses it; the text names the file.
    """
    with ExitStack() as held:
        if not _take(find.locks, held):
            return Left(find.place, "is in use", find.size)
        if find.marked is not None:
            write_atomically(
                find.marked / STATES_REMOVED, b"the clients' states were removed by pbfl clean\n"
            )
        try:
            for file in find.files:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise UnsavedState(f"{error.filename} cannot be removed ({error.strerror})") from None
        for folder in find.folders:
            with suppress(OSError):  # somebody put something into it
                folder.rmdir()
    return None


def reasons(left: Iterable[Left]) -> list[str]:
    """Return a line a reason: how much stays for it, why, and where."""
    by_reason: dict[str, list[Left]] = {}
    for one in left:
        by_reason.setdefault(one.why, []).append(one)
    lines = []
    for why, ones in by_reason.items():
        size = f"{kilobytes(sum(one.size for one in ones))}, " if any(one.size for one in ones) else ""
        lines.append(f"{size}{why}: {some([str(one.place) for one in ones], NAMED)}")
    return lines


def _take(locks: Iterable[Path], held: ExitStack) -> bool:
    """Take all locks, or say that somebody has one."""
    try:
        for lock in locks:
            held.enter_context(Lock(lock).acquire(timeout=0))
    except OSError:  # a Timeout is one, too
        return False
    return True


def _in_use(find: Find) -> bool:
    with ExitStack() as held:
        if not _take(find.locks, held):
            return True
    return find.kind == "cache" and _mapped(find.place)


def _mapped(folder: Path) -> bool:
    """Whether a process that this user may look at has mapped a file of a folder; known on Linux alone."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"{folder}/" in maps.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def _others(find: Find) -> Iterator[Path]:
    """Yield what stands in the folders of a find and does not belong to it; these folders then stay."""
    known = {*find.files, *find.folders}
    for folder in find.folders:
        for path in sorted(folder.iterdir()):
            if path not in known and (path.is_symlink() or not _is_torn(path)):
                yield path


def _walk(directory: Path, depth: int) -> Iterator[Find | Left]:
    names = {path.name for path in (*_files(directory), *_folders(directory))}
    begun = SERVER_LOCK in names or {RUN_LOCK, LOG} <= names  # of a run that ended before it had a run.json
    if "run.json" in names or (begun and all(RUN.fullmatch(name) for name in names)):
        yield from _run(directory)
        return
    if torn := tuple(_torn(directory)):
        yield Find(directory, "torn", "torn temporary files", torn, locks=_guards(directory))
    folders = [folder for folder in _folders(directory) if os.access(folder, os.R_OK | os.X_OK)]
    states = [folder for folder in folders if any(_states(folder, folder.name))]
    yield from _device(states)
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and path.is_dir():
            yield Left(path, "is a symbolic link")
        elif path.is_dir() and path not in folders:
            yield Left(path, "cannot be read")
    for folder in folders:
        if folder not in states and depth and not folder.name.startswith("."):
            yield from _walk(folder, depth - 1)


def _run(path: Path) -> Iterator[Find | Left]:
    run = RunDirectory(path)
    try:
        about = run.read() if run.taken else None
        if about and not {"method", "num-server-rounds"} <= set(about["configuration"]):
            raise PbflError(f"{path / 'run.json'} is not this project's")
        begun, over = bool(run.rounds()), about is not None and _over(run, about)
    except PbflError as error:
        yield Left(path, str(error))
        return
    locks = tuple(lock for lock in (path / RUN_LOCK, path / SERVER_LOCK) if lock.is_file())
    homes = _homes(path, str(about["experiment"])) if about else ()
    states = tuple(file for folder in homes for file in _states(folder, folder.name))
    guards = tuple(file for folder in homes for file in _guards(folder))
    above = (
        tuple(sorted({folder.parent for folder in homes} | {path / "clients"}, reverse=True)) if homes else ()
    )
    if torn := tuple(file for folder in (path, *homes) for file in _torn(folder)):
        yield Find(path, "torn", "torn temporary files", torn, locks=(*locks, *guards))
    if not begun:
        own = tuple(file for file in _files(path) if RUN.fullmatch(file.name) and file not in locks)
        files, folders = (*own, *states, *guards, *locks), (*homes, *above, path)
        yield Find(path, "unfinished", "a run without a finished round", files, folders, (*locks, *guards))
    elif states and not over:
        size = sum(status.st_size for status in _statuses(states))
        yield Left(path, "clients' states of runs that can be resumed", size)
    elif states:
        what, files = "clients' states of a finished run", (*states, *guards)
        yield Find(path, "states", what, files, (*homes, *above), (*locks, *guards), path)


def _homes(path: Path, experiment: str) -> tuple[Path, ...]:
    """Return where a run directory holds its clients' states: in ``clients/``, or a directory a SuperNode below it.

    Clients that came after the last round have theirs beside the others', see :mod:`pbfl_flwr.flower.server.newcomers`.
    """
    roots = [folder for folder in _folders(path) if folder.name == "clients"]
    roots += [folder for root in roots for folder in _folders(root)]
    ours = re.compile(rf"{re.escape(experiment)}(-new-\d+)?")
    return tuple(folder for root in roots for folder in _folders(root) if ours.fullmatch(folder.name))


def _over(run: RunDirectory, about: Mapping[str, Any]) -> bool:
    """Whether nothing of a run is left to be done, the rounds of clients that come late included."""
    last, configuration = last_round(about), about["configuration"]
    if len(run.rounds()) < last or not configuration.get("new-clients"):
        return len(run.rounds()) >= last
    return any(line["round"] >= last + configuration["new-client-rounds"] for line in run.newcomers(last))


def _device(homes: Sequence[Path]) -> Iterator[Find | Left]:
    """Yield the states of one state directory; the newest may belong to a run that still goes on."""
    found = []
    for folder in homes:
        guards = _guards(folder)
        if torn := tuple(_torn(folder)):
            yield Find(folder, "torn", "torn temporary files", torn, locks=guards)
        files = (*_states(folder, folder.name), *guards)
        found.append(Find(folder, "states", "a device's state of an older run", files, (folder,), guards))
    # By the states alone: a lock is touched by whoever asks for an old one, too.
    found.sort(key=lambda find: replace(find, files=tuple(_states(find.place, find.place.name))).changed)
    yield from found[:-1]
    for newest in found[-1:]:
        yield Left(newest.place, "the newest state there, whose run may go on", newest.size)


def _states(folder: Path, experiment: str) -> Iterator[Path]:
    """Yield the files that hold a client's state of an experiment, which they say themselves."""
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
        ours = about.get("schema", "").isdecimal()  # of earlier versions, too
        if ours and about.get("experiment") == experiment and name[1] == stem:
            yield file


def _guards(folder: Path) -> tuple[Path, ...]:
    return tuple(file for file in _files(folder) if LOCK.fullmatch(file.name))


def _torn(folder: Path) -> Iterator[Path]:
    yield from filter(_is_torn, _files(folder))


def _is_torn(file: Path) -> bool:
    found = TORN.fullmatch(file.name)
    return bool(found and (RUN.fullmatch(found[1]) or STATE.fullmatch(found[1])))


def _statuses(files: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the status of those files that are still there: a run that goes on renames its temporary ones."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file.lstat()


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink()))


def _folders(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    return tuple(sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()))
