"""What a client says about its round beside the payload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import MetricRecord

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.payloads import MAX_COUNT, RejectedPayload, Reveal

SPENT = ("data", "open", "fit", "evaluate", "save")  # data: its own shards; open: network, state and settings
MAX_METRICS = 100  # of one report
MAX_NAME = 100  # characters of a metric's name
_LARGEST_FLOAT = 1e40  # beyond float32: no loss, no time and no memory is that large

REVEALS = tuple(  # what the report tells the server
    Reveal(what, how, "client-report = 'none'", message="report")
    for what, how in (
        ("number of training and test samples", "every round"),
        ("accuracies and test loss", "of every predictor: how easy the client's data is"),
        ("training losses", "the mean of every term, and what else the method reports"),
        ("timings and memory", "they grow with the number of samples and tell the hardware"),
    )
)


@dataclass(frozen=True)
class Report:
    """What a client says about its round beside the payload: counters, never samples.

    Attributes:
        num_train, num_test: samples.
        participations: rounds this client has trained in, this one included.
        correct: predictor -> correctly predicted test samples; only predictors that could be asked.
        test_loss: mean cross-entropy on the test samples.
        seconds: what the client spent its time on, in the order of SPENT.
        peak_mb: the worker's peak resident memory.
        metrics: what the method reports.
        num_validation: samples held out for validation.
        validation: predictor -> correctly predicted ones of them; None without any.
        round: whose upload this is; 0 where nothing was trained.
        other: predictor -> correctly predicted test samples at the other moment (before training instead of after it,
            or the other way round); None where the client was not scored twice.
    """

    num_train: int
    num_test: int
    participations: int = 0
    correct: Mapping[str, int] | None = None
    test_loss: float = 0.0
    seconds: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    peak_mb: float = 0.0
    metrics: Mapping[str, float] | None = None
    num_validation: int = 0
    validation: Mapping[str, int] | None = None
    round: int = 0
    other: Mapping[str, int] | None = None

    def to_record(self) -> MetricRecord:
        """Return the compact record: lists with a fixed layout, since every key costs bytes."""
        fixed: dict[str, float | list[int] | list[float]] = {
            "n": [self.num_train, self.num_test, self.participations, self.round],
            "c": _in_order(self.correct),
            "t": [self.test_loss, *self.seconds, self.peak_mb],
        }
        if self.num_validation:
            fixed["v"] = [self.num_validation, *_in_order(self.validation)]
        if self.other is not None:
            fixed["o"] = _in_order(self.other)
        return MetricRecord({**(self.metrics or {}), **fixed})

    @classmethod
    def from_record(cls, record: MetricRecord) -> Report:
        """Rebuild a report.

        Raises:
            RejectedPayload: if a field is missing or of a wrong length, or a counter contradicts another.
        """
        num_train, num_test, participations, number = (int(value) for value in _list(record, "n", 4))
        correct = [int(value) for value in _list(record, "c", len(PREDICTORS))]
        held_out = _list(record, "v", 1 + len(PREDICTORS)) if "v" in record else [0] * (1 + len(PREDICTORS))
        num_validation, *validated = (int(value) for value in held_out)
        other = [int(value) for value in _list(record, "o", len(PREDICTORS))] if "o" in record else None
        loss, data, opened, fitted, evaluated, saved, peak_mb = _list(record, "t", 7)
        counters = (num_train, num_test, participations, num_validation, number)
        if min(counters) < 0 or max(correct + (other or [])) > num_test or max(validated) > num_validation:
            raise RejectedPayload("its counters contradict each other")
        if max(counters) >= MAX_COUNT:
            raise RejectedPayload(f"its report counts {max(counters)} samples")
        if len(record) > MAX_METRICS:
            raise RejectedPayload(f"its report has {len(record)} entries, allowed are {MAX_METRICS}")
        if (longest := max(map(len, record))) > MAX_NAME:
            raise RejectedPayload(f"its report has a name of {longest} characters, allowed are {MAX_NAME}")
        scored, by_validation = _named(correct), _named(validated) if num_validation else None
        metrics = {key: _checked(key, value) for key, value in record.items() if not isinstance(value, list)}
        seconds = (data, opened, fitted, evaluated, saved)
        return cls(
            num_train,
            num_test,
            participations,
            scored,
            loss,
            seconds,
            peak_mb,
            metrics,
            num_validation,
            by_validation,
            number,
            None if other is None else _named(other),
        )


def plain(record: MetricRecord) -> dict[str, float | list[float]]:
    """Return a record as JSON can hold it."""
    return {key: [*value] if isinstance(value, list) else value for key, value in record.items()}


def seconds_in(record: MetricRecord) -> float:
    """Return all that a client says it has spent on a round, 0 where that cannot be read."""
    try:
        return sum(Report.from_record(record).seconds)
    except RejectedPayload:
        return 0.0


def _in_order(correct: Mapping[str, int] | None) -> list[int]:
    return [(correct or {}).get(name, -1) for name in PREDICTORS]


def _named(correct: list[int]) -> dict[str, int]:
    return {name: value for name, value in zip(PREDICTORS, correct, strict=True) if value >= 0}


def _list(record: MetricRecord, key: str, length: int) -> list[float]:
    values = record.get(key)
    if not isinstance(values, list) or len(values) != length:
        raise RejectedPayload(f"its report lacks '{key}' of length {length}")
    return [_checked(key, value) for value in values]


def _checked(key: str, value: float) -> float:
    # Python compares whole numbers of any size, and NaN with nothing.
    if not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:
        found = value if isinstance(value, float) and not math.isfinite(value) else "a number beyond 1e40"
        raise RejectedPayload(f"its report holds {found} in '{key[:40]}'")
    return float(value)
