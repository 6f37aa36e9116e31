"""State on disk: each client's own model and memory, and the server's checkpoints.

One file an owner, safetensors, so that other tools can read it and nothing in it can run. A checksum and a schema
version are checked when it is read. A damaged or foreign file is an error that names it, and is never overwritten.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pbfl_flwr.flower.storage.atomic_files import (
    SCHEMA,
    DamagedState,
    UnsavedState,
    flush_directory,
    make_directory,
    write_atomically,
)
from pbfl_flwr.locks import Lock, need_locks
from pbfl_flwr.payloads import part_of, separate

# Tensors of the reply that are the model's and not kept twice: name -> its name there.
SAME = "reply-in-model"
BEST = ".best"  # ends the name of a client's state of the best round, whose number stands before it
SIZE_BYTES = 8  # of the number before the header of a safetensors file


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    private: bool = False,
    flushed: bool = True,
) -> None:
    """Write tensors and metadata with schema version and checksum; the caller is the only one who writes the file.

    Args:
        path: the file.
        tensors: by name.
        metadata: kept beside them.
        private: only the file's owner may read it.
        flushed: see :func:`pbfl_flwr.flower.storage.atomic_files.write_atomically`.
    """
    kept = separate(tensors)
    full = {**metadata, "schema": SCHEMA}
    full["checksum"] = _checksum(kept, full)
    write_atomically(path, _in_order(save(kept, full)), locked=True, private=private, flushed=flushed)


def _in_order(file: bytes) -> tuple[bytes, bytes, memoryview]:
    """Return the pieces of a safetensors file with sorted metadata, so that the same content is the same bytes."""
    size = int.from_bytes(file[:SIZE_BYTES], "little")
    header = json.loads(file[SIZE_BYTES : SIZE_BYTES + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % SIZE_BYTES)  # tensors begin where they can be mapped
    return len(text).to_bytes(SIZE_BYTES, "little"), text, memoryview(file)[SIZE_BYTES + size :]


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file written by :func:`save_tensors`.

    Raises:
        FileNotFoundError: if there is none.
        DamagedState: if it is no such file, of another schema, or its checksum does not fit.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    advice = "move it away to start afresh"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedState(f"state file {path} cannot be read ({error}); {advice}") from None
    if metadata.get("schema") != SCHEMA:
        raise DamagedState(
            f"state file {path} has schema {metadata.get('schema')!r}, expected {SCHEMA!r}; {advice}"
        )
    checksum = metadata.pop("checksum", "")
    if checksum != _checksum(tensors, metadata):
        raise DamagedState(f"state file {path} is damaged: its checksum does not fit; {advice}")
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    found = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _among(model: Mapping[str, Tensor], reply: Mapping[str, Tensor]) -> dict[str, str]:
    """Return which tensors of a reply are the model's, bit for bit: weights that were sent as they were trained."""
    found = {}
    for name, tensor in reply.items():
        parts = name.split(".")
        for start in range(len(parts)):
            own = ".".join(parts[start:])
            if own in model and _bits_are_equal(model[own], tensor):
                found[name] = own
                break
    return found


def _bits_are_equal(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def kept_best(path: Path) -> dict[int, Path]:
    """Return what :meth:`ClientStore.keep_best` keeps beside a client's file: best round -> the state after it.

    Args:
        path: the client's file.
    """
    name = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(BEST)}")
    found = {file: name.fullmatch(file.name) for file in path.parent.iterdir()}
    return {int(match[1]): file for file, match in found.items() if match}


@dataclass(frozen=True)
class ClientState:
    """What a client keeps from round to round.

    Attributes:
        round: the server round after which this was saved.
        participations: how many rounds the client has trained in.
        model: the network's whole state, buffers included.
        memory: what the method kept.
        reply: the encoded payload of that round, to answer the same question again.
        report: the metrics of that round, likewise.
        card: what one needs to know of the model to use it elsewhere, as JSON.
        prototypes: the tables behind its predictors by nearest prototype, likewise for use elsewhere.
    """

    round: int
    participations: int
    model: Mapping[str, Tensor]
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    reply: Mapping[str, Tensor] = field(default_factory=dict)
    report: Mapping[str, float | list[float]] = field(default_factory=dict)
    card: str = ""
    prototypes: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientStore:
    """One client's file, keyed by experiment and client id.

    Attributes:
        directory: the client's own directory on its own disk.
        experiment: id of the run; a file of another one is foreign.
        client: its number or its name.
        architecture: the network's name; weights of another one are foreign too.
        flushed: whether a state lasts when it is saved. In a simulation the server flushes the directory once for all
            clients of a round, before it counts the round as finished; until then it may be the state before.
    """

    directory: Path
    experiment: str
    client: int | str
    architecture: str
    flushed: bool = True

    @property
    def path(self) -> Path:
        """The file."""
        stem = f"named-{self.client}" if isinstance(self.client, str) else f"client-{self.client:05d}"
        return self.directory / f"{stem}.safetensors"

    def keep_best(self, number: int) -> None:
        """Keep the state that is there as that of the best round; it takes no time where files can have two names.

        Whoever calls this holds the lock, and the client has not trained since that round.

        Raises:
            UnsavedState: if the system refuses it.
        """
        file = self.path.with_name(f"{self.path.stem}.{number}{BEST}")
        if file.exists():
            return
        try:
            file.hardlink_to(self.path)
            flush_directory(self.directory)
        except OSError:
            write_atomically(file, self.path.read_bytes(), locked=True, private=True)
        for until, older in kept_best(self.path).items():
            if until != number:
                with suppress(OSError):
                    older.unlink()

    def locked(self) -> Lock:
        """Return a lock on this client's state; whoever else trains for the same client waits for it.

        Raises:
            UnsavedState: if the directory cannot be made, nothing be written there, or there are no locks.
        """
        lock = self.path.with_name(f".{self.path.stem}.lock")
        try:
            make_directory(self.directory, private=True)
            lock.touch()  # a state that is in use is a new one for pbfl clean
            need_locks(lock)
        except OSError as error:
            raise UnsavedState(f"state-dir {self.directory} cannot be written ({error.strerror})") from None
        return Lock(lock)

    def load(self) -> ClientState | None:
        """Return the client's state, None if it never took part.

        Raises:
            DamagedState: if the file is damaged, or of another experiment, client or architecture.
        """
        try:
            tensors, metadata = load_tensors(self.path)
        except FileNotFoundError:
            return None
        for key, expected in self._identity().items():
            if metadata.get(key) != expected:
                raise DamagedState(
                    f"state file {self.path} is of {key} {metadata.get(key)!r}, expected {expected!r}; "
                    "choose another state-dir or move the file away"
                )

        try:  # a checksum can be made by anybody
            number, participations = int(metadata["round"]), int(metadata["participations"])
            report = json.loads(metadata["report"])
            model = part_of(tensors, "model")
            same = {name: model[of] for name, of in json.loads(metadata.get(SAME, "{}")).items()}
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise DamagedState(f"state file {self.path} lacks what a client keeps ({error!r})") from None
        return ClientState(
            number,
            participations,
            model,
            part_of(tensors, "memory"),
            part_of(tensors, "reply") | same,
            report,
            metadata.get("card", ""),
            part_of(tensors, "prototypes"),
        )

    def save(self, state: ClientState) -> None:
        """Write the client's state in one piece: model, memory and reply are of the same round or not at all.

        It holds class means and counts, which only its owner may read.

        Whoever calls this holds the lock, or is the only one there is.
        """
        tensors = {f"model.{name}": tensor for name, tensor in state.model.items()}
        tensors |= {f"memory.{name}": tensor for name, tensor in state.memory.items()}
        same = _among(state.model, state.reply)
        tensors |= {f"reply.{name}": tensor for name, tensor in state.reply.items() if name not in same}
        tensors |= {f"prototypes.{name}": tensor for name, tensor in state.prototypes.items()}
        metadata = {
            **self._identity(),
            "card": state.card,
            "round": str(state.round),
            "participations": str(state.participations),
            "report": json.dumps(dict(state.report)),
            **({SAME: json.dumps(same)} if same else {}),
        }
        save_tensors(self.path, tensors, metadata, private=True, flushed=self.flushed)

    def _identity(self) -> dict[str, str]:
        return {"experiment": self.experiment, "client": str(self.client), "architecture": self.architecture}
