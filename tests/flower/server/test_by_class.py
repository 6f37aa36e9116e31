"""Runs with per-class: what is recorded, and where."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report, Requested
from pbfl_flwr.flower.messages.traffic import NO_BYTES
from pbfl_flwr.flower.server.phase import Phase, RoundPlan
from pbfl_flwr.flower.server.replies import Replies
from pbfl_flwr.flower.server.rounds import clients_record, on_validation, summarise_accuracy
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.runs.records import RoundRecord
from pbfl_flwr.sinks import steps
from pbfl_flwr.training.class_metrics import Areas
from tests.flower.inprocess import SPLITS, altered, federation, numbers, same_tensors
from tests.flower.messages.test_report import FIRST, SECOND, report_by_class

SCORES = {"balanced", "balanced_mean", "macro_f1", "macro_f1_mean", "by_class", "tested"}


def test_records_hold_only_occurring_classes() -> None:
    assert SECOND.brief() == {
        "classes": [0, 2, 3],
        "tested": [1, 1, 0],
        "right": {"head": [1, 0, 0]},
        "answered": {"head": [1, 0, 1]},
    }
    reports = {0: report_by_class(FIRST), 1: Report(9, 0)}
    down = dict.fromkeys(reports, NO_BYTES)
    replies = Replies(Phase([], RoundPlan(1, {}), down, 0, 0.0), reports=reports, up=down)
    columns = clients_record(replies, {})
    assert columns.by_class == [FIRST.brief(), {}]
    replies.reports = {1: Report(9, 0)}
    assert clients_record(replies, {}).by_class == []


def test_validation_samples_are_not_counted_by_class() -> None:
    scored = report_by_class(FIRST, num_validation=2, validation={"head": 1})
    assert set(summarise_accuracy({0: scored})["head"].to_json()) >= SCORES
    assert not SCORES & set(summarise_accuracy(on_validation({0: scored}))["head"].to_json())


def without_classes(history: Sequence[RoundRecord]) -> list[Any]:
    """The accuracies of a run without what is by class."""
    return [
        {name: score.model_dump(exclude=SCORES) for name, score in scored.items()}
        for record in history
        for scored in (record.accuracy, record.final.accuracy if record.final else {})
    ]


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_class_metrics_accompany_every_accuracy(tmp_path: Path, method: str) -> None:
    run = federation(tmp_path / "on", method, on_disk=True, per_class=True).run()
    off = federation(tmp_path / "off", method, on_disk=True).run()
    assert without_classes(run.strategy.history) == without_classes(off.strategy.history)
    assert same_tensors(*(of.strategy.state.to_tensors() for of in (run, off))), "training must not notice"
    last = run.strategy.history[-1]
    places = [last.accuracy]
    if run.strategy.moment == "before":
        assert last.final is not None
        places.append(last.final.accuracy)
    assert all(set(score.to_json()) >= SCORES for place in places for score in place.values())
    assert not any(SCORES & set(score.to_json()) for score in off.strategy.history[-1].accuracy.values())
    tested = [sum(test.get(label, 0) for _, test in SPLITS) for label in range(10)]
    figures = {name: value for _, step in steps(last) for name, value in step.items()}
    assert not any("by_class" in known or "tested" in known for known in figures)
    for name, score in last.accuracy.items():
        assert score.tested == tested
        shares = score.by_class or []
        assert [value is None for value in shares] == [n == 0 for n in tested]
        correct = sum((value or 0.0) * n for value, n in zip(shares, tested, strict=True))
        assert correct / sum(tested) == pytest.approx(score.weighted)
        assert figures[f"accuracy/{name}/macro_f1"] == pytest.approx(last.latest.accuracy[name].macro_f1)
    columns = run.directory.client_records()[-1]
    pooled = [0] * 10
    for counts, n in zip(columns.by_class, columns.num_test, strict=True):
        assert sum(counts["tested"]) == n
        for label, count in zip(counts["classes"], counts["tested"], strict=True):
            pooled[label] += count
    assert pooled == tested


def test_malformed_counts_reject_one_client_only(tmp_path: Path) -> None:
    def forge(content: RecordDict) -> None:
        record = content.metric_records[wire.METRICS]
        record["k"] = [9, *numbers(record, "k")[1:]]

    def forget(content: RecordDict) -> None:
        del content.metric_records[wire.METRICS]["k"]

    faults = {(0, 1): altered(forge), (3, 1): altered(forget)}
    run = federation(tmp_path, per_class=True, faults=faults, num_server_rounds=1).run()
    message = {failure.client: failure.reason for failure in run.strategy.history[0].failures}
    assert message[0] == "upload rejected: its counts by class contradict the others"
    assert message[3].startswith("upload rejected: its report lacks 'k' of length")
    assert run.strategy.history[0].accuracy["head"].clients == 3
    tested = [sum(SPLITS[n][1].get(label, 0) for n in (1, 2, 4)) for label in range(10)]
    assert run.strategy.history[0].accuracy["head"].tested == tested


def test_areas_are_recorded_as_means_weighted_by_samples(tmp_path: Path) -> None:
    run = federation(tmp_path / "on", auc=True).run().strategy
    off = federation(tmp_path / "off").run().strategy
    for on_record, off_record in zip(run.history, off.history, strict=True):
        for name, score in on_record.accuracy.items():
            assert score.auc_macro is not None
            assert score.auc_micro is not None
            assert 0 < min(score.auc_macro, score.auc_micro) <= max(score.auc_macro, score.auc_micro) <= 1
            same = score.model_copy(update={"auc_macro": None, "auc_micro": None})
            assert same == off_record.accuracy[name]

    def with_areas(samples: int, areas: Areas) -> Report:
        record = Report(9, samples, 1, {"head": 1}, areas={"head": areas}).to_record()
        assert Report.from_record(record).areas is None, "nobody asked for it"
        return Report.from_record(record, Requested(areas=True))

    one_class = with_areas(3, Areas(None, 0.5))
    (score,) = summarise_accuracy({0: with_areas(1, Areas(0.25, 1.0)), 1: one_class}).values()
    assert (score.auc_macro, score.auc_micro) == (0.25, (1 * 1.0 + 3 * 0.5) / 4)
    with pytest.raises(RejectedPayload, match="lacks 'a'"):
        Report.from_record(Report(9, 3, 1, {"head": 1}).to_record(), Requested(areas=True))
    with pytest.raises(RejectedPayload, match="above 1"):
        with_areas(3, Areas(0.5, 1.5))
    assert Report.from_record(Report(9, 0).to_record(), Requested(areas=True)).areas is None
    unscored = Report(9, 3, 1, {}, areas={}).to_record()  # no predictor is available yet
    assert Report.from_record(unscored, Requested(areas=True)).areas is None
