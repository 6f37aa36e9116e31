"""What every method of METHODS must do; a new one is found by its entry and needs no edit here.

One that is not in the package: ``pytest tests/methods -k "contract or awkward" --method my_package.module:build``.

Two rounds are run in one process with five clients of two architectures (of one, where the method needs that): one
client has a single class, one a single training sample, a class is tested that nobody holds.
"""

import math
import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import PROTECTIONS, PrototypeSettings, Scalar, parse
from pbfl_flwr.config import STAGES as STAGE_KEYS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import app as client_module
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.method import Client, Method, Predictor, Round, WithInputs
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.payloads import Payload, RejectedPayload
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from pbfl_flwr.training.evaluation import Scores, evaluate
from tests.flower.inprocess import (
    NUM_CLIENTS,
    Federation,
    copies,
    federation,
    needs_one_architecture,
    raises,
    same_tensors,
    tensors_in,
    tiny_client,
)

# The largest relative error of a rounded number: half a unit in the last of 11 and of 8 binary digits.
RELATIVE = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}  # half the distance of the numbers around zero


@dataclass
class Aggregation:
    """One call of a method's aggregate, with copies of what went in and of what was there afterwards."""

    state: Any
    uploads: dict[int, Payload]
    round_info: Round
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    result: Any


class Recorder(MethodStrategy):
    """Keeps what goes through ``aggregate_fit``."""

    def aggregate_fit(self, server_round: int, uploads: Mapping[int, Payload]) -> Any:
        state, before = self.state, copies((self.state, uploads))
        result = super().aggregate_fit(server_round, uploads)
        assert self.task is not None
        round_info = Round(server_round, self.task, self.settings.run.num_clients, self.settings.run.seed)
        seen = Aggregation(state, dict(uploads), round_info, before, copies((state, uploads)), result)
        self.__dict__.setdefault("aggregations", []).append(seen)
        return result


@dataclass
class Played:
    """A finished run and what was seen in it."""

    name: str
    federation: Federation
    scored: list[tuple[int, str, Tensor]] = field(default_factory=list)  # client, predictor, scores
    broadcasts: list[tuple[Payload, dict[str, Tensor]]] = field(default_factory=list)  # with a copy of each

    @property
    def method(self) -> Method[Any, Any, Any]:
        return self.federation.strategy.method

    @property
    def aggregations(self) -> list[Aggregation]:
        actual: list[Aggregation] = self.federation.strategy.__dict__["aggregations"]
        return actual


@pytest.fixture(scope="module")
def played(any_method: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    seen = Played(any_method, federation(tmp_path_factory.mktemp("run"), any_method, strategy=Recorder))

    def watching(client: Client, predictors: Mapping[str, Predictor], predicts: tuple[str, ...]) -> Scores:
        def watched(name: str, predictor: Predictor) -> Predictor:
            def scores(*read: Tensor) -> Tensor:
                actual: Tensor = predictor(*read)
                seen.scored.append((client.id, name, actual))
                assert actual.shape == (len(read[0]), client.task.num_classes)
                return actual

            return WithInputs(scores) if isinstance(predictor, WithInputs) else scores

        return evaluate(client, {name: watched(name, p) for name, p in predictors.items()}, predicts)

    def decoded(*arguments: Any) -> Payload:
        down: Payload = broadcast(*arguments)
        seen.broadcasts.append((down, copies(down)))
        return down

    broadcast = Worker.broadcast
    with patch.object(client_module, "evaluate", watching), patch.object(Worker, "broadcast", decoded):
        seen.federation.run()
    return seen


def test_every_client_takes_part_in_every_round(played: Played) -> None:
    for line in played.federation.strategy.history:
        assert line.failures == []
        assert line.trained == list(range(NUM_CLIENTS))
        assert all(value is not None for value in line.client_metrics.values())
        assert line.accuracy, "no predictor was scored"


def test_clients_do_not_change_the_broadcast_that_they_share(played: Played) -> None:
    assert len(played.broadcasts) >= 2 * NUM_CLIENTS
    for down, before in played.broadcasts:
        assert same_tensors(copies(down), before)


def test_scores_are_finite_and_of_shape_b_by_k(played: Played) -> None:
    assert {client for client, _, _ in played.scored} == set(range(NUM_CLIENTS))
    for client, name, scores in played.scored:
        assert name in played.federation.strategy.method.predicts
        assert scores.shape == (len(tiny_client(client).test), 10)
        assert torch.isfinite(scores).all(), (client, name)
    primary_predictor = played.federation.strategy.primary_predictor
    assert primary_predictor in played.federation.strategy.method.predicts
    assert primary_predictor in played.federation.strategy.history[-1].accuracy


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_payloads_cross_the_wire(played: Played, dtype: Any) -> None:
    last = played.aggregations[-1]
    for client, upload in last.uploads.items():
        back = wire.decode(wire.encode(upload, dtype), played.method.up, last.round_info.task)
        played.method.validate(back, last.state, last.round_info.task)
        assert back.scalars() == upload.scalars()
        _close(upload, back, dtype, f"up {client}")
        down = played.method.broadcast(last.result, client)
        _close(
            down,
            wire.decode(wire.encode(down, dtype), played.method.down, last.round_info.task),
            dtype,
            "down",
        )


def _close(sent: Payload, received: Payload, dtype: str, what: str) -> None:
    ours, theirs = sent.to_tensors(), received.to_tensors()
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert theirs[name].shape == tensor.shape
        if not tensor.is_floating_point():
            assert torch.equal(theirs[name], tensor), (what, name)
            continue
        allowed = tensor.abs() * RELATIVE.get(dtype, 0.0) + SMALLEST.get(dtype, 0.0)
        if dtype == "int8" and tensor.dim() >= 2 and len(tensor):
            # Half a step of the row's largest entry / 127, and float32's own rounding.
            row = tensor.flatten(1).abs().amax(dim=1) / 254 * (1 + 1e-5)
            allowed = row.reshape(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor)
        assert bool(((theirs[name] - tensor).abs() <= allowed).all()), (what, name, dtype)


def test_aggregate_leaves_its_input_alone(played: Played) -> None:
    for aggregation in played.aggregations:
        assert same_tensors(aggregation.before, aggregation.after)
        # The next round must not have changed it either.
        assert same_tensors(copies((aggregation.state, aggregation.uploads)), aggregation.before)


def test_aggregate_is_a_function_of_its_input(played: Played) -> None:
    last = played.aggregations[-1]
    torch.manual_seed(12345)  # nothing may hang on the global generator
    again = played.method.aggregate(deepcopy(last.state), deepcopy(last.uploads), last.round_info)
    assert same_tensors(tensors_in(again), tensors_in(last.result))


def test_a_checkpoint_continues_with_the_same_bits(played: Played, tmp_path: Path) -> None:
    method, task = played.method, played.aggregations[0].round_info.task
    fresh = method.init(task, played.federation.strategy.settings.run.seed)
    for state in (fresh, *(aggregation.result for aggregation in played.aggregations)):
        restored = method.state.from_tensors(_through_a_file(state, tmp_path), task)
        assert same_tensors(restored.to_tensors(), state.to_tensors())
        for client in range(NUM_CLIENTS):
            down = method.broadcast(restored, client).to_tensors()
            assert same_tensors(down, method.broadcast(state, client).to_tensors())
        assert method.report(restored) == pytest.approx(method.report(state), nan_ok=True)
    last = played.aggregations[-1]
    restored = method.state.from_tensors(_through_a_file(last.state, tmp_path), task)
    went_on = method.aggregate(restored, last.uploads, last.round_info)
    assert same_tensors(went_on.to_tensors(), last.result.to_tensors())


def _through_a_file(state: Payload, directory: Path) -> dict[str, Tensor]:
    save_tensors(directory / "state.safetensors", state.to_tensors(), {})
    return load_tensors(directory / "state.safetensors")[0]


def test_the_papers_cost_is_a_number(played: Played) -> None:
    roster = played.federation.strategy.roster
    assert roster is not None
    cost = played.method.paper_scalars(roster.task, [3, 1, 4, 1, 4])
    assert cost is not None
    assert math.isfinite(cost)
    assert cost >= 0


def test_same_seed_same_bits_in_any_order(played: Played, tmp_path: Path) -> None:
    again = federation(tmp_path, played.name, order=99).run()
    assert again.fingerprint == played.federation.fingerprint


def test_a_client_that_fails_does_not_change_the_others(played: Played, tmp_path: Path) -> None:
    """Client 2 raises in mid-round; what the others upload has the same bits as if it had not."""
    faulty = federation(
        tmp_path, played.name, strategy=Recorder, faults={(2, 1): raises}, num_server_rounds=1
    ).run()
    (line,) = faulty.strategy.history
    assert line.trained == [0, 1, 3, 4]
    (failure,) = line.failures
    assert failure.client == 2
    assert "boom" in failure.reason
    assert "\n" not in failure.reason
    expected, actual = played.aggregations[0].uploads, faulty.strategy.__dict__["aggregations"][0].uploads
    for client in (0, 1, 3, 4):
        assert same_tensors(actual[client].to_tensors(), expected[client].to_tensors())


def test_no_upload_crashes_the_server(played: Played) -> None:
    """Mutated uploads are rejected or harmless; nothing but RejectedPayload comes out, no NaN goes in."""
    rng = random.Random(played.name)
    last, method = played.aggregations[-1], played.method
    victim = max(last.uploads, key=lambda client: last.uploads[client].scalars())
    tensors = last.uploads[victim].to_tensors()
    aggregated = 0
    for _ in range(120):
        mutant = _mutated(tensors, rng)
        try:
            upload = method.up.from_tensors(mutant, last.round_info.task)
            method.validate(upload, last.state, last.round_info.task)
            upload.scalars()
        except RejectedPayload:
            continue
        assert all(bool(torch.isfinite(t).all()) for t in upload.to_tensors().values()), sorted(mutant)
        if aggregated < 6:
            aggregated += 1
            state = method.aggregate(last.state, {**last.uploads, victim: upload}, last.round_info)
            method.report(state)
            method.broadcast(state, 0).scalars()


def _mutated(tensors: Mapping[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    mutant = {name: tensor.clone() for name, tensor in tensors.items()}
    kind = rng.choice(["drop", "add", "value", "value", "shape", "dtype", "rows", "empty"])
    if not mutant or kind == "add":
        return {**mutant, "something": torch.ones(3)}
    name = rng.choice(sorted(mutant))
    tensor = mutant[name]
    if kind == "drop":
        del mutant[name]
    elif kind == "value" and tensor.numel():
        flat = tensor.flatten()
        where = rng.randrange(flat.numel())
        if tensor.is_floating_point():
            flat[where] = rng.choice([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -1.0, 9e7])
        else:
            flat[where] = rng.choice([0, 1, 255 if tensor.dtype is torch.uint8 else -1, int(flat[0])])
        mutant[name] = flat.reshape(tensor.shape)
    elif kind == "shape":
        mutant[name] = rng.choice([tensor[None], tensor.flatten(), tensor.flatten()[:1].reshape(())])
    elif kind == "dtype":
        wanted = [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
        mutant[name] = tensor.to(torch.float32).to(rng.choice(wanted))
    elif kind == "rows" and tensor.dim():
        mutant[name] = rng.choice([tensor[:-1], torch.cat([tensor, tensor[:1]])])
    elif kind == "empty":
        mutant[name] = tensor[:0] if tensor.dim() else torch.zeros(0)
    return mutant


@pytest.mark.parametrize("name", [name for name in METHODS if needs_one_architecture(name)])
def test_one_architecture_is_asked_for_before_round_1(name: str, tmp_path: Path) -> None:
    mixed = federation(tmp_path, name, models="cnn4,resnet4")
    with pytest.raises(PbflError, match=r"needs one architecture.*cnn4, resnet4") as error:
        mixed.run()
    assert "\n" not in str(error.value)
    assert {kind for _, _, kind in mixed.grid.asked} == {"query"}


STAGES: dict[str, Scalar] = {
    "regularizer-weight": 3.0,
    "regularizer-form": "mse",
    "collect": "trajectory",
    "aggregation": "median",
    "trim-share": 0.3,
    "cps-dim": 8,
    "cps-scheme": "block",
    "cps-regularizer": "masked",
    "cpkd": "sample",
    "aps-scale": 2.0,
    "total-examples": 100,
    "alignment": "thomson",
    "upscale": 50.0,
    "stale": "drop",
}
PIPELINES = {"fedproto", "fedtgp", "tinyproto", "protonorm"}
FORGETFUL = {"fedcpd", "fedpa", "feddistill", "gfpl"}  # they keep or drop classes that nobody sent


@pytest.mark.parametrize("key", [*STAGES, "wire-dtype"])
def test_a_stage_that_a_method_does_not_have_is_refused(key: str) -> None:
    """Every key of the group is asked of every method; nothing that was asked for is left out in silence."""
    assert {*STAGES, "wire-dtype"} == set(PrototypeSettings.key_names())
    value = STAGES.get(key, "float16")
    for method in METHODS:
        settings = parse({"method": method, "models": "cnn4", key: value}, SECTIONS)
        used = key == "wire-dtype" or method in PIPELINES or (key == "stale" and method in FORGETFUL)
        try:
            build_method(settings)
        except PbflError as error:
            message = str(error)
        else:
            message = ""
        refused = f"{key} = {value!r}: method '{method}' has no such stage; must be " in message
        assert refused is not used, (method, message)


# Each key with values of which at least one is no method's own; what else must be set for the value to be valid.
OTHERS: dict[str, tuple[tuple[Scalar, ...], dict[str, Scalar]]] = {
    **{key: ((value,), {}) for key, value in STAGES.items()},
    "aggregation": (("ppa", "mean"), {}),
    "alignment": (("thomson", "unit"), {}),
    "regularizer-form": (("mse", "l2"), {}),
    "min-class-count": ((3,), {}),
    "dp-clip": ((1.0,), {}),
    "dp-noise": ((1.0,), {"dp-clip": 1.0, "aps-scale": 0.1}),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_uses_the_keys_that_it_says(name: str) -> None:
    """That is: another value of the key makes another method."""
    assert {*OTHERS} == {*STAGE_KEYS, *PROTECTIONS}

    def built(**keys: Scalar) -> Method[Any, Any, Any]:
        auxiliary: dict[str, Scalar] = dict.fromkeys(("fml.auxiliary", "fedkd.auxiliary"), "cnn2")
        settings = parse({"method": name, "models": "cnn4", **auxiliary, **keys}, SECTIONS)
        return METHODS[name].build(settings)

    changing = {
        key
        for key, (values, more) in OTHERS.items()
        if any(built(**more, **{key: value}) != built(**more) for value in values)
    }
    assert changing == built().uses
