"""per-class: what is counted by class, what follows from it, what the wire refuses, and where it is written."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import Tensor

from pbfl_flwr.config import PREDICTORS, EvaluationSettings, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.messages.traffic import Traffic
from pbfl_flwr.flower.server.exchange import Outcome, Phase
from pbfl_flwr.flower.server.rounds import Exchange, clients_record, on_validation, summarise_accuracy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.runs.records import RoundRecord
from pbfl_flwr.sinks import new_client_step, steps
from pbfl_flwr.training.class_metrics import ByClass, balanced_accuracy, macro_f1, recalls, statistics
from pbfl_flwr.training.evaluation import evaluate
from tests.flower.inprocess import SPLITS, Federation, altered, federation, numbers, raises, same_tensors
from tests.training.test_loop import client, data

SCORES = {"balanced", "balanced_mean", "macro_f1", "macro_f1_mean", "by_class", "tested"}

# Two clients, four classes, of which nobody tests the last one.
# Client 0: labels 0 0 0 1, answers 0 0 1 1; client 1: labels 0 2, answers 0 3.
FIRST = ByClass([3, 1, 0, 0], {"head": [2, 1, 0, 0]}, {"head": [2, 2, 0, 0]})
SECOND = ByClass([1, 0, 1, 0], {"head": [1, 0, 0, 0]}, {"head": [1, 0, 0, 1]})


def report(counts: ByClass, **more: Any) -> Report:
    right = {name: sum(row) for name, row in counts.right.items()}
    return Report(9, sum(counts.tested), 1, right, metrics={}, by_class=counts, **more)


def test_by_hand() -> None:
    found = statistics([FIRST, SECOND], "head")
    assert found["tested"] == [4, 1, 1, 0]
    assert found["by_class"] == [0.75, 1.0, 0.0, None]
    assert found["balanced"] == pytest.approx((0.75 + 1 + 0) / 3)
    # 2R/(T + A): 6/7, 2/3, 0/1 and 0/1, the last of a class that is only answered
    assert found["macro_f1"] == pytest.approx((6 / 7 + 2 / 3 + 0 + 0) / 4)
    # client 0 has recalls 2/3 and 1, client 1 has 1 and 0
    assert found["balanced_mean"] == pytest.approx(((2 / 3 + 1) / 2 + (1 + 0) / 2) / 2)
    # client 0: 4/5 and 2/3; client 1: 1, 0 and 0
    assert found["macro_f1_mean"] == pytest.approx(((4 / 5 + 2 / 3) / 2 + (1 + 0 + 0) / 3) / 2)


def counted(labels: Sequence[int], answers: Sequence[int], num_classes: int) -> ByClass:
    pairs = list(zip(labels, answers, strict=True))
    right = [sum(a == b == k for a, b in pairs) for k in range(num_classes)]
    tested, answered = ([list(row).count(k) for k in range(num_classes)] for row in (labels, answers))
    return ByClass(tested, {"head": right}, {"head": answered})


def test_as_scikit_learn_has_them() -> None:
    drawn = np.random.default_rng(7)
    clients, labels, answers = [], [], []
    for size in (1, 2, 5, 40, 200):
        held = drawn.choice(12, size=min(size, 5), replace=False)  # classes 0..11 of 14
        labels.append(drawn.choice(held, size))
        answers.append(np.where(drawn.random(size) < 0.6, labels[-1], drawn.integers(0, 13, size)))
        clients.append(counted(labels[-1].tolist(), answers[-1].tolist(), 14))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of answers that are no label
        balanced = [balanced_accuracy_score(*pair) for pair in zip(labels, answers, strict=True)]
        together = balanced_accuracy_score(np.concatenate(labels), np.concatenate(answers))
    f1 = [f1_score(*pair, average="macro") for pair in zip(labels, answers, strict=True)]
    found = statistics(clients, "head")
    assert found["balanced_mean"] == pytest.approx(np.mean(balanced))
    assert found["macro_f1_mean"] == pytest.approx(np.mean(f1))
    assert found["balanced"] == pytest.approx(together)
    assert found["macro_f1"] == pytest.approx(
        f1_score(np.concatenate(labels), np.concatenate(answers), average="macro")
    )


def test_no_number_without_a_sample_is_made_up() -> None:
    assert np.isnan(recalls([0, 2], [0, 1])).tolist() == [True, False]
    assert float(balanced_accuracy([0, 2], [0, 1])) == 0.5
    assert float(macro_f1([0, 2, 0], [0, 1, 0], [1, 1, 0])) == pytest.approx((0 + 2 / 3) / 2)


def test_the_pass_over_the_test_data_counts() -> None:
    labels = data().test.labels
    fixed = torch.tensor([0, 1, 1, 0, 1, 2])[: len(labels)]
    seen = 0

    def oracle(features: Tensor, logits: Tensor) -> Tensor:
        nonlocal seen
        batch = fixed[seen % len(fixed) : seen % len(fixed) + len(features)]
        seen += len(features)
        return torch.eye(3)[batch]

    who = replace(client(), evaluation=EvaluationSettings(per_class=True, eval_batch_size=4))
    found = evaluate(who, {"head": oracle})
    expected = counted(labels.tolist(), fixed.tolist(), 3)
    assert found.by_class == expected
    assert sum(expected.right["head"]) == found.correct["head"]
    assert evaluate(client(), {"head": oracle}).by_class is None


def test_without_test_samples_there_are_zeros() -> None:
    shards = data(test=0)
    who = replace(client(), data=shards, evaluation=EvaluationSettings(per_class=True))
    found = evaluate(who, {"head": lambda features, logits: logits})
    assert found.by_class == ByClass([0] * 3, {"head": [0] * 3}, {"head": [0] * 3})
    empty = report(found.by_class)
    assert Report.from_record(empty.to_record(), 3) == empty
    assert summarise_accuracy({0: empty}) == {}


# The wire ---------------------------------------------------------------------------------------------------


def twice() -> Report:
    other = ByClass(FIRST.tested, {"head": [1, 0, 0, 0]}, {"head": [1, 0, 0, 3]})
    return report(FIRST, other={"head": 1}, other_by_class=other)


def test_counts_travel_as_whole_numbers_and_come_back() -> None:
    for sent in (report(SECOND), twice()):
        record = sent.to_record()
        assert all(
            type(value) is int
            for value in [*numbers(record, "k"), *(numbers(record, "ko") if "ko" in record else [])]
        )
        assert Report.from_record(record, 4) == sent
    several = ByClass([1, 2], {"head": [1, 1], "local": [0, 2]}, {"head": [2, 1], "local": [1, 2]})
    assert Report.from_record(report(several).to_record(), 2) == report(several)


def test_nobody_looks_at_counts_that_were_not_asked_for() -> None:
    record = twice().to_record()
    record["k"] = [-1]
    found = Report.from_record(record)
    assert found.by_class is None
    assert found.other == {"head": 1}
    assert "k" not in Report(4, 3, 1, {"head": 1}).to_record()


LENGTH, COUNT, CONTRADICT = "lacks 'k' of length 12", "values that are not counts", "by class contradict"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k: k[:-1], LENGTH),
        (lambda k: [*k, 0, 0, 0, 0], LENGTH),
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
def test_malformed_counts_are_rejected(change: Any, said: str) -> None:
    record = report(FIRST).to_record()
    record["k"] = change(numbers(record, "k"))
    with pytest.raises(RejectedPayload, match=said):
        Report.from_record(record, 4)


def test_counts_that_were_asked_for_must_be_there() -> None:
    with pytest.raises(RejectedPayload, match=LENGTH):
        Report.from_record(Report(9, 4, 1, {"head": 3}).to_record(), 4)
    record = MetricRecord({key: value for key, value in twice().to_record().items() if key != "ko"})
    with pytest.raises(RejectedPayload, match="lacks 'ko' of length 8"):
        Report.from_record(record, 4)
    record["ko"] = [0, 1, 0, 0, 1, 0, 0, 3]
    with pytest.raises(RejectedPayload, match=CONTRADICT):  # right 1 of class 1, answered never
        Report.from_record(record, 4)


# The books --------------------------------------------------------------------------------------------------


def test_the_books_keep_what_occurs() -> None:
    assert SECOND.brief() == {
        "classes": [0, 2, 3],
        "tested": [1, 1, 0],
        "right": {"head": [1, 0, 0]},
        "answered": {"head": [1, 0, 1]},
    }
    reports = {0: report(FIRST), 1: Report(9, 0)}
    down = {number: Traffic() for number in reports}
    outcome = Outcome(reports=reports, up=down)
    phase = Phase([], set(), down, 0, 0.0, number=1)
    columns = clients_record(Exchange(phase, [], [], outcome))
    assert columns.by_class == [FIRST.brief(), {}]
    assert columns.other_by_class == []
    outcome.reports = {1: Report(9, 0)}
    assert clients_record(Exchange(phase, [], [], outcome)).by_class == []


def test_what_is_held_out_is_not_counted_by_class() -> None:
    held = report(FIRST, num_validation=2, validation={"head": 1})
    assert set(summarise_accuracy({0: held})["head"].to_json()) >= SCORES
    assert not SCORES & set(summarise_accuracy(on_validation({0: held}))["head"].to_json())


def without_classes(history: Sequence[RoundRecord]) -> list[Any]:
    """The accuracies of a run without what is by class."""
    return [
        {name: score.model_dump(exclude=SCORES) for name, score in scored.items()}
        for record in history
        for scored in (record.accuracy, record.other_accuracy, record.final.accuracy if record.final else {})
    ]


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_a_run_has_them_wherever_it_has_accuracies(tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"new_clients": 1, "new_client_rounds": 1, "both_moments": True}
    run = federation(tmp_path / "on", method, on_disk=True, per_class=True, **keys).run()
    off = federation(tmp_path / "off", method, on_disk=True, **keys).run()
    assert without_classes(run.strategy.history) == without_classes(off.strategy.history), (
        "training must not notice"
    )
    assert same_tensors(*(of.strategy.state.to_tensors() for of in (run, off)))
    last, (new,) = run.strategy.history[-1], run.strategy.new_client_rounds
    places = [last.accuracy, last.other_accuracy, new.accuracy, new.other_accuracy]
    if run.strategy.moment == "before":
        assert last.final is not None
        assert new.final is not None
        places += [last.final.accuracy, new.final.accuracy]
    for place in places:
        assert all(set(score.to_json()) >= SCORES for score in place.values())
    assert not any(SCORES & set(score.to_json()) for score in off.strategy.history[-1].accuracy.values())
    tested = [sum(test.get(label, 0) for _, test in SPLITS[:4]) for label in range(10)]
    figures = {name: value for _, step in steps(last) for name, value in step.items()}
    for name, score in last.accuracy.items():
        assert score.tested == tested
        each = [
            None if value is None else value * n
            for value, n in zip(score.by_class or [], tested, strict=True)
        ]
        assert [value is None for value in each] == [n == 0 for n in tested]
        correct = sum(value for value in each if value is not None)
        assert correct / sum(tested) == pytest.approx(score.weighted)
        assert figures[f"accuracy/{name}/macro_f1"] == pytest.approx(last.latest.accuracy[name].macro_f1)
        assert not any("by_class" in known or "tested" in known for known in figures)
    assert any(known.endswith("head/balanced_mean") for known in new_client_step(new)[1])
    columns = run.directory.client_records()[-1]
    pooled = [0] * 10
    for counts, n in zip(columns.by_class, columns.num_test, strict=True):
        assert sum(counts["tested"]) == n
        for label, count in zip(counts["classes"], counts["tested"], strict=True):
            pooled[label] += count
    assert pooled == tested
    assert all(columns.other_by_class)


def test_liars_count_for_nothing(tmp_path: Path) -> None:
    attack: dict[str, Any] = {"attack.kind": "sign-flip"}
    run = federation(tmp_path, per_class=True, on_disk=True, **attack).run()
    (liar,) = run.directory.record().malicious
    tested = [
        sum(split[1].get(label, 0) for n, split in enumerate(SPLITS) if n != liar) for label in range(10)
    ]
    assert run.strategy.history[-1].accuracy["head"].tested == tested
    assert run.directory.client_records()[-1].by_class[liar]


def test_a_malformed_one_costs_its_client_alone(tmp_path: Path) -> None:
    def forge(content: RecordDict) -> None:
        record = content.metric_records[wire.METRICS]
        record["k"] = [9, *numbers(record, "k")[1:]]

    def forget(content: RecordDict) -> None:
        del content.metric_records[wire.METRICS]["k"]

    faults = {(0, 1): altered(forge), (3, 1): altered(forget)}
    run = federation(tmp_path, per_class=True, faults=faults, num_server_rounds=1).run()
    said = {failure.client: failure.reason for failure in run.strategy.history[0].failures}
    assert said[0] == "upload rejected: its counts by class contradict the others"
    assert said[3].startswith("upload rejected: its report lacks 'k' of length")
    assert run.strategy.history[0].accuracy["head"].clients == 3
    tested = [sum(SPLITS[n][1].get(label, 0) for n in (1, 2, 4)) for label in range(10)]
    assert run.strategy.history[0].accuracy["head"].tested == tested


def test_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    def of(place: Path, **keys: Any) -> Federation:
        return federation(place, per_class=True, on_disk=True, **keys).run()

    whole = of(tmp_path / "whole", num_server_rounds=3)
    of(tmp_path / "parts", num_server_rounds=1)
    parts = of(tmp_path / "parts", num_server_rounds=3, resume=True)
    assert [line.accuracy for line in parts.strategy.history] == [
        line.accuracy for line in whole.strategy.history
    ]
    with pytest.raises(PbflError, match="another configuration"):
        federation(tmp_path / "parts", on_disk=True, num_server_rounds=4, resume=True).run()


def test_who_failed_and_is_asked_again_says_the_same(tmp_path: Path) -> None:
    run = federation(tmp_path, per_class=True, faults={(1, 1): raises}, on_disk=True).run()
    first, second = run.directory.client_records()
    assert 1 not in first.client
    assert second.by_class[second.client.index(1)]["classes"]


def test_under_secure_aggregation_reports_are_as_in_clear(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"aggregation": "ppa", "num_server_rounds": 1, "per_class": True}
    plain_run = federation(tmp_path / "plain", **keys).run()
    secure = federation(tmp_path / "secure", **keys, secure_aggregation=True).run()
    assert secure.strategy.history[0].accuracy == plain_run.strategy.history[0].accuracy
    assert set(secure.strategy.history[0].accuracy["head"].to_json()) >= SCORES


def test_it_needs_clients_that_say_how_they_score() -> None:
    with pytest.raises(PbflError) as error:
        parse({"per-class": True, "client-report": "none"}, SECTIONS)
    assert str(error.value) == (
        "per-class = true: with client-report = 'none' clients report no scores; must be false"
    )


def test_the_lines_are_json(tmp_path: Path) -> None:
    run = federation(tmp_path, per_class=True, on_disk=True, num_server_rounds=1).run()
    (record,) = run.directory.round_records()
    assert json.loads(json.dumps(record.to_json(), allow_nan=False)) == run.strategy.history[0].to_json()
    assert set(record.accuracy) <= set(PREDICTORS)
