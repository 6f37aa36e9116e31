"""A client's report on its round: counters and metrics sent along with the payload."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from pbfl_flwr.config import PREDICTORS, EvaluationSettings, in_order
from pbfl_flwr.errors import printable
from pbfl_flwr.payloads import MAX_COUNT, RejectedPayload
from pbfl_flwr.payloads.metrics import MAX_ENTRIES, MAX_NAME, Part, check_metrics
from pbfl_flwr.task import Task
from pbfl_flwr.training.class_metrics import Areas, ByClass

# Timed steps: data loads shards; open network, state, settings.
SPENT = ("data", "open", "fit", "evaluate", "save")

LENGTHS = {
    Part.COUNTERS: 4,
    Part.TIMES: 2 + len(SPENT),
    Part.GPU: 1,
}
"""Of the lists whose length depends on neither K nor the predictors."""
Table = NDArray[np.int64]
_LARGEST_FLOAT = 1e40  # beyond float32; no valid loss, time or memory size is that large


@dataclass(frozen=True)
class Requested:
    """What reports must hold beside totals.

    Attributes:
        classes: K if test samples must be counted by class, else 0.
        areas: whether areas under the ROC curve must be there.
        scores: whether clients are scored at all; if not, what they report of scores is ignored.
        predictors: see :func:`reported`.
    """

    classes: int = 0
    areas: bool = False
    scores: bool = True
    predictors: tuple[str, ...] = PREDICTORS


TOTALS = Requested()


@dataclass(frozen=True)
class Report:
    """A client's report on its round: counters and metrics, never samples.

    Attributes:
        num_train, num_test: numbers of samples.
        participations: rounds this client has trained in, including this one; 0 if it keeps no count.
        correct: predictor -> number of correct test samples; only predictors that were available.
        test_loss: mean cross-entropy on the test samples.
        seconds: time spent on each step of SPENT, by name; none for a step that is missing.
        peak_mb: the process's peak resident memory.
        metrics: of the method.
        num_validation: number of samples held out for validation.
        validation: predictor -> number of correct validation samples; None without any.
        round: of the upload; 0 if the client did not train.
        by_class: the test samples counted by class, for every predictor in ``correct``; None if not requested.
        gpu_mb: peak GPU memory reserved by torch in the process; 0 if it uses no GPU.
        areas: predictor -> areas under the ROC curve, for every predictor in ``correct``; None if not requested.
        predictors: the names that have a place in the lists, see :func:`reported`.
    """

    num_train: int
    num_test: int
    participations: int = 0
    correct: Mapping[str, int] | None = None
    test_loss: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(SPENT, 0.0))
    peak_mb: float = 0.0
    metrics: Mapping[str, float] | None = None
    num_validation: int = 0
    validation: Mapping[str, int] | None = None
    round: int = 0
    by_class: ByClass | None = None
    gpu_mb: float = 0.0
    areas: Mapping[str, Areas] | None = None
    predictors: tuple[str, ...] = PREDICTORS

    def to_record(self) -> MetricRecord:
        """Return the record in a compact form: lists with a fixed layout, since every key costs bytes.

        Raises:
            PbflError: if a metric cannot be sent, see :func:`~pbfl_flwr.payloads.metrics.check_metrics`.
        """
        seconds = [self.seconds.get(step, 0.0) for step in SPENT]
        fixed: dict[Part, list[int] | list[float]] = {
            Part.COUNTERS: [self.num_train, self.num_test, self.participations, self.round],
            Part.CORRECT: self._places(self.correct),
            Part.TIMES: [self.test_loss, *seconds, self.peak_mb],
        }
        if self.num_validation:
            fixed[Part.VALIDATION] = [self.num_validation, *self._places(self.validation)]
        if self.by_class is not None:
            fixed[Part.BY_CLASS] = [*self.by_class.tested, *_rows(self.by_class, self.predictors)]
        if self.gpu_mb:
            fixed[Part.GPU] = [self.gpu_mb]
        if self.areas:
            pairs = [self.areas[name] for name in self.predictors if name in self.areas]
            fixed[Part.AREAS] = [
                -1.0 if area is None else area for pair in pairs for area in (pair.macro, pair.micro)
            ]
        metrics = self.metrics or {}
        check_metrics(metrics)
        return MetricRecord({**metrics, **{part.value: values for part, values in fixed.items()}})

    def _places(self, correct: Mapping[str, int] | None) -> list[int]:
        return [(correct or {}).get(name, -1) for name in self.predictors]

    @classmethod
    def from_record(cls, record: MetricRecord, requested: Requested = TOTALS) -> Report:
        """Rebuild a report.

        What is there beside totals but was not requested is ignored.

        Raises:
            RejectedPayload: if a field is missing or of a wrong length, or a counter contradicts another.
        """
        num_train, num_test, participations, number = (int(value) for value in _list(record, Part.COUNTERS))
        names = requested.predictors
        correct = [int(value) for value in _list(record, Part.CORRECT, len(names))]
        none = [0.0] * (1 + len(names))
        held_out = _list(record, Part.VALIDATION, len(none)) if Part.VALIDATION in record else none
        num_validation, *validated = (int(value) for value in held_out)
        loss, *seconds, peak_mb = _list(record, Part.TIMES)
        counters = (num_train, num_test, participations, num_validation, number)
        if min(counters) < 0 or max(correct) > num_test or max(validated) > num_validation:
            raise RejectedPayload("its counters contradict each other")
        if max(counters) >= MAX_COUNT:
            raise RejectedPayload(f"its report counts {max(counters)} samples")
        if len(record) > MAX_ENTRIES:
            raise RejectedPayload(f"its report has {len(record)} entries, must be at most {MAX_ENTRIES}")
        if (longest := max(map(len, record))) > MAX_NAME:
            raise RejectedPayload(
                f"its report has a name of {longest} characters, must be at most {MAX_NAME}"
            )
        if hidden := [name for name in record if not name or name != printable(name)]:
            raise RejectedPayload(f"its report has a name that cannot be printed: {hidden[0]!a}")
        scored, by_validation = _named(correct, names), _named(validated, names) if num_validation else None
        if not requested.scores:
            scored, by_validation, loss = {}, None, 0.0
        metrics = {key: _checked(key, value) for key, value in record.items() if not isinstance(value, list)}
        by_class = _by_class(record, requested.classes, num_test, scored) if requested.classes else None
        return cls(
            num_train,
            num_test,
            participations,
            scored,
            loss,
            dict(zip(SPENT, seconds, strict=True)),
            peak_mb,
            metrics,
            num_validation,
            by_validation,
            number,
            by_class,
            _list(record, Part.GPU)[0] if Part.GPU in record else 0.0,
            _areas(record, scored) if requested.areas and num_test and scored else None,
            names,
        )


def reported(predicts: Iterable[str]) -> tuple[str, ...]:
    """Return the predictors that have a place in reports, in order: PREDICTORS, then a method's own ones by name.

    ``predicts`` are those of the method, which client and server know, so that names need not travel.
    """
    return in_order([*PREDICTORS, *predicts])


def requested(
    evaluation: EvaluationSettings, task: Task, predicts: Iterable[str] = (), scored: bool = True
) -> Requested:
    """Return what reports must hold under this configuration.

    Args:
        evaluation: of the run.
        task: of the run.
        predicts: the method's predictors.
        scored: whether clients are scored.
    """
    predictors = reported(predicts)
    if not scored:
        return Requested(scores=False, predictors=predictors)
    return Requested(task.num_classes if evaluation.per_class else 0, evaluation.auc, predictors=predictors)


def plain(record: MetricRecord) -> dict[str, float | list[float]]:
    """Return a record as values that can be written as JSON."""
    return {key: [*value] if isinstance(value, list) else value for key, value in record.items()}


def seconds_in(record: MetricRecord) -> float:
    """Return the total time of a client's round according to its report, 0 if its times are invalid."""
    try:
        _, *seconds, _ = _list(record, Part.TIMES)
        return sum(seconds)
    except RejectedPayload:
        return 0.0


def _named(correct: Sequence[int], predictors: Sequence[str]) -> dict[str, int]:
    return {name: value for name, value in zip(predictors, correct, strict=True) if value >= 0}


def _rows(counts: ByClass, predictors: Sequence[str]) -> list[int]:
    """Return the K counts of R and the K counts of A for every predictor, concatenated."""
    names = [name for name in predictors if name in counts.right]
    return [count for name in names for row in (counts.right[name], counts.answered[name]) for count in row]


def _by_class(record: MetricRecord, classes: int, num_test: int, scored: Mapping[str, int]) -> ByClass:
    """Return the counts by class, after checking that they add up to the totals in the rest of the report.

    They travel as a table (1 + 2·P, K): samples tested, then R and A of every predictor.
    """
    values, length = record.get(Part.BY_CLASS), (1 + 2 * len(scored)) * classes
    if not isinstance(values, list) or len(values) != length:
        raise RejectedPayload(f"its report lacks '{Part.BY_CLASS}' of length {length}, counts by class")
    counts = np.array(values)
    if counts.dtype.kind != "i" or not 0 <= counts.min() <= counts.max() < MAX_COUNT:
        raise RejectedPayload(f"'{Part.BY_CLASS}' of its report holds values that are not counts")
    tested, *_ = table = counts.reshape(-1, classes)
    right, answered = table[1::2], table[2::2]
    totals = list(scored.values())
    agree = tested.sum() == num_test and (answered.sum(axis=1) == num_test).all()
    agree = agree and right.sum(axis=1).tolist() == totals
    if not agree or (right > np.minimum(tested, answered)).any():
        raise RejectedPayload("its counts by class contradict the others")
    named = [dict(zip(scored, table.tolist(), strict=True)) for table in (right, answered)]
    return ByClass(tested.tolist(), *named)


def _areas(record: MetricRecord, scored: Mapping[str, int]) -> dict[str, Areas]:
    values = _list(record, Part.AREAS, 2 * len(scored))
    if max(values, default=0.0) > 1:
        raise RejectedPayload("its report holds an area under the ROC curve above 1")
    pairs = [None if value < 0 else value for value in values]
    return {
        name: Areas(*pair)
        for name, pair in zip(scored, zip(pairs[::2], pairs[1::2], strict=True), strict=True)
    }


def _list(record: MetricRecord, part: Part, length: int | None = None) -> list[float]:
    values, length = record.get(part), LENGTHS[part] if length is None else length
    if not isinstance(values, list) or len(values) != length:
        raise RejectedPayload(f"its report lacks '{part}' of length {length}")
    return [_checked(part, value) for value in values]


def _checked(key: str, value: float) -> float:
    # The comparison works for integers of any size, and is false for NaN.
    if not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:
        problem = value if isinstance(value, float) and not math.isfinite(value) else "a number beyond 1e40"
        raise RejectedPayload(f"its report holds {problem} in '{key[:40]}'")
    return float(value)
