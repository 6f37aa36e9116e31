"""The clients of a run: their nodes and properties, and the sampling of clients for a round."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError, abbreviate, printable
from pbfl_flwr.flower.messages.identity import NAME, is_number
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.runs.records import ClientRecord
from pbfl_flwr.task import Task

ARCHITECTURE = re.compile(r"\w[\w.:@+-]{0,199}")  # cnn4, resnet18@imagenet+512, my_package.nets:build
NO_NODE = 0  # no node has this id


def client_from_reply(node: int, record: ConfigRecord) -> ClientRecord:
    """Parse a client's reply in the handshake.

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
        return ClientRecord(
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
            columns=printable(str(record.get("columns", ""))[:64]),
            code_version=printable(str(record.get("code-version", ""))[:64]),
            weights=printable(str(record.get("weights", ""))[:64]),
        )
    except KeyError as error:
        raise RejectedPayload(f"its handshake reply lacks {error}") from None
    except (ValueError, IndexError, PbflError) as error:
        raise RejectedPayload(f"its handshake reply cannot be read: {error}") from None


def _items(record: ConfigRecord, key: str) -> list[str]:
    value = record[key]
    if not isinstance(value, list):
        raise ValueError(f"'{key}' is not a list")
    return [str(item) for item in value]


@dataclass(frozen=True)
class Roster:
    """All clients of the federation, in ascending client order."""

    clients: Mapping[int, ClientRecord]

    @property
    def task(self) -> Task:
        """The task that all clients share."""
        return next(iter(self.clients.values())).task

    @property
    def architectures(self) -> list[str]:
        """The architectures, one per client."""
        return [client.architecture for client in self.clients.values()]

    @property
    def names(self) -> dict[int, str]:
        """Client number -> name, for clients that have one."""
        return {number: client.name for number, client in self.clients.items() if client.name}

    def node_label(self, node: int) -> str:
        """Return "client" and the label of the client on a node, or "node" and its id if there is none."""
        labels = (f"client {client.label}" for client in self.clients.values() if client.node == node)
        return next(labels, f"node {node}")

    def sample(
        self, fraction: float, seed: int, server_round: int, without: Collection[int] = ()
    ) -> list[int]:
        """Return the clients that train in a round: round(fraction·M), at least one, drawn with our own generator.

        Clients in ``without`` are unavailable.
        """
        available = sorted(set(self.clients) - set(without))
        size = min(len(available), max(1, round(fraction * len(self.clients))))
        return _drawn(available, size, seeds.derive(seed, "sample", server_round))

    def scored(self, fraction: float, seed: int, server_round: int, training: Collection[int]) -> list[int]:
        """Return the clients that are only evaluated in a round: round(fraction·(M - training)), drawn likewise."""
        others = sorted(set(self.clients) - set(training))
        return _drawn(others, round(fraction * len(others)), seeds.derive(seed, "scored", server_round))


NOBODY = Roster({})


def _drawn(clients: list[int], size: int, seed: int) -> list[int]:
    return sorted(int(client) for client in np.random.default_rng(seed).choice(clients, size, replace=False))


def other_weights(clients: Iterable[ClientRecord]) -> list[str]:
    """Return a line for every model whose clients start from different pretrained weights."""
    labels: dict[str, dict[str, list[str]]] = {}  # architecture -> hash of weights -> clients
    for client in clients:
        if client.weights:
            labels.setdefault(client.architecture, {}).setdefault(client.weights, []).append(client.label)
    return [
        f"'{name}' does not begin with the same weights everywhere: "
        + "; ".join(f"{weights} on client {abbreviate(members)}" for weights, members in by_weights.items())
        for name, by_weights in labels.items()
        if len(by_weights) > 1
    ]
