"""The records of a run as Flower's results."""

from __future__ import annotations

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from pbfl_flwr.errors import PbflError
from pbfl_flwr.runs.records import Accuracies, RoundRecord


def add_to(result: Result, record: RoundRecord, arrays: ArrayRecord) -> None:
    """Add a round, and the broadcast after it, to Flower's result of the run."""
    result.arrays = arrays
    result.train_metrics_clientapp[record.round] = train_metrics(record)
    if record.final is not None:
        result.evaluate_metrics_clientapp[record.round] = _accuracy_metrics(record.final)


def add_metrics(result: Result, number: int, metrics: object) -> None:
    """Add what ``evaluate_fn`` returned after a round, unless it is None.

    Raises:
        PbflError: if it is no MetricRecord.
    """
    if isinstance(metrics, MetricRecord):
        result.evaluate_metrics_serverapp[number] = metrics
    elif metrics is not None:
        raise PbflError(
            f"evaluate_fn returned {str(metrics)[:100]!r} of type {type(metrics).__name__}; must be a MetricRecord or "
            "None"
        )


def train_metrics(record: RoundRecord) -> MetricRecord:
    """Return the bytes and accuracies of a round."""
    sizes = {"bytes-up": record.bytes_up.total, "bytes-down": record.bytes_down.total}
    return MetricRecord({**sizes, **_accuracy_metrics(record)})


def _accuracy_metrics(scores: Accuracies) -> MetricRecord:
    return MetricRecord({f"accuracy-{name}": of.weighted for name, of in scores.accuracy.items()})
