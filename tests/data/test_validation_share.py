"""Samples held out for choosing a round: taken from training, never from the test data, and scored beside it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import client_data
from pbfl_flwr.data.clients import hold_out
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.rounds import on_validation, summarise_accuracy
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.training.evaluation import evaluate
from tests.training.test_loop import client, data


def test_held_out_rows_come_from_training_alone() -> None:
    plain, shared = DataSettings(), DataSettings(validation_share=0.25)
    without, held = client_data(plain, 5, 3), client_data(shared, 5, 3)
    assert without.validation is None
    assert held.validation is not None
    assert len(held.validation) == int(0.25 * len(without.train))
    assert len(held.train) == len(without.train) - len(held.validation)
    torch.testing.assert_close(held.test.inputs, without.test.inputs)
    both = torch.cat([held.train.labels, held.validation.labels])
    assert torch.equal(both.bincount(minlength=10), without.train.labels.bincount(minlength=10))


def test_each_client_draws_rows_of_its_own() -> None:
    """As stored results have them: by the partition's seed and the client's number."""
    settings = DataSettings(validation_share=0.25, partition="iid", max_samples=200)
    for number in (0, 1):
        held = client_data(settings, 2, number)
        whole = client_data(settings.model_copy(update={"validation_share": 0.0}), 2, number).train
        _, rows = hold_out(
            np.arange(len(whole)), 0.25, seeds.derive(settings.partition_seed, "validation", number)
        )
        assert held.validation is not None
        assert torch.equal(held.validation.inputs, whole.inputs[torch.from_numpy(rows)])


def test_the_rest_keeps_its_order() -> None:
    rows = np.arange(100, 120)
    left, held = hold_out(rows, 0.5, 1)
    assert len(held) == 10
    assert (np.diff(left) > 0).all()
    assert (np.diff(held) > 0).all()
    assert set(left) | set(held) == set(rows)
    assert (hold_out(rows, 0.5, 1)[1] == held).all()
    assert len(hold_out(rows[:1], 0.5, 1)[1]) == 0


def test_both_shards_are_scored_and_travel() -> None:
    shards = data()
    who = replace(client(), data=replace(shards, validation=shards.train))

    def oracle(features: Tensor, logits: Tensor) -> Tensor:
        return torch.eye(3)[torch.zeros(len(features), dtype=torch.long)]  # always class 0

    result = evaluate(who, {"head": oracle})
    assert result.validation is not None
    assert result.validation.num_samples == len(shards.train)
    assert result.validation.correct["head"] == int((shards.train.labels == 0).sum())
    report = Report(9, result.num_samples, 1, result.correct, num_validation=8, validation={"head": 2})
    back = Report.from_record(report.to_record())
    assert (back.num_validation, back.validation) == (8, {"head": 2})
    assert summarise_accuracy(on_validation({0: back, 1: Report(9, 4)}))["head"].weighted == 0.25
    forged = report.to_record()
    forged["v"] = [8, 9, *[-1] * 4]
    with pytest.raises(RejectedPayload, match="contradict"):
        Report.from_record(forged)
