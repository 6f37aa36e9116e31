"""The files of a run directory, readable by other programs.

::

    <run-dir>/run.json                configuration, the method as it was built, versions, clients
              error.txt               the error that ended the run, if one did
              waiting.txt             what the server waits for, after a minute of waiting; removed afterwards
              rounds.jsonl            a line per round: accuracies, loss, bytes, seconds, failures, server metrics
              clients.jsonl           a line per round: every client's counters; "final" in the last: the final scoring
              result.txt              hash of the results, once the run is finished
              partition.json          samples of each class on each client, before the train/test split (simulation)
              prototypes.safetensors  the server's broadcast after the last round
              checkpoint.safetensors  the server's full state after the last round
              best.safetensors        the server's state with the best accuracy so far
              .round-<number>/        the last three of a round that is being written
              clients/<experiment>/   the clients' own models (simulation)

The files with tensors are written and read in :mod:`~pbfl_flwr.runs.checkpoint`. This module does not import
torch, so that commands that only read a run start fast.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from os.path import samestat
from pathlib import Path
from typing import Any, TypeVar

from filelock import Timeout

from pbfl_flwr.errors import PbflError, format_exception, pass_on_exit, printable, reading
from pbfl_flwr.runs.records import (
    VERSION,
    ClientsRecord,
    PartitionRecord,
    Record,
    RoundRecord,
    RunRecord,
)
from pbfl_flwr.util.atomic_files import (
    DamagedState,
    UnsavedState,
    flush_directory,
    make_directory,
    private_opener,
    read_regular,
    regular_file,
    remove_temporary,
    write_atomically,
)
from pbfl_flwr.util.locks import Lock

ERROR, WAITING, RESULT = "error.txt", "waiting.txt", "result.txt"
ROUNDS, CLIENTS = "rounds.jsonl", "clients.jsonl"
BROADCAST, CHECKPOINT, BEST = "prototypes.safetensors", "checkpoint.safetensors", "best.safetensors"
STATES, OF_SINKS, MLRUNS = "clients", ("tensorboard", "wandb"), "mlruns"  # folders
STAGED = ".round-"
SERVER_LOCK = ".server.lock"
# Bytes of the files that are read, by suffix: a line, run.json of 100,000 devices, histories of thousands of rounds.
LARGEST = {".txt": 2**16, ".json": 2**28, ".jsonl": 2**31}
LONGEST_LINE = 2**28  # bytes of a round in a history that is read by line: 100,000 devices
HANDOVER_SECONDS = 30.0  # to wait until a stopped ServerApp has ended
RecordT = TypeVar("RecordT", RoundRecord, ClientsRecord)
PACKAGES = ("pbfl-flwr", "flwr", "ray", "torch", "torchvision", "numpy", "scipy")


class RunRefused(PbflError):
    """The run conflicts with the one already in its directory, which is left unchanged and not marked as failed."""


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    def __init__(self, path: Path | str) -> None:
        object.__setattr__(self, "path", Path(path))

    @contextmanager
    def locked(self) -> Iterator[os.stat_result]:
        """Hold the lock against other servers, and yield its file; if the run fails, write the error to error.txt.

        Ctrl-C on ``flwr run`` only ends its log stream, so a user may resume a run that is still active.

        Raises:
            RunRefused: if another server still holds the lock after HANDOVER_SECONDS.
            UnsavedState: if the directory cannot be made or written.
        """
        lock = Lock(self.path / SERVER_LOCK)
        try:
            make_directory(self.path)
            lock.acquire(timeout=HANDOVER_SECONDS)
            held = (self.path / SERVER_LOCK).stat()  # while it is held no other file gets its inode
        except Timeout:
            raise RunRefused(
                f"run-dir = '{self.path}' is being written by another run; flwr list shows it, flwr stop RUN-ID ends it"
            ) from None
        except OSError as error:
            raise UnsavedState(f"run-dir = '{self.path}' cannot be written ({error.strerror})") from None
        try:
            remove_temporary(self.path)
            yield held
        except RunRefused:
            raise
        except (Exception, SystemExit) as error:
            pass_on_exit(error)
            if self.is_in_place(held):
                with suppress(UnsavedState):  # a full disk may be the original error
                    self.write_line(
                        ERROR, str(error) if isinstance(error, PbflError) else format_exception(error)
                    )
            raise
        finally:
            lock.release()

    def is_in_place(self, lock: os.stat_result) -> bool:
        """Return whether this still is the directory with this lock, not another one after it was moved."""
        try:
            return samestat(lock, (self.path / SERVER_LOCK).stat())
        except FileNotFoundError:
            return self.taken  # only the lock's file is gone

    @property
    def taken(self) -> bool:
        """Whether the directory holds a run."""
        return (self.path / "run.json").exists()

    def check_new(self) -> None:
        """Check that the directory holds no run yet, nor what is left of one, nor other runs, and is in none.

        Lists and reports do not look for runs in a run.

        Raises:
            RunRefused: if it does, or is.
        """
        if self.taken:
            raise RunRefused(f"run-dir = '{self.path}' already holds a run; choose another one, or resume it")
        if left := [name for name in (ROUNDS, CLIENTS) if (self.path / name).exists()]:
            raise RunRefused(
                f"run-dir = '{self.path}' holds {left[0]} of a run whose run.json is missing; choose another one, or "
                "restore it"
            )
        if inner := next(self.path.glob("*/run.json"), None):
            raise RunRefused(
                f"run-dir = '{self.path}' holds other runs, '{inner.parent.name}' for one; choose another one"
            )
        if RunDirectory(parent := self.path.absolute().parent).taken and (parent / ROUNDS).exists():
            raise RunRefused(f"run-dir = '{self.path}' lies in the directory of a run; choose another one")

    def write_line(self, name: str, line: str) -> None:
        """Write ERROR, RESULT or WAITING.

        Raises:
            UnsavedState: if writing fails.
        """
        write_atomically(self.path / name, f"{line}\n".encode())

    def remove(self, name: str) -> None:
        """Remove ERROR, RESULT or WAITING if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def result(self) -> str:
        """Return the hash of the results, "" while the run is not finished."""
        return self._line(RESULT)

    def set_waiting(self, line: str) -> None:
        """Write what the server waits for, or remove the file if the line is empty; errors are ignored."""
        with suppress(UnsavedState, OSError):
            self.write_line(WAITING, line) if line else self.remove(WAITING)

    def waiting(self) -> str:
        """Return what the server waits for, "" if nothing."""
        return self._line(WAITING)

    def error(self) -> str:
        """Return why the run ended early, "" if it did not."""
        return self._line(ERROR)

    def _line(self, name: str) -> str:
        with suppress(OSError):
            try:
                text = self.read(name).decode("utf-8", errors="replace")
            except DamagedState as error:
                text = str(error)
            return printable(text.strip(), lines=True)
        return ""

    def read(self, name: str) -> bytes:
        """Return the content of one of the run's files, which may have been written by others.

        Raises:
            OSError: if it does not exist or cannot be read.
            DamagedState: if it is no regular file in the directory, or larger than such a file can be.
        """
        return read_regular(self.path / name, LARGEST[Path(name).suffix])

    def start(self, **fields: Any) -> None:
        """Write run.json: the version of these records, and the other fields of a RunRecord.

        Raises:
            RunRefused: if the directory already holds a run.
        """
        self.check_new()
        self._write("run.json", RunRecord(version=VERSION, **fields))

    def update(self, **changes: Any) -> None:
        """Change fields of run.json, e.g. ``ended_after``, or the configuration of a resumed run.

        Raises:
            UnsavedState: if writing fails.
        """
        self._write("run.json", self.record().model_copy(update=changes))

    def record(self) -> RunRecord:
        """Return run.json.

        Raises:
            PbflError: if the directory holds no run.
            DamagedState: if the file is damaged or of another version.
        """
        file = self.path / "run.json"
        if not file.exists():
            why = f"; a run that was started there failed: {reason}" if (reason := self.error()) else ""
            raise PbflError(f"'{self.path}' is not a run directory: it has no run.json{why}")
        return RunRecord.from_json(self.read(file.name), file)

    def round_records(self) -> list[RoundRecord]:
        """Return the lines of rounds.jsonl, none if there is no such file, as before the first round.

        Raises:
            DamagedState: if a complete line is damaged or of another version.
        """
        return [*_records(self.path / ROUNDS, RoundRecord)]

    def client_records(self) -> list[ClientsRecord]:
        """Return the lines of clients.jsonl, none if there is no such file, as before the first round.

        Raises:
            DamagedState: if a complete line is damaged or of another version.
        """
        return [*self.each_client_record()]

    def each_client_record(self) -> Iterator[ClientsRecord]:
        """Yield the same one by one, since all of a long run may need much memory; raises as they are read."""
        return _records(self.path / CLIENTS, ClientsRecord)

    def partition(self) -> PartitionRecord:
        """Return partition.json; without the file a record without facts.

        Raises:
            DamagedState: if the file is damaged or of another version.
        """
        file = self.path / "partition.json"
        return PartitionRecord.from_json(self.read(file.name) if file.exists() else {}, file)

    def check_states(self, state_dir: str) -> None:
        """Check that the clients of a resumed run find their states again; otherwise they would start from scratch.

        Raises:
            RunRefused: if the run was made with another state-dir than the configured one, or a folder of its
                directory is a link, so that what it writes there would be written elsewhere.
        """
        if state_dir != (recorded := self.record().configuration.get("state-dir", "")):
            raise RunRefused(
                f"state-dir = '{state_dir}': a resumed run keeps its clients' state where it is, "
                f"{f'state-dir = {recorded!r}' if recorded else 'in its own directory'}"
            )
        states = self.path / STATES
        if state_dir and Path(state_dir).absolute().is_relative_to(self.path.absolute()):
            states = Path(state_dir)
        with reading(str(self.path)):
            below = [*states.iterdir()] if states.is_dir() else []
            sinks = map(self.path.joinpath, (*OF_SINKS, MLRUNS))
            inside = (self.path / MLRUNS).rglob("*")  # MLflow goes on with the files that are there
            links = [each for each in (states, *below, *sinks, *inside) if each.is_symlink()]
        if links:
            raise RunRefused(
                f"'{links[0]}' is a link; must be a folder of the run itself, which writes there"
            )

    def add_round(self, record: RoundRecord, clients: ClientsRecord) -> None:
        """Append a round to both histories; it is on disk when this returns.

        Raises:
            UnsavedState: if writing fails; neither history has the round then.
        """
        size = self._append(CLIENTS, clients)
        try:
            self._append(ROUNDS, record)
        except UnsavedState:
            self._cut(CLIENTS, size)
            raise

    def _append(self, name: str, record: Record) -> int:
        """Append a line to a history and return its size before."""
        history, size = self.path / name, None
        try:
            created = not history.exists()
            size = 0 if created else history.stat().st_size
            with open(history, "a", opener=private_opener) as file:
                file.write(json.dumps(record.to_json()) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if created:
                flush_directory(self.path)
        except OSError as error:
            if size is not None:
                self._cut(name, size)  # what is there may not be on the disk
            raise UnsavedState(f"{history} cannot be written ({error.strerror})") from None
        return size

    def _cut(self, name: str, size: int) -> None:
        with suppress(OSError):
            os.truncate(self.path / name, size)

    def finished_rounds(self) -> int:
        """Return the number of finished rounds, 0 if there is no history.

        Raises:
            DamagedState: if the history is damaged.
        """
        return len(self.round_records())

    def staged(self, number: int) -> Path:
        """Return where the files of a round are written before its lines are in the histories."""
        return self.path / f"{STAGED}{number}"

    def state_file(self, name: str) -> Path:
        """Return where BROADCAST, CHECKPOINT or BEST of the last round is: a server may be killed before it settles it.

        Raises:
            DamagedState: if the history is damaged.
        """
        if any(self.path.glob(f"{STAGED}*")) and _is_file(
            found := self.staged(self.finished_rounds()) / name
        ):
            return found
        return self.path / name

    def settle(self, done: int) -> None:
        """Put the files of the last finished round in place, and remove those of a round that is not finished.

        Raises:
            UnsavedState: if the directory cannot be written.
        """
        folders = [*self.path.glob(f"{STAGED}*")]
        try:
            for name in (BROADCAST, CHECKPOINT, BEST):
                if _is_file(file := self.staged(done) / name):
                    file.replace(self.path / name)
            for folder in folders:
                folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
            if folders:
                flush_directory(self.path)
        except OSError as error:
            raise UnsavedState(f"{self.path} cannot be written ({error.strerror or error})") from None

    def write_partition(self, partition: PartitionRecord) -> None:
        """Write partition.json."""
        self._write("partition.json", partition)

    def truncate(self, done: int) -> None:
        """Remove rounds after ``done`` from the histories.

        Raises:
            DamagedState: if one of them is damaged or lacks a round up to it; then both are unchanged.
            UnsavedState: if they cannot be written.
        """
        rounds = {
            ROUNDS: [record.round for record in self.round_records()],
            CLIENTS: [record.round for record in self.each_client_record()],
        }
        for name, numbers in rounds.items():
            if len(numbers) < done:
                raise DamagedState(f"{self.path / name} holds {len(numbers)} of the {done} finished rounds")
        for name, numbers in rounds.items():
            self._truncate(name, numbers, done)

    def _truncate(self, name: str, numbers: Sequence[int], done: int) -> None:
        """Remove the lines whose number is greater than ``done``, and an incomplete last one."""
        file = self.path / name
        if file.exists():
            lines = zip(numbers, _numbered_lines(file), strict=True)
            kept = b"".join(line + b"\n" for number, (_, line) in lines if number <= done)
            if len(kept) < file.stat().st_size:
                write_atomically(file, kept)

    def _write(self, name: str, record: Record) -> None:
        write_atomically(self.path / name, (json.dumps(record.to_json(), indent=1) + "\n").encode())


def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Return the numbers with None in place of NaN and infinity, which JSON does not support."""
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def _records(file: Path, kind: type[RecordT]) -> Iterator[RecordT]:
    """Yield the complete lines of a JSONL file; an incomplete last line belongs to an unfinished round."""
    for number, line in _numbered_lines(file):
        record = kind.from_json(line, f"{file}, line {number}")
        if record.round != number:
            raise DamagedState(
                f"{file}, line {number}, is of round {record.round}; must be of round {number}"
            )
        yield record


def _numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines of a JSONL file with their numbers, none if there is no file."""
    with suppress(FileNotFoundError), regular_file(file) as history:
        for number in count(1):
            line = history.readline(LONGEST_LINE + 1)
            if len(line) > LONGEST_LINE:
                raise DamagedState(f"{file}, line {number} is longer than {LONGEST_LINE} bytes")
            if not line.endswith(b"\n"):
                return
            yield number, line[:-1]


def _is_file(path: Path) -> bool:
    """Return whether this is a regular file in a directory, neither of them a link, which might lead anywhere."""
    return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, the operating system and the packages that make a run."""
    versions = {"python": platform.python_version(), "machine": platform.platform()}
    return versions | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
