"""What every round did, in files that other programs can read.

::

    <run-dir>/run.json                resolved configuration, versions, seeds, roster
              error.txt               why it ended early, in the words of the ServerApp; not there if it did not
              waiting.txt             whom the server waits for, after a minute; gone when it waits no more
              rounds.jsonl            one line a round: accuracies, loss, bytes, seconds, failures, the server's figures
              clients.jsonl           one line a round: every client's counters; "final" of the last: a last scoring
              newcomers.jsonl         one line a round of the clients that came after the last one (new-clients)
              result.txt              hash of what it came to; there once it is finished
              partition.json          samples of each class on each client, before the train/test split (simulation)
              prototypes.safetensors  what the server broadcasts after the last round
              checkpoint.safetensors  the server's whole state after the last round
              best.safetensors        the server's state with which the clients scored best so far
              clients/<experiment>/   the clients' own models (simulation); of the best round with .best in the name
              clients-removed.txt     in their place, when pbfl clean removed them

The files with tensors are written and read in :mod:`~pbfl_flwr.flower.storage.checkpoint`. This module does not import
torch, so that commands that only read a run start fast.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import Timeout

from pbfl_flwr.errors import PbflError, pointed, printable
from pbfl_flwr.flower.storage.atomic_files import (
    DamagedState,
    UnsavedState,
    flush_directory,
    make_directory,
    remove_torn,
    write_atomically,
)
from pbfl_flwr.locks import Lock

ERROR, NEWCOMERS, WAITING, RESULT = "error.txt", "newcomers.jsonl", "waiting.txt", "result.txt"
BROADCAST, CHECKPOINT, BEST = "prototypes.safetensors", "checkpoint.safetensors", "best.safetensors"
ENDED = "ended-after"  # of run.json, where patience ended a run
SERVER_LOCK, STATES_REMOVED = ".server.lock", "clients-removed.txt"
FILES = (
    "run.json",
    ERROR,
    WAITING,
    "rounds.jsonl",
    "clients.jsonl",
    NEWCOMERS,
    RESULT,
    "partition.json",
    BROADCAST,
    CHECKPOINT,
    BEST,
    SERVER_LOCK,
    STATES_REMOVED,
)  # of a run directory, of the server
OTHER_CONFIGURATION = (
    "run-dir = '{}' was made with another configuration (see its run.json); only num-server-rounds, patience, "
    "keep-best and the timeouts may differ when a run is resumed"
)
HANDOVER_SECONDS = 30.0  # a ServerApp that was stopped needs some to end
PACKAGES = ("pbfl-flwr", "flwr", "ray", "torch", "torchvision", "numpy", "scipy")


class RunRefused(PbflError):
    """A run that may not be made here because of the run that is here already, which is not marked as failed for it."""


@dataclass(frozen=True)
class Dealt:
    """What partition.json says: the samples of each class on each client, and what follows from them alone.

    Attributes:
        counts: (M, K).
        notes: on the partition.
        majority: what always answering a client's largest class scores.
        newcomer_majority: the same of the clients that come after the last round.
        paper_scalars: that travel in a round by the paper's formula, None where there is none.
        data: a hash of the samples that were dealt.
    """

    counts: list[list[int]] | None
    notes: list[str] | None
    majority: float | None
    newcomer_majority: float | None
    paper_scalars: float | None
    data: str | None


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    def __init__(self, path: Path | str) -> None:
        object.__setattr__(self, "path", Path(path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other servers out of this run, and write down why it ends early if it does.

        Ctrl-C on ``flwr run`` ends its stream only, so a run is easily resumed while it is still going on.

        Raises:
            RunRefused: if another server still writes it after HANDOVER_SECONDS.
            UnsavedState: if there can be no such directory.
        """
        lock = Lock(self.path / SERVER_LOCK)
        try:
            make_directory(self.path)
            lock.acquire(timeout=HANDOVER_SECONDS)
        except Timeout:
            raise RunRefused(
                f"run-dir = '{self.path}' is being written by another run; flwr list shows it, flwr stop RUN-ID ends it"
            ) from None
        except OSError as error:
            raise UnsavedState(f"run-dir = '{self.path}' cannot be written ({error.strerror})") from None
        try:
            remove_torn(self.path)
            yield
        except RunRefused:
            raise
        except Exception as error:
            said = error if isinstance(error, PbflError) else pointed(error)
            with suppress(UnsavedState):  # a full disk may be the very reason
                write_atomically(self.path / ERROR, f"{said}\n".encode())
            raise
        finally:
            lock.release()

    @property
    def taken(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / "run.json").exists()

    def begin_locked(self) -> None:
        """Make sure that a new run finds none here.

        Raises:
            RunRefused: if there is one.
        """
        if self.taken:
            raise RunRefused(f"run-dir = '{self.path}' already holds a run; choose another one, or resume it")

    def forget_error(self) -> None:
        """Remove what an earlier server wrote on why it ended; for who is alone and may write this run."""
        (self.path / ERROR).unlink(missing_ok=True)

    def seal(self, result: str) -> None:
        """Write down the hash of what the run came to.

        Raises:
            UnsavedState: if the system refuses it.
        """
        write_atomically(self.path / RESULT, f"{result}\n".encode())

    def unseal(self) -> None:
        """Remove it: the run goes on."""
        (self.path / RESULT).unlink(missing_ok=True)

    def result(self) -> str:
        """Return the hash of what the run came to, or nothing while it is not finished."""
        with suppress(OSError):
            return printable((self.path / RESULT).read_text(encoding="utf-8", errors="replace").strip())
        return ""

    def set_waiting(self, line: str) -> None:
        """Write down whom the server waits for, or remove it if the line is empty. If need be a run goes on without."""
        with suppress(UnsavedState, OSError):
            if line:
                write_atomically(self.path / WAITING, f"{line}\n".encode())
            else:
                (self.path / WAITING).unlink(missing_ok=True)

    def waiting(self) -> str:
        """Return whom the server waits for, or nothing."""
        with suppress(OSError):
            return printable((self.path / WAITING).read_text(encoding="utf-8", errors="replace").strip())
        return ""

    def start(self, configuration: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write run.json.

        Raises:
            RunRefused: if the directory already holds a run.
        """
        self.begin_locked()
        versions = {name: _version(name) for name in PACKAGES}
        about = {"python": platform.python_version(), "machine": platform.platform(), **versions}
        self._write("run.json", {"configuration": dict(configuration), "versions": about, **facts})

    def resume(self, configuration: Mapping[str, Any]) -> None:
        """Record the configuration under which a run goes on: how far it goes may have changed."""
        about = {key: value for key, value in self.read().items() if key != ENDED}
        self._write("run.json", {**about, "configuration": dict(configuration)})

    def mark_end(self, after: int) -> None:
        """Write down that a run ends after this round, whatever num-server-rounds says.

        Raises:
            UnsavedState: if the system refuses it.
        """
        self._write("run.json", {**self.read(), ENDED: after})

    def update_clients(self, clients: Sequence[Mapping[str, Any]], joined: Sequence[str]) -> None:
        """Write down who takes part, now that others have joined.

        Args:
            clients: all.
            joined: labels of those others; a round that is not finished does not say them yet.

        Raises:
            UnsavedState: if the system refuses it.
        """
        about = self.read()
        self._write(
            "run.json", {**about, "clients": list(clients), "joined": [*about.get("joined", []), *joined]}
        )

    def read(self) -> dict[str, Any]:
        """Return run.json.

        Raises:
            PbflError: if there is no run here.
        """
        file = self.path / "run.json"
        if not file.exists():
            error = self.path / ERROR
            said = error.read_text(encoding="utf-8").strip() if error.exists() else ""
            why = f"; what was to run there ended with: {said}" if said else ""
            raise PbflError(f"'{self.path}' is no run directory: it has no run.json{why}")
        found = read_object(file)
        if not isinstance(found.get("configuration"), dict) or not isinstance(found.get("experiment"), str):
            raise DamagedState(f"{file} is damaged: it lacks 'configuration' or 'experiment'")
        return found

    def check_states(self) -> None:
        """Make sure that the clients' states were not removed: without them everybody would begin anew.

        Raises:
            RunRefused: if they were.
        """
        if (self.path / STATES_REMOVED).exists():
            raise RunRefused(
                f"'{self.path}': its clients' states were removed by pbfl clean; it can be shown, compared and "
                "reported, but not resumed or exported"
            )

    def rounds(self) -> list[dict[str, Any]]:
        """Return the rounds so far."""
        return _lines(self.path / "rounds.jsonl")

    def client_rounds(self) -> list[dict[str, Any]]:
        """Return every client's counters, a line a round."""
        return _lines(self.path / "clients.jsonl")

    def add_round(self, line: Mapping[str, Any], clients: Mapping[str, Any]) -> None:
        """Append one round to both histories; it is on the disk when this returns.

        Raises:
            UnsavedState: if the system refuses it; what is torn off is cut off when the run is resumed.
        """
        for name, entry in (("clients.jsonl", clients), ("rounds.jsonl", line)):
            self._append(name, entry)

    def newcomers(self, after: int) -> list[dict[str, Any]]:
        """Return the rounds of the new clients, who came when the run had so many of its own.

        Raises:
            DamagedState: if newcomers.jsonl is.
        """
        return [line for line in _lines(self.path / NEWCOMERS) if line.get("after") == after]

    def add_newcomers(self, line: Mapping[str, Any]) -> None:
        """Append a round of the new clients; it is on the disk when this returns.

        Raises:
            UnsavedState: if the system refuses it.
        """
        self._append(NEWCOMERS, line)

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        try:
            begins = not (self.path / name).exists()
            with (self.path / name).open("a") as file:
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if begins:
                flush_directory(self.path)
        except OSError as error:
            raise UnsavedState(f"{self.path / name} cannot be written ({error.strerror})") from None

    def write_partition(self, dealt: Dealt) -> None:
        """Write partition.json."""
        self._write("partition.json", asdict(dealt))

    def partition_counts(self) -> list[list[int]] | None:
        """Return the samples of each class on each client, None where they are not known.

        Raises:
            DamagedState: if partition.json is.
        """
        return self._dealt().counts

    def majority(self) -> float | None:
        """Return what always answering a client's most frequent training class scores, None where it is not known."""
        return self._dealt().majority

    def newcomer_majority(self) -> float | None:
        """Return the same of the clients that come after the last round, None where there are none."""
        return self._dealt().newcomer_majority

    def paper_scalars(self) -> float | None:
        """Return the paper's count of the scalars that travel in a round, all clients, None where it is not known."""
        return self._dealt().paper_scalars

    def data(self) -> str | None:
        """Return the hash of the samples that were dealt, None where it is not known."""
        return self._dealt().data

    def _dealt(self) -> Dealt:
        file = self.path / "partition.json"
        found = read_object(file) if file.exists() else {}
        dealt = Dealt(**{field.name: found.get(field.name) for field in fields(Dealt)})
        counted = dealt.counts is None or (
            isinstance(dealt.counts, list)
            and all(isinstance(row, list) and all(isinstance(n, int) for n in row) for row in dealt.counts)
        )
        figures = (dealt.majority, dealt.newcomer_majority, dealt.paper_scalars)
        if not counted or not all(isinstance(figure, int | float | None) for figure in figures):
            raise DamagedState(f"{file} is damaged: its counts or figures are no numbers")
        return dealt

    def cut(self, done: int) -> None:
        """Remove from the histories what lies beyond so many rounds: it was never acknowledged by a checkpoint."""
        for name in ("rounds.jsonl", "clients.jsonl", NEWCOMERS):
            lines = _lines(self.path / name)
            kept = [entry for entry in lines if entry.get("after", entry["round"]) <= done]
            if (self.path / name).exists():
                write_atomically(
                    self.path / name, "".join(json.dumps(entry) + "\n" for entry in kept).encode()
                )

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=1) + "\n").encode())


def last_round(about: Mapping[str, Any]) -> int:
    """Return the number of a run's last round: num-server-rounds, or that after which patience ended it.

    Args:
        about: what run.json holds.
    """
    return int(about.get(ENDED, about["configuration"]["num-server-rounds"]))


def read_object(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds.

    Raises:
        DamagedState: if it is no JSON object.
    """
    try:
        found = json.loads(file.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise DamagedState(f"{file} is damaged ({error})") from None
    if not isinstance(found, dict):
        raise DamagedState(f"{file} is damaged: it holds no object")
    return found


def finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Return the figures with None for what is NaN or infinite: JSON knows neither."""
    return {name: float(value) if math.isfinite(value) else None for name, value in figures.items()}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSONL file; a torn last line was never acknowledged.

    Raises:
        DamagedState: if a complete line is no JSON, or not of a round.
    """
    if not file.exists():
        return []
    found = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise DamagedState(f"{file}, line {number} is damaged ({error})") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("round"), int):
            raise DamagedState(f"{file}, line {number} is damaged: it is no round")
        found.append(entry)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
