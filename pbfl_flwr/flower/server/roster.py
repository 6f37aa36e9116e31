"""The clients of a run: their nodes and properties, and the sampling of clients for a round."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord

from pbfl_flwr import seeds
from pbfl_flwr.config import Settings
from pbfl_flwr.data.contract import MAX_NATURAL_ID
from pbfl_flwr.errors import PbflError, abbreviate, printable
from pbfl_flwr.flower.messages.identity import NAME, is_number
from pbfl_flwr.method import Method
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import MAX_COUNT, RejectedPayload
from pbfl_flwr.runs.early_stopping import check_patience
from pbfl_flwr.runs.records import ClientRecord
from pbfl_flwr.task import Task

ARCHITECTURE = re.compile(r"\w[\w.:@+-]{0,199}")  # cnn4, resnet18@imagenet+512, my_package.nets:build
MAX_TEXT = 64  # characters of what a device says of itself, e.g. where it trains
MAX_LABEL = 1000  # characters of a class's name
MAX_NUMBERS = 16  # in a list
DOMINANT = 0.9  # share of all test samples
NO_NODE = 0  # no node has this id


def client_from_reply(node: int, record: ConfigRecord) -> ClientRecord:
    """Parse a client's reply in the handshake.

    Raises:
        RejectedPayload: if a field is missing or invalid.
    """
    try:
        shape, sizes = (_numbers(record, key) for key in ("input-shape", "parameters"))
        if len(sizes) != 2:
            raise ValueError(f"'parameters' has {len(sizes)} numbers, must be body and head")
        K, d = _number(record, "num-classes"), _number(record, "feature-dim")
        task = Task(K, d, shape, _number(record, "vocabulary-size", 0))
        labels = _names(record, "labels", K)
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
            task=task,
            labels=tuple(labels),
            architecture=architecture,
            parameters=(sizes[0], sizes[1]),
            device=printable(str(record["device"])[:MAX_TEXT]),
            num_train=_number(record, "num-train"),
            num_test=_number(record, "num-test"),
            num_validation=_number(record, "num-validation", 0),
            columns=printable(str(record.get("columns", ""))[:64]),
            code_version=printable(str(record.get("code-version", ""))[:64]),
            weights=printable(str(record.get("weights", ""))[:64]),
            deal=printable(str(record.get("deal", ""))[:100]),
            natural_id=printable(str(record.get("natural-id", ""))[:MAX_NATURAL_ID])
            if record["simulated"]
            else "",
        )
    except KeyError as error:
        raise RejectedPayload(f"its handshake reply lacks {error}") from None
    except (ValueError, IndexError, PbflError) as error:
        raise RejectedPayload(f"its handshake reply cannot be read: {error}") from None


def _number(record: ConfigRecord, key: str, otherwise: int | None = None) -> int:
    return _counted(key, record[key] if otherwise is None else record.get(key, otherwise))


def _numbers(record: ConfigRecord, key: str) -> tuple[int, ...]:
    if not isinstance(value := record[key], list) or len(value) > MAX_NUMBERS:
        raise ValueError(f"'{key}' is not a list of at most {MAX_NUMBERS} numbers")
    return tuple(_counted(key, number) for number in value)


def _counted(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_COUNT:
        raise ValueError(f"'{key}' is {str(value)[:MAX_TEXT]}, must be a whole number from 0, below 2^40")
    return value


def _names(record: ConfigRecord, key: str, count: int) -> list[str]:
    if not isinstance(value := record[key], list) or len(value) not in (0, count):
        raise ValueError(f"'{key}' is not a list of {count} names")
    names = [str(name) for name in value]
    if max(map(len, names), default=0) > MAX_LABEL:
        raise ValueError(f"'{key}' has a name of more than {MAX_LABEL} characters")
    return names


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
        """Client number -> name or natural id, for clients that have one."""
        return {n: client.title for n, client in self.clients.items() if client.title != str(n)}

    def node_label(self, node: int) -> str:
        """Return "client" and the label of the client on a node, or "node" and its id if there is none."""
        labels = (f"client {client.title}" for client in self.clients.values() if client.node == node)
        return next(labels, f"node {node}")

    def sample(self, fraction: float, seed: int, server_round: int, without: Collection[int]) -> list[int]:
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


def check_server_device(method: Method[Any, Any, Any]) -> None:
    """Check that this machine, as the server, has the device that the method's server half needs.

    Raises:
        PbflError: if it has not.
    """
    if method.server_device == "cuda" and not torch.cuda.is_available():
        raise PbflError(
            "server-device = 'cuda': the server sees no CUDA device; must be 'cpu' here, or a simulation needs "
            "--gpus-per-client, e.g. 0.25"
        )


def check_roster(method: Method[Any, Any, Any], settings: Settings, roster: Roster) -> None:
    """Check that a method supports the clients of a roster together, and that the server has the device it needs.

    Raises:
        PbflError: if it does not.
    """
    check_server_device(method)
    # Of a name that a client declares, only the one in the configuration can be built.
    own = {name: name for name in architectures(settings.models.models, settings.code)}
    validated = any(client.num_validation for client in roster.clients.values())
    check_patience(settings.run.patience, settings.run.patience_on, validated=validated)
    method.check(roster.task, [own.get(name, name) for name in roster.architectures])


def _drawn(clients: list[int], size: int, seed: int) -> list[int]:
    return sorted(int(client) for client in np.random.default_rng(seed).choice(clients, size, replace=False))


def other_weights(clients: Iterable[ClientRecord]) -> list[str]:
    """Return a line for every model whose clients start from different pretrained weights."""
    labels: dict[str, dict[str, list[str]]] = {}  # architecture -> hash of weights -> clients
    for client in clients:
        if client.weights:
            labels.setdefault(client.architecture, {}).setdefault(client.weights, []).append(client.title)
    return [
        f"'{name}' does not begin with the same weights everywhere: "
        + "; ".join(f"{weights} on client {abbreviate(members)}" for weights, members in by_weights.items())
        for name, by_weights in labels.items()
        if len(by_weights) > 1
    ]


def dominant(clients: Collection[ClientRecord]) -> list[str]:
    """Return a line for a client that declares so many test samples that the weighted accuracy is its own."""
    total = sum(client.num_test for client in clients)
    return [
        f"client {client.title} declares {client.num_test} of {total} test samples: it decides the weighted accuracy, "
        "and with it the best round and when patience ends the run"
        for client in clients
        if len(clients) > 2 and client.num_test > DOMINANT * total
    ]
