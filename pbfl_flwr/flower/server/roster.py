"""The clients of a run: their nodes and properties, and the sampling of clients for a round."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError, abbreviate, printable
from pbfl_flwr.flower.messages.client_ids import NAME, is_number
from pbfl_flwr.flower.messages.declaration import declaration
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.task import Task

ARCHITECTURE = re.compile(r"\w[\w.:@+-]{0,199}")  # cnn4, resnet18@imagenet+512, my_package.nets:build
NO_NODE = 0  # no node has this id


@dataclass(frozen=True)
class Member:
    """A client's properties, from its reply in the hello round.

    Attributes:
        client, node: its number 0..M-1, and the id of the node that it runs on.
        name: of a device that has one; the server then assigns the number, which is -1 until it has.
        simulated: whether it is one of the simulation's virtual nodes.
        configured_data: whether it uses the configured dataset and partition, not its own data or an app's.
        task, labels: K, d, input shape and the class names.
        columns: hash of the feature names or, for text, of the vocabulary; empty if there are no names.
        architecture, parameters: its network, and the number of (body, head) parameters.
        device: on which it trains.
        num_train, num_test: numbers of samples.
        edition: version of pbfl-flwr that it runs; empty if an older one did not send it.
        weights: hash of its body's pretrained initial weights; empty if there are none.
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
    code_version: str = ""
    weights: str = ""

    @classmethod
    def from_reply(cls, node: int, record: ConfigRecord) -> Member:
        """Parse a hello reply.

        Raises:
            RejectedPayload: if a field is missing or invalid.
        """
        try:
            shape, sizes, labels = (_items(record, key) for key in ("input-shape", "parameters", "labels"))
            client = record["client"]
            name = client if isinstance(client, str) else ""
            if not (NAME.fullmatch(name) if name else is_number(client)):
                raise ValueError(f"client {str(client)[:100]!r} is neither a number from 0 nor a name")
            if not ARCHITECTURE.fullmatch(architecture := str(record["architecture"])):
                raise ValueError(f"architecture {architecture[:100]!r} is not a network name")
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
                code_version=printable(str(record.get("code-version", ""))[:64]),
                weights=printable(str(record.get("weights", ""))[:64]),
            )
        except KeyError as error:
            raise RejectedPayload(f"its hello reply lacks {error}") from None
        except (ValueError, IndexError, PbflError) as error:
            raise RejectedPayload(f"its hello reply cannot be read: {error}") from None

    @classmethod
    def recorded(cls, entry: Mapping[str, Any]) -> Member:
        """Rebuild a client from its entry in run.json, without its node, which may have changed."""
        task = {**entry["task"], "input_shape": tuple(entry["task"]["input_shape"])}
        tuples = {key: tuple(entry[key]) for key in ("labels", "parameters")}
        return cls(**{**entry, **tuples, "node": NO_NODE, "task": Task(**task)})

    @property
    def label(self) -> str:
        """Readable name of this client: its name, or its number if it has none."""
        return self.name or str(self.client)

    @property
    def declaration(self) -> str:
        """Properties that later messages carry, so that a client can check that they are still its own."""
        return declaration(self.label, self.task, self.labels, self.columns)


def _items(record: ConfigRecord, key: str) -> list[str]:
    value = record[key]
    if not isinstance(value, list):
        raise ValueError(f"'{key}' is not a list")
    return [str(item) for item in value]


@dataclass(frozen=True)
class Roster:
    """All clients of the federation, in ascending client order."""

    members: Mapping[int, Member]

    @property
    def task(self) -> Task:
        """The task that all clients share."""
        return next(iter(self.members.values())).task

    @property
    def architectures(self) -> list[str]:
        """The architectures, one per client."""
        return [member.architecture for member in self.members.values()]

    @property
    def names(self) -> dict[int, str]:
        """Client number -> name, for clients that have one."""
        return {client: member.name for client, member in self.members.items() if member.name}

    def node_label(self, node: int) -> str:
        """Return "client" and the label of the client on a node, or "node" and its id if there is none."""
        labels = (f"client {member.label}" for member in self.members.values() if member.node == node)
        return next(labels, f"node {node}")

    def without(self, clients: Collection[int]) -> Roster:
        """Return the roster without these clients."""
        if not clients:
            return self
        return Roster({client: member for client, member in self.members.items() if client not in clients})

    def sample(
        self, fraction: float, seed: int, server_round: int, without: Collection[int] = ()
    ) -> list[int]:
        """Return the clients that train in a round: round(fraction·M), at least one, drawn with our own generator.

        Args:
            fraction: of all clients.
            seed: of the run.
            server_round: from 1.
            without: clients that are unavailable.
        """
        clients = sorted(set(self.members) - set(without))
        size = min(len(clients), max(1, round(fraction * len(self.members))))
        return _drawn(clients, size, seeds.derive(seed, "sample", server_round))

    def scored(self, fraction: float, seed: int, server_round: int, training: Collection[int]) -> list[int]:
        """Return the clients that are only evaluated in a round: round(fraction·(M - training)), drawn likewise.

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
    """Return a line for every model whose clients start from different pretrained weights."""
    labels: dict[str, dict[str, list[str]]] = {}  # architecture -> hash of weights -> clients
    for member in members:
        if member.weights:
            labels.setdefault(member.architecture, {}).setdefault(member.weights, []).append(member.label)
    return [
        f"'{name}' does not begin with the same weights everywhere: "
        + "; ".join(f"{weights} on client {abbreviate(clients)}" for weights, clients in found.items())
        for name, found in labels.items()
        if len(found) > 1
    ]
