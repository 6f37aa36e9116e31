"""Replies: what is accepted and what is rejected with which reason, and replies that come after their round."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from safetensors.torch import save
from torch import Tensor

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.errors import LONGEST
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.overdue import MAX_OVERDUE_ROUNDS
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs.records import REPEATED
from pbfl_flwr.task import Task
from tests.flower.inprocess import (
    InProcessGrid,
    delayed,
    flower_error,
    numbers,
    plain,
    reply_of,
    same_tensors,
    scripted,
    silent,
)
from tests.flower.server.uploads import TASK, prototypes, strategy_of

ROWS = torch.arange(12, dtype=torch.float32).reshape(2, 6)


LABELS = torch.tensor([0, 2], dtype=torch.uint8)


COUNTS = torch.tensor([3, 4])


def tampered(value: float) -> Tensor:
    rows = ROWS.clone()
    rows[1, 3] = value
    return rows


POISON: dict[str, tuple[str, dict[str, Tensor], str]] = {
    # name: rule of aggregation, what differs from a valid table of two rows, reason
    "nan": ("mean", {"rows": tampered(float("nan"))}, "'rows' holds NaN or infinity"),
    "huge": ("mean", {"rows": tampered(1e30)}, "'rows' holds 1e+30, must be at most 1e+08"),
    "wide": ("mean", {"rows": torch.ones(2, 7)}, "rows are 7 wide, must be 1..6"),
    "flat": ("mean", {"rows": ROWS.flatten()}, "'rows' has 1 dimensions, expected 2"),
    "complex": ("mean", {"rows": ROWS.to(torch.complex64)}, "'rows' is torch.complex64"),
    "class out of range": ("mean", {"labels": torch.tensor([0, 4])}, "class id 4 is outside 0..3"),
    "negative class": ("mean", {"labels": torch.tensor([-1, 2])}, "class id -1 is outside 0..3"),
    "doubled class": ("mean", {"labels": torch.tensor([2, 2])}, "a class is sent twice"),
    "labels without rows": ("mean", {"rows": ROWS[:1]}, "2 labels for 1 rows"),
    "no rows at all": ("mean", {}, "'rows' is missing"),
    "zero count": ("weighted", {"counts": torch.tensor([3, 0])}, "a row with a count of zero or less"),
    "counts without rows": ("weighted", {"counts": torch.tensor([3, 4, 5])}, "3 counts for 2 rows"),
    "enormous count": ("weighted", {"counts": torch.tensor([3, 2**62])}, f"a count of {2**62}"),
    "unwanted counts": ("mean", {"counts": COUNTS}, "counts are not part of rule 'mean'"),
    "counts as fractions": (
        "weighted",
        {"counts": torch.tensor([3.0, 4.0])},
        "'counts' must be a list of whole numbers",
    ),
    "something else": ("mean", {"extra": COUNTS}, "unexpected tensors ['extra']"),
}


TIMES = numbers(Report(0, 0).to_record(), "t")


def poisoned_round(rule: str, poison: RecordDict | Message | None) -> MethodStrategy:
    """Run one round of four clients; client 2 answers with the poison, or not at all."""

    def answer(client: int, server_round: int) -> RecordDict | Message:
        if client == 2 and poison is not None:
            return poison
        return reply_of(prototypes(client, [client % 4, 3], [2, 1 + client] if rule == "weighted" else None))

    faults = {(2, 1): silent} if poison is None else {}
    strategy = strategy_of(method="fedproto", aggregation=rule)
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 4, order=1, faults=faults))
    return strategy


@pytest.mark.parametrize("name", list(POISON))
def test_rejects_invalid_uploads_with_the_reason_and_aggregates_the_others(name: str) -> None:
    rule, change, reason = POISON[name]
    tensors = {"labels": LABELS, "rows": ROWS, **change}
    if name == "no rows at all":
        del tensors["rows"]
    report = Report(10, 4, 1, {"head": 2}, 0.5).to_record()
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    record = wire.with_checksum(data)  # complex cannot be encoded by our side

    poisoned, without = poisoned_round(rule, wire.content(record, report)), poisoned_round(rule, None)

    (failure,) = poisoned.history[0].failures
    assert failure.client == 2
    assert failure.reason.startswith("upload rejected: ")
    assert reason in failure.reason
    assert "\n" not in failure.reason
    assert poisoned.history[0].trained == [0, 1, 3]
    assert poisoned.history[0].accuracy == without.history[0].accuracy
    assert same_tensors(poisoned.state.to_tensors(), without.state.to_tensors())


def forged(**change: Any) -> RecordDict:
    """Return a reply whose report has other entries than it should."""
    record = Report(10, 4, 1, {"head": 2}, 0.5, metrics={"loss.ce": 1.0}).to_record()
    return wire.content(wire.encode(prototypes(2, [0])), MetricRecord({**dict(record), **change}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (forged(n=[10, -4, 1, 0]), "its counters contradict each other"),
        (forged(n=[10, 1, 1, 0]), "its counters contradict each other"),
        (forged(n=[2**62, 4, 1, 0]), "its report counts 4611686018427387904 samples"),
        (forged(n=[1e308, 4.0, 1.0, 0.0]), "a number beyond 1e40"),
        (forged(t=[float("nan")] * len(TIMES)), "its report holds nan in 't'"),
        (forged(**{"loss.ce": float("inf")}), "its report holds inf in 'loss.ce'"),
        (forged(**{"loss.ce": -1e300}), "a number beyond 1e40 in 'loss.ce'"),
        (forged(**{f"metric-{i}": 0.0 for i in range(200)}), "must be at most 100"),
        (RecordDict(), "its report is missing"),
        (RecordDict({"p": ConfigRecord({"a": 1})}), "its report is missing"),
        (wire.content(report=Report(10, 4).to_record()), "its payload is missing"),
        (wire.content(ArrayRecord(), Report(10, 4).to_record()), "'labels' is missing"),
        (wire.content(ArrayRecord({"s": Array(np.ones(3))}), Report(10, 4).to_record()), "'numpy.ndarray'"),
    ],
)
def test_rejects_inconsistent_or_incomplete_replies(content: RecordDict, reason: str) -> None:
    strategy = poisoned_round("mean", content)
    (failure,) = strategy.history[0].failures
    assert failure.client == 2
    assert failure.reason.startswith("upload rejected: ")
    assert reason in failure.reason
    json.dumps([record.to_json() for record in strategy.history], allow_nan=False)


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("line one\n" + "x" * 100_000, 8, ("line one; " + "x" * LONGEST)[:LONGEST]),
        ("", 7, "error code 7"),
        ("  \n ", 7, "error code 7"),
        (
            'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: the reason\n',
            8,
            "ValueError: the reason",
        ),
        ("\x1b[2J\x1b]0;title\x07 gone\r\x9b1A", 2, "]0;title gone; 1A"),  # steers no terminal
    ],
    ids=["long", "empty", "blank", "traceback", "control characters"],
)
def test_formats_error_replies_as_one_short_line(text: str, code: int, reason: str) -> None:
    asked = Message(RecordDict(), dst_node_id=100, message_type="train")
    strategy = poisoned_round("mean", flower_error(text, code)(asked, lambda: asked))
    assert plain(strategy.history[0].failures) == [{"client": 2, "reason": reason}]


def test_exception_in_validation_rejects_one_upload_only() -> None:
    """Whatever validation raises on what one client sent, the round goes on with the others."""
    validate = Pipeline.validate

    def faulty(self: Pipeline, upload: Prototypes, state: Any, task: Task) -> None:
        validate(self, upload, state, task)
        if bool(upload.present[0]):
            raise KeyError("no such\nthing")

    with patch.object(Pipeline, "validate", faulty):
        strategy = poisoned_round("mean", reply_of(prototypes(2, [1])))
    (failure,) = strategy.history[0].failures
    assert failure.client == 0
    assert failure.reason.startswith("upload rejected: KeyError: 'no such\\nthing' (test_replies.py:")
    assert strategy.history[0].trained == [1, 2, 3]


# Late replies ------------------------------------------------------------------------------------------------


def rows_of(rows: dict[int, float]) -> Prototypes:
    values, present = torch.zeros(4, 6), torch.zeros(4, dtype=torch.bool)
    for label, value in rows.items():
        values[label], present[label] = value, True
    return Prototypes(values, present)


TIMEOUT = 10.0  # of a round; every reply takes a second


def arrives_after(rounds: int) -> float:
    """Seconds until a reply that misses the deadline arrives: at once, or within so many further rounds."""
    return TIMEOUT + max(0.0, rounds - 0.5)


def straggling(
    late: Mapping[tuple[int, int], float],
    rounds: int,
    answers: Callable[[int, int], RecordDict | Message] | None = None,
    **keys: Scalar,
) -> tuple[MethodStrategy, InProcessGrid]:
    """Run three clients of which some answer late: client c sends c + 1 for class 0 (and client 2 for class 3), ten
    times as much a round later.

    Args:
        late: (client, round) -> seconds until its reply arrives.
        rounds: of the run.
        answers: other replies.
    """

    def answer(client: int, server_round: int) -> RecordDict:
        value = (client + 1.0) * 10.0 ** (server_round - 1)
        report = Report(10, 4, server_round, {"head": 2}, 0.5, round=server_round)
        return reply_of(rows_of({0: value, 3: value} if client == 2 else {0: value}), report)

    base = {"num-clients": 3, "num-server-rounds": rounds, "feature-dim": 6, "join-timeout": 0.2}
    more = {key.replace("_", "-"): value for key, value in keys.items()}
    strategy = MethodStrategy(parse({**base, "round-timeout": TIMEOUT, **more}, SECTIONS))
    faults = {when: delayed(seconds) for when, seconds in late.items()}
    grid = InProcessGrid(scripted(TASK, answers or answer), {}, 3, faults=faults, seconds=1.0)
    strategy.start(grid)
    return strategy, grid


def asked(grid: InProcessGrid, server_round: int) -> list[int]:
    """Return the clients that were asked to train in a round, once for every time."""
    return [client for client, number, kind in grid.asked if (number, kind) == (server_round, "train")]


DISCARDED = "client 2: its reply to round 1 came too late and is discarded"


def test_late_reply_does_not_count_in_a_later_round() -> None:
    strategy, grid = straggling({(2, 1): arrives_after(0)}, 2)
    assert asked(grid, 1) == asked(grid, 2) == [0, 1, 2]
    first, second = strategy.history
    assert first.trained == [0, 1]
    assert first.failures[0].client == 2
    assert second.warnings == [DISCARDED]
    assert second.trained == [0, 1, 2]
    assert float(strategy.state.broadcast.values[0, 0]) == 20.0  # (10 + 20 + 30)/3


def test_client_with_overdue_reply_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    strategy, grid = straggling({(2, 1): arrives_after(1)}, 3)
    assert [asked(grid, number) for number in (1, 2, 3)] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    second = strategy.history[1]
    assert plain(second.failures) == [{"client": 2, "reason": "still busy with round 1"}]
    assert second.warnings == [DISCARDED]
    assert f"round 2: {DISCARDED}" in caplog.messages
    assert second.ages == [0, -1, -1, -1], "its class is not among the others'"
    assert float(strategy.state.broadcast.values[0, 0]) == 200.0  # (100 + 200 + 300)/3


def test_bytes_of_a_late_reply_are_counted() -> None:
    """They were sent, although the upload is discarded."""
    in_time, _ = straggling({}, 2)
    late, _ = straggling({(2, 1): arrives_after(1)}, 2)
    assert late.history[0].bytes_up.payload < in_time.history[0].bytes_up.payload
    assert late.history[1].bytes_up.payload == in_time.history[1].bytes_up.payload


@pytest.mark.parametrize("error", [False, True])
def test_late_rubbish_is_discarded_too(error: bool) -> None:
    """The reply to round 1 comes in round 2: not a payload, without a report; or an error, which is not named again."""

    def answer(client: int, server_round: int) -> RecordDict | Message:
        if (client, server_round) != (2, 1):
            return reply_of(rows_of({0: 1.0}), Report(10, 4, server_round, round=server_round))
        question = Message(RecordDict(), dst_node_id=102, message_type="train")
        return flower_error("no", 8)(question, lambda: question) if error else RecordDict()

    strategy, grid = straggling({(2, 1): arrives_after(1)}, 3, answer)
    assert strategy.history[1].warnings == ([] if error else [DISCARDED])
    assert asked(grid, 3) == strategy.history[2].trained == [0, 1, 2]


@pytest.mark.parametrize("number", [1, 3])
def test_upload_of_another_round_is_rejected(number: int) -> None:
    def answer(client: int, server_round: int) -> RecordDict:
        sent = number if (client, server_round) == (2, 2) else server_round
        return reply_of(rows_of({0: 1.0}), Report(10, 4, server_round, {"head": 2}, 0.5, round=sent))

    strategy, _ = straggling({}, 3, answer)
    reason = f"sent its upload of round {number} instead of round 2"
    assert plain(strategy.history[1].failures) == [{"client": 2, "reason": reason}]
    assert [record.trained for record in strategy.history] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_silent_client_is_asked_again_after_some_rounds() -> None:
    strategy, grid = straggling({(2, 1): math.inf}, 2 + MAX_OVERDUE_ROUNDS)
    rounds = range(1, 3 + MAX_OVERDUE_ROUNDS)
    assert [2 in asked(grid, n) for n in rounds] == [True] + [False] * (MAX_OVERDUE_ROUNDS - 1) + [True] * 2
    assert strategy.history[-1].trained == [0, 1, 2]


@pytest.mark.parametrize("rounds", [MAX_OVERDUE_ROUNDS, MAX_OVERDUE_ROUNDS + 2])
def test_reply_of_a_client_that_was_asked_again_is_named_however_late(rounds: int) -> None:
    late, grid = straggling({(2, 1): arrives_after(rounds)}, 3 + MAX_OVERDUE_ROUNDS)
    lines = late.history
    assert asked(grid, 1 + MAX_OVERDUE_ROUNDS) == lines[MAX_OVERDUE_ROUNDS].trained == [0, 1, 2]
    assert [line.round for line in lines if DISCARDED in line.warnings] == [1 + rounds]
    in_time, _ = straggling({}, 3 + MAX_OVERDUE_ROUNDS)
    sent, expected = lines[rounds].bytes_up.payload, in_time.history[rounds].bytes_up.payload
    assert sent == expected + in_time.history[0].bytes_up.payload - lines[0].bytes_up.payload


def test_late_reply_is_named_in_the_record_of_a_repeated_round() -> None:
    """Client 2's answer to round 1 comes in the first try of round 2, in which the server loses the others."""
    lost = 2

    def answer(client: int, server_round: int) -> RecordDict | Message:
        nonlocal lost
        if server_round == 2 and client < 2 and lost:
            lost -= 1
            question = Message(RecordDict(), dst_node_id=100 + client, message_type="train")
            return Message(Error(code=ErrorCode.NODE_UNAVAILABLE, reason="lost"), reply_to=question)
        report = Report(10, 4, server_round, {"head": 2}, 0.5, round=server_round)
        return reply_of(rows_of({0: 10.0 ** (server_round - 1)}), report)

    late = {(2, 1): arrives_after(1), (2, 2): math.inf}
    strategy, grid = straggling(late, 2, answer)
    assert (asked(grid, 1), asked(grid, 2)) == ([0, 1, 2], [0, 1, 0, 1, 2])
    line = strategy.history[1]
    assert line.trained == [0, 1]
    assert sorted(line.warnings) == [DISCARDED, REPEATED]
    assert float(strategy.state.broadcast.values[0, 0]) == 10.0


def test_warns_once_of_class_not_sent_for_ten_rounds() -> None:
    def answer(client: int, server_round: int) -> RecordDict:
        sent = rows_of({0: 1.0, 2: 1.0} if server_round == 1 else {0: 1.0})
        return reply_of(sent, Report(10, 4, server_round))

    config = {"num-clients": 1, "num-server-rounds": 13, "feature-dim": 6}
    strategy = MethodStrategy(parse(config, SECTIONS))
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 1))
    messages = [(line.round, note) for line in strategy.history for note in line.warnings]
    assert messages == [(11, "no client sent these classes for 10 rounds or more: 2")]
    assert strategy.history[-1].ages == [0, -1, 12, -1]
