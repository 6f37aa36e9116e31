"""What is recorded of a round: accuracies over clients, and ages of classes."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from pbfl_flwr.flower.messages.report import SPENT, Report
from pbfl_flwr.flower.messages.traffic import NO_BYTES
from pbfl_flwr.flower.server.phase import Phase, RoundPlan
from pbfl_flwr.flower.server.replies import Replies
from pbfl_flwr.flower.server.rounds import (
    clients_record,
    replaced_states,
    round_fields,
    summarise_accuracy,
    updated_ages,
)
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.runs.records import Accuracy, Bytes, RoundRecord
from tests.flower.inprocess import KINDS, federation, plain, same_tensors


def report(num_test: int, correct: int, **others: int) -> Report:
    return Report(10, num_test, 1, {"head": correct, **others}, 0.5)


def test_accuracy_over_clients_by_hand() -> None:
    result = summarise_accuracy({0: report(1, 1), 1: report(3, 0)})["head"]
    assert result == Accuracy(weighted=0.25, mean=0.5, std=0.5, worst=0.0, clients=2)  # 1/4, not 1/2
    twenty = {i: report(10, min(i, 10)) for i in range(20)}  # accuracies 0, 0.1, 0.2, ..., 1, 1, ...
    assert summarise_accuracy(twenty)["head"].worst == pytest.approx(0.05)  # the two worst, (0 + 0.1)/2
    several = summarise_accuracy({0: report(4, 2), 1: report(0, 0), 2: report(4, 3, **{"global": 1})})
    assert several["head"].clients == 2
    assert (several["global"].weighted, several["global"].clients) == (0.25, 1)
    assert summarise_accuracy({1: report(0, 0)}) == {}


def size(payload: int, application: int, total: int) -> Bytes:
    return Bytes(payload=payload, application=application, total=total)


def replies() -> Replies:
    """Clients 0, 1 and 3 train, of which 3 lies; client 2 is only scored."""
    seconds = dict(zip(SPENT, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    reports = {
        0: Report(1, 2, 1, {"head": 2}, 0.5, seconds, 70.0, {"loss.ce": 1.0}),
        1: Report(
            3, 6, 1, {"head": 3}, 1.5, seconds, 90.0, {"loss.ce": 3.0, "held-back": 4.0}, 4, {"head": 1}
        ),
        2: Report(9, 2, 1, {"head": 0}, 2.5, seconds, 80.0),
        3: Report(4, 8, 1, {"head": 8}, 9.0, seconds, 60.0, {"loss.ce": 5.0}, 5, {"head": 5}),
    }
    down = {client: size(1, 10, 100) for client in reports}
    plan = RoundPlan(5, {0: "train", 1: "train", 2: "evaluate", 3: "train"})
    phase = Phase([], plan, down, 12, 0.0)
    uploads = dict.fromkeys((0, 1, 3), Prototypes.empty(2, 2))
    up = {0: size(2, 20, 200), 1: size(3, 30, 300), 3: NO_BYTES, 2: size(0, 1, 1)}
    return Replies(phase, [], uploads, reports, {4: "gone"}, up=up, scalars_up=7)


BACK = "client 0, 2 went back to an older state: 3, 2 rounds trained instead of 5, 4"
UNKNOWN = "rounds trained instead of at most 5; a second device may have its key"


@pytest.mark.parametrize(
    ("counts", "notes"),
    [
        ((5, 5, 4, 5), []),
        ((1, 5, 0, 5), ["client 0, 2 lost its state and starts from scratch"]),
        ((3, 5, 2, 5), [BACK]),
        (
            (1, 5, 1, 5),
            ["client 0 lost", "client 2 went back to an older state: 1 rounds trained instead of 4"],
        ),
        ((6, 5, 4, 5), [f"client 0 went on from a state unknown here: 6 {UNKNOWN}"]),
        ((5, 8, 4, 5), []),  # its answers to rounds 2 to 4 were lost
        ((5, 9, 4, 5), [f"client 1 went on from a state unknown here: 9 {UNKNOWN.replace('5', '8')}"]),
    ],
)
def test_counts_that_do_not_follow_from_the_last_ones(counts: tuple[int, ...], notes: list[str]) -> None:
    """Round 5: all reported 4 rounds in the last one, client 1 in round 1."""
    asked = replies()
    reports = [
        replace(report, participations=count)
        for report, count in zip(asked.reports.values(), counts, strict=True)
    ]
    asked = replace(asked, reports=dict(enumerate(reports)))
    found = replaced_states(asked, dict.fromkeys(range(4), 4), {0: 4, 1: 1, 2: 4, 3: 4})
    assert [one.startswith(other) for one, other in zip(found, notes, strict=True)] == [True] * len(notes)


@pytest.mark.parametrize(("moment", "scored"), [("after", 5), ("before", 4)])
def test_round_record_by_hand(moment: Literal["before", "after"], scored: int) -> None:
    fields = round_fields(replies(), moment, {"loss": float("nan")}, 0.25, 1.0, replies())
    record = RoundRecord(**fields, warnings=["a warning"], ages=[0, 3])
    assert (record.round, record.accuracy_of_round) == (5, scored)
    assert record.accuracy["head"].weighted == 13 / 18  # (2 + 3 + 0 + 8)/(2 + 6 + 2 + 8)
    assert record.accuracy["head"].clients == 4
    assert (record.validation["head"].weighted, record.validation["head"].clients) == (6 / 9, 2)
    assert record.test_loss == 87 / 18  # (2·0.5 + 6·1.5 + 2·2.5 + 8·9)/18: by test samples
    # (1·1 + 3·3 + 4·5)/8: by training samples
    assert record.client_metrics == {"held-back": 4.0, "loss.ce": 3.75}
    assert record.server_metrics == {"loss": None}
    assert (record.warnings, record.ages) == (["a warning"], [0, 3])
    assert record.trained == [0, 1, 3]
    assert plain(record.failures) == [{"client": 4, "reason": "gone"}]
    assert (record.bytes_up.payload, record.bytes_up.application, record.bytes_up.total) == (5, 51, 501)
    assert (record.bytes_down.payload, record.bytes_down.application, record.bytes_down.total) == (4, 40, 400)
    assert (record.scalars.up, record.scalars.down) == (7, 12)
    assert record.seconds.clients == dict(zip(SPENT, (4.0, 8.0, 12.0, 16.0, 20.0), strict=True))
    assert (record.seconds.aggregate, record.seconds.total, record.peak_mb) == (0.25, 1.0, 90.0)
    assert record.final is not None
    assert (record.final.accuracy, record.final.validation) == (record.accuracy, record.validation)
    assert record.final.failures == record.failures
    assert RoundRecord.from_json(record.to_json(), "a line") == record


def test_clients_record_holds_every_client() -> None:
    columns = clients_record(replies(), {})
    assert (columns.round, columns.client) == (5, [0, 1, 2, 3])
    assert columns.correct == [{"head": 2}, {"head": 3}, {"head": 0}, {"head": 8}]
    assert columns.num_validation == [0, 4, 0, 5]
    assert columns.correct_validation == [{}, {"head": 1}, {}, {"head": 5}]
    assert columns.seconds == {step: [float(n)] * 4 for n, step in enumerate(SPENT, start=1)}
    unvalidated = replace(replies(), reports={2: replies().reports[2]})
    assert not {"num_validation", "correct_validation"} & set(clients_record(unvalidated, {}).to_json())


def test_missing_figures_are_none() -> None:
    done = replace(replies(), uploads={}, reports={2: Report(9, 0)}, failures={}, up={2: NO_BYTES})
    record = RoundRecord(**round_fields(done, "after", {}, 0.0, 1.0), warnings=[])
    assert (record.test_loss, record.client_metrics, record.accuracy) == (None, {}, {})
    assert not {"validation", "ages", "final"} & set(record.to_json())


def test_class_ages_by_hand() -> None:
    assert updated_ages(None, {1}, 3) == [-1, 0, -1]
    assert updated_ages([-1, 0, 4], {0}, 3) == [0, 1, 5]
    assert updated_ages(None, None, 3) is None
    assert updated_ages([0, 1, -1], None, 3) == [1, 2, -1]  # nobody sent anything


@pytest.mark.parametrize(("predictor", "num_warnings"), [("global", 1), ("head", 0), ("auto", 0)])
def test_warns_of_predictor_that_no_client_could_score(
    predictor: str, num_warnings: int, tmp_path: Path
) -> None:
    result = federation(tmp_path, "fedproto", predictor=predictor, min_class_count=1000).run()
    warnings = [warning for record in result.strategy.history for warning in record.warnings]
    about_predictor = [warning for warning in warnings if warning.startswith("predictor = ")]
    assert len(about_predictor) == num_warnings
    assert all("has no scores of it" in line and "scores of head" in line for line in about_predictor)


def test_one_round_has_no_scores_of_a_predictor_that_there_can_be_only_later(tmp_path: Path) -> None:
    run = federation(
        tmp_path, "fedproto", predictor="global", num_server_rounds=1, evaluate_moment="before"
    ).run()
    assert not [line for line in run.strategy.history[0].warnings if line.startswith("predictor = ")]


@pytest.mark.parametrize("method", [*KINDS, "fedala", "tinyproto"])
def test_training_does_not_notice_when_clients_are_scored(tmp_path: Path, method: str) -> None:
    before, after = (
        federation(tmp_path / moment, method, num_clients=3, evaluate_moment=moment).run().strategy
        for moment in ("before", "after")
    )
    assert same_tensors(before.state.to_tensors(), after.state.to_tensors())
    assert before.history[-1].final is not None
    assert before.history[0].accuracy != after.history[0].accuracy
