"""Runs with malicious clients, in one process: what is sent, what is reported, where it is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.config import parse
from pbfl_flwr.data import client_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import show
from pbfl_flwr.experiments.results import FinishedRun
from pbfl_flwr.flower.client.device import own_settings
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Payload, Prototypes
from pbfl_flwr.prototypes.attacks import malicious
from tests.flower.inprocess import NUM_CLIENTS, federation, silent

ATTACK: dict[str, Any] = {"attack.kind": "sign-flip", "attack.share": 0.4}


class Recorder(MethodStrategy):
    """Keeps every round's uploads."""

    def aggregate_fit(self, server_round: int, uploads: Mapping[int, Payload]) -> Any:
        self.seen = {**getattr(self, "seen", {}), server_round: dict(uploads)}
        return super().aggregate_fit(server_round, uploads)


def uploads(directory: Path, **keys: Any) -> tuple[dict[int, dict[int, Prototypes]], tuple[int, ...]]:
    strategy = federation(directory, strategy=Recorder, **keys).run().strategy
    assert isinstance(strategy, Recorder)
    return strategy.seen, malicious(strategy.settings)


@pytest.mark.parametrize("method", ["fedproto", "fedgh", "feddistill"])
def test_only_malicious_clients_falsify_uploads(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest, nobody = uploads(tmp_path / "a", method=method, num_server_rounds=1)
    lied, liars = uploads(tmp_path / "b", method=method, num_server_rounds=1, **ATTACK)
    assert (nobody, len(liars)) == ((), 2)
    assert caplog.text.count("attack sign-flip: clients ") == 1, "nothing is said of it without one"
    for client, upload in lied[1].items():
        sign = -1 if client in liars else 1
        assert torch.equal(upload.values, sign * honest[1][client].values)
        assert torch.equal(upload.present, honest[1][client].present)


def test_repeated_falsified_reply_is_the_same(tmp_path: Path) -> None:
    """The reply that is kept for a repeated question is the one that was sent."""
    keys: dict[str, Any] = {**ATTACK, "num_server_rounds": 1}
    run = federation(tmp_path, strategy=Recorder, on_disk=True, **keys)
    run.run()
    strategy = run.strategy
    assert isinstance(strategy, Recorder)
    again = federation(tmp_path, strategy=Recorder, **{**keys, "run-dir": run.config["run-dir"]})
    again.strategy.experiment = strategy.experiment
    again.run()
    assert isinstance(again.strategy, Recorder)
    for client, upload in strategy.seen[1].items():
        assert torch.equal(upload.values, again.strategy.seen[1][client].values)


def test_accuracies_are_over_honest_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys: dict[str, Any] = {"validation_share": 0.3, "evaluate_moment": "before", **ATTACK}
    run = federation(tmp_path, on_disk=True, data=None, max_samples=300, partition="iid", **keys).run()
    directory = run.directory
    about, record = directory.record(), directory.round_records()[-1]
    liars = list(malicious(run.strategy.settings))
    assert about.malicious == liars
    who = ", ".join(map(str, liars))
    announced = (
        f"attack sign-flip: clients {who} send falsified prototypes; accuracies are those of the other "
        "clients"
    )
    assert announced in caplog.text
    assert announced in show.settings_line(about, 2)
    assert record.trained == list(range(NUM_CLIENTS)), "their uploads are aggregated all the same"
    every = directory.client_records()[-1]
    assert record.final is not None
    assert every.final is not None
    assert every.client == every.final.client == list(range(NUM_CLIENTS))
    honest = [client for client in range(NUM_CLIENTS) if client not in liars]
    for accuracy, correct, samples in (
        (record.accuracy, every.correct, every.num_test),
        (record.validation, every.correct_validation, every.num_validation),
        (record.final.accuracy, every.final.correct, every.final.num_test),
        (record.final.validation, every.final.correct_validation, every.final.num_validation),
    ):
        expected = sum(correct[i]["head"] for i in honest) / sum(samples[i] for i in honest)
        assert accuracy["head"].weighted == pytest.approx(expected)
        assert accuracy["head"].clients == 3
    losses = [(every.test_loss[i], every.num_test[i]) for i in honest]
    assert record.test_loss == pytest.approx(sum(a * n for a, n in losses) / sum(n for _, n in losses))
    # What always answering the largest class scores is over the same clients.
    right = tested = 0
    for client in honest:
        data = client_data(run.strategy.settings.data, NUM_CLIENTS, client)
        assert data.validation is not None  # counts as training data here
        known = torch.cat([data.train.labels, data.validation.labels])
        right += int((data.test.labels == known.bincount().argmax()).sum())
        tested += len(data.test)
    assert directory.partition().majority == pytest.approx(right / tested)
    assert set(FinishedRun.load(directory.path).accuracies()) == set(range(NUM_CLIENTS)) - set(liars)


def test_round_of_only_malicious_clients_has_no_accuracy(tmp_path: Path) -> None:
    liars = malicious(parse({"num-clients": NUM_CLIENTS, **ATTACK}))
    quiet = {(client, 1): silent for client in range(NUM_CLIENTS) if client not in liars}
    run = federation(tmp_path, num_server_rounds=1, faults=quiet, **ATTACK).run()
    assert run.strategy.history[0].accuracy == {}
    assert run.strategy.history[0].trained == list(liars)
    json.dumps([record.to_json() for record in run.strategy.history], allow_nan=False)


def test_device_refuses_attack_settings(tmp_path: Path) -> None:
    message = "attack.kind = 'sign-flip': attacks are possible in simulations only"
    settings = parse({"num-clients": NUM_CLIENTS, **ATTACK}, SECTIONS)
    for node in ({"client-id": 0}, {"partition-id": 0, "num-partitions": 5}):
        with pytest.raises(PbflError, match=message):
            own_settings(settings, node)
    devices = [{"client-id": client} for client in range(NUM_CLIENTS)]
    run = federation(tmp_path, node_configs=devices, **ATTACK)
    with pytest.raises(PbflError, match=message):
        run.run()
    assert {kind for _, _, kind in run.grid.asked} == {"query"}, "nobody was asked to train"
