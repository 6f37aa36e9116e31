"""Who takes part: node id <-> client id, what every client brings, and who is asked in a round."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError, printable, some
from pbfl_flwr.flower.messages.client_ids import NAME, is_number
from pbfl_flwr.flower.messages.declaration import declaration
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.task import Task

ARCHITECTURE = re.compile(r"\w[\w.:@+-]{0,199}")  # cnn4, resnet18@imagenet+512, my_package.nets:build
NOWHERE = 0  # no node has this id


@dataclass(frozen=True)
class Member:
    """What a client said in the hello round.

    Attributes:
        client, node: its number 0..M-1, and the id of the node that it runs on.
        name: of a device that has one; then the server gives the number, and -1 stands until it has.
        simulated: whether it is one of the simulation's virtual nodes.
        configured_data: whether it takes the configured dataset and partition, not its own data or an app's.
        task, labels: K, d, input shape and the names of the classes.
        columns: hash of the names of the features, of text of the vocabulary; nothing where there are no names.
        architecture, parameters: its network, and (body, head) parameters of it.
        device: where it trains.
        num_train, num_test: samples.
        edition: of pbfl-flwr that it runs; nothing where an older one did not say.
        weights: hash of the pretrained ones with which its body begins; nothing where there are none.
    """

    client: int
    name: str
    node: int
    simulated: bool
    configured_data: bool
    task: Task
    labels: tuple[str, ...]
    architecture: str
    parameters: tuple[int, int]
    device: str
    num_train: int
    num_test: int
    columns: str = ""
    edition: str = ""
    weights: str = ""

    @classmethod
    def from_reply(cls, node: int, record: ConfigRecord) -> Member:
        """Read one hello.

        Raises:
            RejectedPayload: if a field is missing or of the wrong type.
        """
        try:
            shape, sizes, labels = (_items(record, key) for key in ("input-shape", "parameters", "labels"))
            client = record["client"]
            name = client if isinstance(client, str) else ""
            if not (NAME.fullmatch(name) if name else is_number(client)):
                raise ValueError(f"client {str(client)[:100]!r} is neither a number from 0 nor a name")
            if not ARCHITECTURE.fullmatch(architecture := str(record["architecture"])):
                raise ValueError(f"architecture {architecture[:100]!r} is no name of a network")
            return cls(
                client=-1 if name else int(str(client)),
                name=name,
                node=node,
                simulated=bool(record["simulated"]),
                configured_data=bool(record["configured-data"]),
                task=Task(
                    int(str(record["num-classes"])),
                    int(str(record["feature-dim"])),
                    tuple(int(side) for side in shape),
                    int(str(record.get("vocabulary-size", 0))),
                ),
                labels=tuple(labels),
                architecture=architecture,
                parameters=(int(sizes[0]), int(sizes[1])),
                device=printable(str(record["device"])),
                num_train=int(str(record["num-train"])),
                num_test=int(str(record["num-test"])),
                columns=str(record.get("columns", ""))[:64],
                edition=printable(str(record.get("edition", ""))[:64]),
                weights=printable(str(record.get("weights", ""))[:64]),
            )
        except KeyError as error:
            raise RejectedPayload(f"its hello lacks {error}") from None
        except (ValueError, IndexError, PbflError) as error:
            raise RejectedPayload(f"its hello cannot be read: {error}") from None

    @classmethod
    def recorded(cls, was: Mapping[str, Any]) -> Member:
        """Rebuild a client of run.json; on which node it is now is not known."""
        task = {**was["task"], "input_shape": tuple(was["task"]["input_shape"])}
        listed = {key: tuple(was[key]) for key in ("labels", "parameters")}
        return cls(**{**was, **listed, "node": NOWHERE, "task": Task(**task)})

    @property
    def label(self) -> str:
        """How a person calls this client: its name, or its number."""
        return self.name or str(self.client)

    @property
    def declaration(self) -> str:
        """What every later question holds it to."""
        return declaration(self.label, self.task, self.labels, self.columns)


def _items(record: ConfigRecord, key: str) -> list[str]:
    value = record[key]
    if not isinstance(value, list):
        raise ValueError(f"'{key}' is no list")
    return [str(item) for item in value]


@dataclass(frozen=True)
class Roster:
    """All clients of the federation that said hello, in ascending client order."""

    members: Mapping[int, Member]

    @property
    def task(self) -> Task:
        """What they agree on."""
        return next(iter(self.members.values())).task

    @property
    def architectures(self) -> list[str]:
        """The architectures, one a client."""
        return [member.architecture for member in self.members.values()]

    @property
    def names(self) -> dict[int, str]:
        """Number -> name, of the clients that have one."""
        return {client: member.name for client, member in self.members.items() if member.name}

    def called(self, node: int) -> str:
        """How a person calls what runs on a node."""
        labels = (f"client {member.label}" for member in self.members.values() if member.node == node)
        return next(labels, f"node {node}")

    def without(self, clients: Collection[int]) -> Roster:
        """Return the roster of the other clients."""
        if not clients:
            return self
        return Roster({client: member for client, member in self.members.items() if client not in clients})

    def sample(
        self, fraction: float, seed: int, server_round: int, without: Collection[int] = ()
    ) -> list[int]:
        """Return the clients that train in a round: round(fraction·M), at least one, by our own generator.

        Args:
            fraction: of all clients.
            seed: of the run.
            server_round: from 1.
            without: clients that cannot be asked.
        """
        clients = sorted(set(self.members) - set(without))
        size = min(len(clients), max(1, round(fraction * len(self.members))))
        return _drawn(clients, size, seeds.derive(seed, "sample", server_round))

    def scored(self, fraction: float, seed: int, server_round: int, training: Collection[int]) -> list[int]:
        """Return the clients that are only scored in a round: round(fraction·(M - training)), drawn likewise.

        Args:
            fraction: of the clients that do not train.
            seed: of the run.
            server_round: from 1.
            training: clients that train in the round.
        """
        others = sorted(set(self.members) - set(training))
        return _drawn(others, round(fraction * len(others)), seeds.derive(seed, "scored", server_round))


def _drawn(clients: list[int], size: int, seed: int) -> list[int]:
    return sorted(int(client) for client in np.random.default_rng(seed).choice(clients, size, replace=False))


def other_weights(members: Iterable[Member]) -> list[str]:
    """Return a line for every model whose pretrained weights are not the same on all clients that begin with them."""
    begun: dict[str, dict[str, list[str]]] = {}
    for member in members:
        if member.weights:
            begun.setdefault(member.architecture, {}).setdefault(member.weights, []).append(member.label)
    return [
        f"'{name}' does not begin with the same weights everywhere: "
        + "; ".join(f"{weights} on client {some(clients)}" for weights, clients in found.items())
        for name, found in begun.items()
        if len(found) > 1
    ]
