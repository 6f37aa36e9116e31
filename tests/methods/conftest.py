"""Small clients for the methods' tests: 16x16 grey images, so that every architecture takes them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pbfl_flwr.config import parse
from pbfl_flwr.method import Client, Round, Update
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.testing.clients import TASK as TASK
from pbfl_flwr.testing.clients import client
from pbfl_flwr.training.loop import batches, take


def settings_of(method, **keys):
    """Settings from run-config keys with underscores; own settings of the method as ``own={...}``."""
    own = {f"{method}.{key.replace('_', '-')}": value for key, value in keys.pop("own", {}).items()}
    flat = {key.replace("_", "-"): value for key, value in keys.items()}
    return parse({"method": method, "feature-dim": 6, "batch-size": 4, **flat, **own}, SECTIONS)


@pytest.fixture
def task():
    return TASK


@pytest.fixture
def make_method():
    """Return a method by name: ``make_method("fml", own={"alpha": 1.0}, protocol="htfl")``."""
    return lambda method, **keys: build_method(settings_of(method, **keys))


@pytest.fixture
def make_client():
    """Return a client; equal arguments give equal clients (weights by architecture, data by id)."""

    def make(id=0, architecture="mlp5", labels=(0, 0, 1, 1, 2, 2, 0, 1), round=1, memory=None, **keys):
        return client(labels, id=id, architecture=architecture, round=round, memory=memory, **keys)

    return make


def dealt(client: Client, phase: str = "fit", epochs: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches (inputs, labels) that the client's training takes, in their order."""
    order = client.generator(phase)
    for _ in range(epochs):
        for index in batches(len(client.data.train), client.training, order):
            yield take(client.data, client.data.train, index, client.device)


def descend(loss: torch.Tensor, parameters: Iterable[torch.Tensor], rate: float) -> None:
    """One step of plain SGD, written out; parameters that the loss does not depend on stay."""
    moved = list(parameters)
    for p, slope in zip(moved, torch.autograd.grad(loss, moved, allow_unused=True), strict=True):
        if slope is not None:
            p.data -= rate * slope


def same_weights(network: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Assert that the tensors are the network's parameters, up to rounding in another order of sums."""
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(tensors[name], parameter.detach(), atol=1e-5, rtol=1e-4)


@dataclass
class AfterRound:
    """A federation after one of its rounds: the server's state, and what each client got, sent and keeps."""

    number: int
    state: Any
    received: dict[int, Any]
    updates: dict[int, Update[Any]]
    memories: dict[int, Any]
    networks: dict[int, dict[str, torch.Tensor]]


def play(
    method: Any,
    make_client: Any,
    labels: Mapping[int, tuple[int, ...]],
    rounds: int,
    architecture: str = "mlp5",
    present: Any = None,
    **training: Any,
) -> Iterator[AfterRound]:
    """Yield a federation after each round, without Flower.

    Args:
        labels: client -> the labels of its samples.
        present: function from a round to the clients that take part; all unless given.
    """
    memories: dict[int, Any] = {}
    networks: dict[int, dict[str, torch.Tensor]] = {}
    state = method.init(TASK, 0)
    for number in range(1, rounds + 1):
        updates, received = {}, {}
        for i in labels if present is None else present(number):
            client = make_client(i, architecture, labels[i], number, memories.get(i), **training)
            if i in networks:
                client.model.load_state_dict(networks[i])
            torch.manual_seed(10 * number + i)  # dropout
            received[i] = method.broadcast(state, i)
            updates[i] = method.local_update(client, received[i])
            method.validate(updates[i].payload, state, TASK)
            memories[i] = updates[i].memory
            networks[i] = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        state = method.aggregate(
            state, {i: u.payload for i, u in updates.items()}, Round(number, TASK, len(labels))
        )
        yield AfterRound(number, state, received, updates, {**memories}, {**networks})
