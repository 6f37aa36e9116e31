"""Reports: they come back as they were, and what cannot be is rejected."""

from dataclasses import replace
from typing import Any

import pytest
from flwr.app import MetricRecord

from pbfl_flwr.config import EvaluationSettings
from pbfl_flwr.flower.messages.report import SPENT, Report, Requested
from pbfl_flwr.flower.server.rounds import (
    summarise_accuracy,
)
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.training.class_metrics import ByClass
from pbfl_flwr.training.evaluation import evaluate
from tests.flower.inprocess import numbers
from tests.training.test_loop import client, data

SECONDS = {step: 0.5 + i for i, step in enumerate(SPENT)}


def test_report_round_trip() -> None:
    sent = Report(10, 4, 3, {"head": 2, "local": 0}, 0.5, SECONDS, 99.5, {"loss.ce": 0.25})
    assert Report.from_record(sent.to_record()) == sent


def test_rejects_reports_of_wrong_length_or_type() -> None:
    good = dict(Report(10, 4).to_record())
    for key in ("n", "c", "t"):
        for bad in (None, 3, [1] * 50):
            record = MetricRecord({k: v for k, v in good.items() if k != key})
            if bad is not None:
                record[key] = bad
            with pytest.raises(RejectedPayload, match=f"its report lacks '{key}' of length"):
                Report.from_record(record)


def test_rejects_more_correct_than_tested_samples() -> None:
    record = Report(4, 3, correct={"head": 3}).to_record()
    assert Report.from_record(record).correct == {"head": 3}
    record["c"] = [4, -1, -1, -1, -1]
    with pytest.raises(RejectedPayload, match="contradict"):
        Report.from_record(record)


# Counts by class ---------------------------------------------------------------------------------------------


# Two clients, four classes, of which nobody tests the last one.
# Client 0: labels 0 0 0 1, answers 0 0 1 1; client 1: labels 0 2, answers 0 3.
FIRST = ByClass([3, 1, 0, 0], {"head": [2, 1, 0, 0]}, {"head": [2, 2, 0, 0]})


SECOND = ByClass([1, 0, 1, 0], {"head": [1, 0, 0, 0]}, {"head": [1, 0, 0, 1]})


def report_by_class(counts: ByClass, **more: Any) -> Report:
    right = {name: sum(row) for name, row in counts.right.items()}
    return Report(9, sum(counts.tested), 1, right, metrics={}, by_class=counts, **more)


def test_counts_are_zero_without_test_samples() -> None:
    shards = data(test=0)
    who = replace(client(), data=shards, evaluation=EvaluationSettings(per_class=True))
    result = evaluate(who, {"head": lambda features, logits: logits})
    assert result.by_class == ByClass([0] * 3, {"head": [0] * 3}, {"head": [0] * 3})
    empty = report_by_class(result.by_class)
    assert Report.from_record(empty.to_record(), Requested(3)) == empty
    assert summarise_accuracy({0: empty}) == {}


def test_counts_by_class_round_trip_as_integers() -> None:
    for sent in (report_by_class(FIRST), report_by_class(SECOND)):
        record = sent.to_record()
        assert all(type(value) is int for value in numbers(record, "k"))
        assert Report.from_record(record, Requested(4)) == sent
    several = ByClass([1, 2], {"head": [1, 1], "local": [0, 2]}, {"head": [2, 1], "local": [1, 2]})
    assert Report.from_record(report_by_class(several).to_record(), Requested(2)) == report_by_class(several)


def test_unrequested_counts_are_ignored() -> None:
    record = report_by_class(FIRST).to_record()
    record["k"] = [-1]
    assert Report.from_record(record).by_class is None
    assert "k" not in Report(4, 3, 1, {"head": 1}).to_record()


LENGTH, COUNT, CONTRADICT = "lacks 'k' of length 12", "values that are not counts", "by class contradict"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: k[:-1], LENGTH),
        (lambda k: 3, LENGTH),
        (lambda k: [float(value) for value in k], COUNT),
        (lambda k: [*k[:-1], -1], COUNT),
        (lambda k: [2**62, *k[1:]], COUNT),
        (lambda k: [k[0] + 1, *k[1:]], CONTRADICT),  # tested: 5 in all, not 4
        (lambda k: [*k[:4], k[4] + 1, *k[5:]], CONTRADICT),  # right: 4 in all, not 3
        (lambda k: [*k[:8], k[8] + 1, *k[9:]], CONTRADICT),  # answered: 5 in all, not 4
        (lambda k: [*k[:4], 1, 2, 0, 0, *k[8:]], CONTRADICT),  # more right than tested, of class 1
        (lambda k: [*k[:8], 1, 3, 0, 0], CONTRADICT),  # more right than answered, of class 0
    ],
)
def test_rejects_malformed_counts(change: Any, message: str) -> None:
    record = report_by_class(FIRST).to_record()
    record["k"] = change(numbers(record, "k"))
    with pytest.raises(RejectedPayload, match=message):
        Report.from_record(record, Requested(4))


def test_rejects_missing_counts() -> None:
    with pytest.raises(RejectedPayload, match=LENGTH):
        Report.from_record(Report(9, 4, 1, {"head": 3}).to_record(), Requested(4))
