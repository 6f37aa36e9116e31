"""Private uploads through the whole app: every method that can protect them, retries, books."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor

from pbfl_flwr.config import Scalar
from pbfl_flwr.experiments.show import privacy_line
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.method import Client, Update
from pbfl_flwr.methods import using
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.prototypes.privacy import epsilon_of
from pbfl_flwr.runs.tensor_files import load_tensors
from tests.flower.inprocess import FIRST_NODE, NUM_CLIENTS, Answer, Fault, altered, federation, lost

NOISE: dict[str, Any] = {"dp_clip": 5.0, "dp_noise": 2.0}


@pytest.mark.parametrize(
    ("method", "unit"), [*((method, "client") for method in using("dp-noise")), ("fedproto", "sample")]
)
def test_every_protected_method_uploads_noise_and_reports_epsilon(
    tmp_path: Path, method: str, unit: str
) -> None:
    keys: dict[str, Any] = {**NOISE, "dp_unit": unit}
    if method == "tinyproto":
        keys |= {"aps_scale": 0.1, "cps_dim": 16}
    if method == "fedtgp":
        keys |= {"fedtgp.server-epochs": 2}
    run = federation(tmp_path, method, on_disk=True, **keys).run()
    assert [line.failures for line in run.strategy.history] == [[], []]
    lines = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    for releases, line in enumerate(lines, start=1):
        assert [m["epsilon"] for m in line["metrics"]] == [epsilon_of(2.0, releases, 1e-5)] * NUM_CLIENTS
    about: dict[str, Scalar] = {"dp-clip": 5.0, "dp-noise": 2.0, "dp-unit": unit, "dp-delta": 1e-5}
    rounds, clients = run.directory.round_records(), run.directory.client_records()
    assert f"ε = {epsilon_of(2.0, 2, 1e-5):.3g} for client 0" in str(privacy_line(about, rounds, clients))
    assert privacy_line(about, [], []) is None


def test_shows_the_releases_that_the_server_lost_or_rejected(tmp_path: Path) -> None:
    """Client 0's uploads are lost in all but the first round, client 1's all rejected; 2's is lost and made up for."""
    damaged = altered(lambda content: RecordDict({**content, "p": ArrayRecord()}))
    faults: dict[tuple[int, int], Fault] = {(0, 2): lost, (0, 3): lost, (2, 2): lost}
    faults |= {(1, number): damaged for number in (1, 2, 3)}
    run = federation(tmp_path, on_disk=True, num_server_rounds=3, faults=faults, **NOISE).run()
    rounds, clients = run.directory.round_records(), run.directory.client_records()
    epsilon = epsilon_of(2.0, 3, 1e-5)
    assert clients[2].metrics[0]["epsilon"] == epsilon
    said = str(privacy_line(run.strategy.settings.as_dict(), rounds, clients))
    assert said.endswith(f"ε = at most {epsilon:.3g} for client 0, {epsilon:.3g} on average")


def test_of_a_round_that_is_streamed_a_decoded_upload_is_gone_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[weakref.ref[Any]] = []
    kept: list[int] = []
    decode = wire.decode

    def decoding(*words: Any, **named: Any) -> Any:
        gc.collect()
        kept.append(sum(upload() is not None for upload in decoded))
        payload = decode(*words, **named)
        if "max_bytes" in named:  # on the server, as it arrives
            decoded.append(weakref.ref(payload))
        return payload

    monkeypatch.setattr(wire, "decode", decoding)
    federation(tmp_path, "fedproto").run()
    assert (len(decoded), max(kept)) == (2 * NUM_CLIENTS, 0)


IDLE = "made no training step, too few samples (batch-size, drop-last; BatchNorm needs two): client 1"


def test_small_classes_are_held_back_with_a_warning(tmp_path: Path) -> None:
    strategy = federation(tmp_path / "own", min_class_count=4).run().strategy
    # of SPLITS: client 1 has one class of 1, client 2 one of 3, client 4 one of 2
    held_back = "classes held back for having fewer samples than min-class-count: 3, on 3 of 5 clients"
    assert strategy.history[0].warnings == [held_back, IDLE]
    assert strategy.history[0].scalars.up == (3 + 0 + 3 + 1 + 3) * 64
    # Their owners still predict with them.
    assert strategy.history[1].accuracy["local"].clients == NUM_CLIENTS
    reference = federation(tmp_path / "reference", protocol="htfl").run().strategy
    # client 1 has one sample, which is no batch of the reference's loader
    assert reference.history[0].warnings == [IDLE]


def test_run_continues_if_all_classes_are_held_back(tmp_path: Path) -> None:
    for method in ("fedproto", "fedtgp", "protonorm", "fedgh"):
        strategy = federation(tmp_path / method, method, min_class_count=1000).run().strategy
        assert [line.failures for line in strategy.history] == [[], []]
        assert "global" not in strategy.history[1].accuracy


@pytest.mark.parametrize("randomness", ["system", "seed"])
def test_repeated_reply_has_the_same_noise(tmp_path: Path, randomness: str) -> None:
    """Asked twice for the same round, a client draws no second noise; in another run it does, unless it is seeded."""
    answers: dict[int, list[bytes]] = {}

    def twice(message: Message, answer: Answer) -> Message:
        client = int(message.metadata.dst_node_id - FIRST_NODE) // 13
        first, second = answer(), answer()
        answers[client] = [m.content.array_records["p"]["s"].data for m in (first, second)]
        return second

    faults: dict[tuple[int, int], Fault] = {(client, 1): twice for client in range(NUM_CLIENTS)}
    keys: dict[str, Any] = {**NOISE, "dp_randomness": randomness, "num_server_rounds": 1}
    run = federation(tmp_path / "a", faults=faults, **keys).run()
    assert len(answers) == NUM_CLIENTS
    assert all(first == second for first, second in answers.values())
    again = federation(tmp_path / "b", **keys).run()
    assert (again.fingerprint == run.fingerprint) == (randomness == "seed")


@pytest.mark.parametrize(
    ("spoilt", "reason", "diverged"),
    [
        (lambda values: values * 1e12, "'rows' holds", True),
        (lambda values: values.repeat(1, 2), "rows are", False),
    ],
)
def test_client_refuses_to_send_an_upload_that_would_be_rejected(
    spoilt: Callable[[Tensor], Tensor],
    reason: str,
    diverged: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client says what to do, and keeps the state of the round before."""
    original = Pipeline.local_update

    def explodes(self: Pipeline, client: Client, down: Prototypes) -> Update[Prototypes]:
        update = original(self, client, down)
        if (client.id, client.round) != (3, 2):
            return update
        return replace(update, payload=replace(update.payload, values=spoilt(update.payload.values)))

    monkeypatch.setattr(Pipeline, "local_update", explodes)
    run = federation(tmp_path, on_disk=True).run()
    (failure,) = run.strategy.history[1].failures
    assert failure.client == 3
    assert f"its upload would be rejected: {reason}" in failure.reason
    remedy = "; lower learning-rate, set max-grad-norm, or scale large inputs, or collect = 'trajectory' with BatchNorm"
    assert failure.reason.endswith(remedy) == diverged
    assert ("learning-rate" in failure.reason) == diverged
    (file,) = (tmp_path / "run").rglob("client-00003.safetensors")
    assert load_tensors(file)[1]["round"] == "1"
