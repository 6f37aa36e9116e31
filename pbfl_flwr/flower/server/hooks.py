"""What Flower sees of a strategy: its hooks, for a loop other than ours, and its records of results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.phase import Phase
from pbfl_flwr.runs.records import Accuracies, RoundRecord


class Hooks(Strategy):
    """Flower's hooks for a loop other than :meth:`MethodStrategy.start`, over the functions of that class."""

    _phase: Phase | None = None  # of configure_train, for aggregate_train

    @abstractmethod
    def next_phase(self, grid: Grid, number: int) -> Phase:
        """Return the messages of a round."""

    @abstractmethod
    def close_phase(self, phase: Phase, messages: list[Message]) -> RoundRecord:
        """Read and check the replies, aggregate, and commit the round."""

    @abstractmethod
    def next_arrays(self) -> ArrayRecord:
        """Return the next broadcast to the first client as bytes."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return training messages for the sampled clients and evaluation messages for (some of) the others."""
        self._phase = self.next_phase(grid, server_round)
        return [message for message, _ in self._phase.messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Drop and log invalid replies, aggregate the rest, and commit the round.

        Raises:
            RunEnded: see :meth:`MethodStrategy.start`; nothing has changed then.
        """
        if self._phase is None:
            raise RuntimeError("configure_train comes first")
        record = self.close_phase(self._phase, list(replies))
        return self.next_arrays(), _train_metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: clients are scored in the training phase."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, since nobody is asked."""
        return None


def add_to(result: Result, record: RoundRecord, arrays: ArrayRecord) -> None:
    """Add a round, and the broadcast after it, to Flower's result of the run."""
    result.arrays = arrays
    result.train_metrics_clientapp[record.round] = _train_metrics(record)
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


def _train_metrics(record: RoundRecord) -> MetricRecord:
    sizes = {"bytes-up": record.bytes_up.total, "bytes-down": record.bytes_down.total}
    return MetricRecord({**sizes, **_accuracy_metrics(record)})


def _accuracy_metrics(scores: Accuracies) -> MetricRecord:
    return MetricRecord({f"accuracy-{name}": of.weighted for name, of in scores.accuracy.items()})
