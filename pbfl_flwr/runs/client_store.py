"""Each client's state, in a tensor file.

A damaged file, or one of another run, client or architecture, is an error that names it; it is never overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pbfl_flwr.payloads import part_of
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from pbfl_flwr.util.atomic_files import (
    DamagedState,
    UnsavedState,
    make_directory,
)
from pbfl_flwr.util.locks import Lock, need_locks

# Metadata key: tensors of the reply that equal one of the model's and are stored once, name -> name in the model.
SAME = "reply-in-model"
EXPERIMENT = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Ids of runs, by which a device names the directory of its state."""
WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def _shared_tensors(model: Mapping[str, Tensor], reply: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensors of a reply that are bit-identical to one of the model's: name -> name in the model."""
    names = {}
    for name, tensor in reply.items():
        parts = name.split(".")
        for start in range(len(parts)):
            model_name = ".".join(parts[start:])
            if model_name in model and _bits_are_equal(model[model_name], tensor):
                names[name] = model_name
                break
    return names


def _bits_are_equal(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    integers = WHOLE_NUMBERS.get(one.element_size(), torch.uint8)  # compares faster than bytes
    return torch.equal(*(tensor.contiguous().reshape(-1).view(integers) for tensor in (one, other)))


@dataclass(frozen=True)
class ClientState:
    """The state that a client keeps between rounds.

    Attributes:
        round: the server round after which this was saved.
        participations: number of rounds the client has trained in.
        model: the network's state, including buffers.
        memory: tensors that the method keeps.
        reply: the payload of that round, to reply again if the same message is repeated.
        report: the metrics of that round, likewise.
        card: description of the model for use elsewhere, as JSON.
        prototypes: the tables of its nearest-prototype predictors, likewise for use elsewhere.
        server_state: digest of the server's state to whose broadcast ``reply`` is the answer; empty if unknown.
    """

    round: int
    participations: int
    model: Mapping[str, Tensor]
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    reply: Mapping[str, Tensor] = field(default_factory=dict)
    report: Mapping[str, float | list[float]] = field(default_factory=dict)
    card: str = ""
    prototypes: Mapping[str, Tensor] = field(default_factory=dict)
    server_state: str = ""


@dataclass(frozen=True)
class ClientStore:
    """A client's state file, identified by experiment and client id.

    Attributes:
        directory: the client's own directory on its own disk.
        experiment: id of the run; a file of another run is refused.
        client: its number or its name.
        architecture: the network's name; a file with another one is refused.
        flushed: whether saving flushes the directory. In a simulation the server does it once per round for all
            clients, before the round counts as finished; until then a power failure may leave the previous state.
    """

    directory: Path
    experiment: str
    client: int | str
    architecture: str
    flushed: bool = True

    @property
    def path(self) -> Path:
        """Path of the file."""
        stem = f"named-{self.client}" if isinstance(self.client, str) else f"client-{self.client:05d}"
        return self.directory / f"{stem}.safetensors"

    def locked(self) -> Lock:
        """Return a lock on this client's state; other processes that train for the same client wait for it.

        Raises:
            UnsavedState: if the directory cannot be made or written, or the file system does not support locks.
        """
        lock = self.path.with_name(f".{self.path.stem}.lock")
        try:
            make_directory(self.directory)
            need_locks(lock)
        except OSError as error:
            raise UnsavedState(f"state-dir {self.directory} cannot be written ({error.strerror})") from None
        return Lock(lock)

    def load(self) -> ClientState | None:
        """Return the client's state, None if it has never trained.

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

        try:  # a valid checksum does not guarantee valid content
            number, participations = int(metadata["round"]), int(metadata["participations"])
            report = json.loads(metadata["report"])
            model = part_of(tensors, "model")
            same = {name: model[of] for name, of in json.loads(metadata.get(SAME, "{}")).items()}
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise DamagedState(
                f"state file {self.path} lacks parts of a client's state ({error!r})"
            ) from None
        return ClientState(
            number,
            participations,
            model,
            part_of(tensors, "memory"),
            part_of(tensors, "reply") | same,
            report,
            metadata.get("card", ""),
            part_of(tensors, "prototypes"),
            metadata.get("server-state", ""),
        )

    def save(self, state: ClientState) -> None:
        """Write the client's state atomically, so that model, memory and reply are always of the same round.

        The caller must hold the lock, unless no other process uses the file.
        """
        tensors = {f"model.{name}": tensor for name, tensor in state.model.items()}
        tensors |= {f"memory.{name}": tensor for name, tensor in state.memory.items()}
        same = _shared_tensors(state.model, state.reply)
        tensors |= {f"reply.{name}": tensor for name, tensor in state.reply.items() if name not in same}
        tensors |= {f"prototypes.{name}": tensor for name, tensor in state.prototypes.items()}
        metadata = {
            **self._identity(),
            "card": state.card,
            "round": str(state.round),
            "participations": str(state.participations),
            "report": json.dumps(dict(state.report)),
            **({"server-state": state.server_state} if state.server_state else {}),
            **({SAME: json.dumps(same)} if same else {}),
        }
        save_tensors(self.path, tensors, metadata, flushed=self.flushed)

    def _identity(self) -> dict[str, str]:
        return {"experiment": self.experiment, "client": str(self.client), "architecture": self.architecture}
