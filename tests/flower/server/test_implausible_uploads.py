"""Uploads of finite but absurd numbers: their client is named, the round goes on with the others' uploads."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from safetensors.torch import load
from torch import Tensor

from pbfl_flwr.config import parse
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import METHODS as METHODS_OF_PACKAGE
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import MAX_MAGNITUDE, Magnitudes
from tests.flower.inprocess import (
    KINDS,
    Answer,
    Fault,
    InProcessGrid,
    copies,
    federation,
    lost,
    reply_of,
    same_tensors,
    scripted,
    silent,
)
from tests.flower.server.test_fuzz import COMMON, METHODS, TASK, of_tensors


def sent_by(content: RecordDict) -> dict[str, Tensor]:
    return load(wire.payload_in(content)["s"].data)


def enlarged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with floating-point numbers almost as large as any upload may hold."""
    return {
        name: t * (0.9 * MAX_MAGNITUDE / t.abs().max()) if t.is_floating_point() and t.any() else t
        for name, t in tensors.items()
    }


def replaced(message: Message, answer: Answer) -> Message:
    """The client trains, but sends absurd numbers in its upload's place."""
    reply = answer()
    reply.content[wire.PAYLOAD] = wire.encode_tensors(enlarged(sent_by(reply.content)))
    return Message(reply.content, reply_to=message)


@pytest.mark.parametrize("method", [*KINDS, "fedpa", "fml"])
def test_enormous_upload_costs_its_own_client_only(tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"gfpl.start": 1, "gfpl.interval": 1} if method == "gfpl" else {}
    attacked = federation(tmp_path / "a", method, faults={(2, 1): replaced}, **keys).run().strategy
    without = federation(tmp_path / "b", method, faults={(2, 1): lost}, **keys).run().strategy
    (failure,) = attacked.history[0].failures
    assert failure.client == 2
    assert failure.reason.startswith("upload rejected: ")
    assert attacked.history[1].failures == []
    assert same_tensors(copies(attacked.state), copies(without.state))
    assert attacked.history[0].scalars.up == without.history[0].scalars.up
    assert attacked.history[0].ages == without.history[0].ages


@pytest.mark.parametrize("method", METHODS_OF_PACKAGE)
def test_honest_upload_after_several_epochs_is_accepted(tmp_path: Path, method: str) -> None:
    strategy = federation(tmp_path, method, local_epochs=3, num_server_rounds=1).run().strategy
    assert strategy.history[0].failures == []


def absurd(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """Return the tensors with some of their numbers replaced by any finite ones."""
    changed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.flatten().tolist()
        for index in range(len(flat)):
            if rng.random() < 0.3:
                magnitude = 10 ** rng.uniform(-38, 38)
                sign = rng.choice([-1, 1])
                flat[index] = sign * magnitude if tensor.is_floating_point() else int(min(magnitude, 2**40))
        if name == "labels":
            flat = tensor.tolist()
        changed[name] = torch.tensor(flat, dtype=tensor.dtype).reshape(tensor.shape)
    return changed


def largest(strategy: MethodStrategy) -> float:
    """Return the largest root mean square of a row or tensor that was just broadcast."""
    broadcast: Any = strategy.method.broadcast(strategy.state, 0)
    sizes: Magnitudes = broadcast.magnitudes()
    return max([*sizes.rows.values(), *sizes.tensors.values()])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_any_finite_upload_moves_the_aggregate_by_a_bounded_amount(name: str, seed: int) -> None:
    """The bound of docs/faults.md: rows and weights are at most 100 times as large as those of the others."""
    keys, make = METHODS[name]
    settings = parse({**COMMON, **keys, "num-clients": 5, "num-server-rounds": 1}, SECTIONS)
    rng = random.Random(f"{name} {seed}")

    def run(attack: bool) -> MethodStrategy:
        strategy = MethodStrategy(settings)

        def answer(client: int, server_round: int) -> RecordDict:
            content = reply_of(make(strategy, client))
            return of_tensors(absurd(sent_by(content), rng)) if client == 4 else content

        faults: dict[tuple[int, int], Fault] = {} if attack else {(4, 1): silent, (4, -1): silent}
        app = scripted(TASK, answer, str(keys.get("models", "cnn4")))
        strategy.start(InProcessGrid(app, {}, 5, faults=faults))
        return strategy

    honest, attacked = run(False), run(True)
    (record,) = attacked.history
    assert {0, 1, 2, 3} <= set(record.trained)
    assert record.trained == [0, 1, 2, 3] or not record.failures
    if record.failures:
        assert same_tensors(copies(attacked.state), copies(honest.state))
    factor = 1000 * TASK.num_classes if name == "ppa" else 100
    assert math.isfinite(largest(attacked))
    assert largest(attacked) <= factor * max(10.0, largest(honest))
