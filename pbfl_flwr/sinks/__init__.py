"""Metric sinks beside the run's own JSONL: TensorBoard, Weights & Biases, MLflow, Prometheus. Server side only.

A sink is a class made with ``(run_dir, about)``, the run's directory and record, and one entry of :data:`SINKS`. The
JSONL is the record and sinks are copies for convenience, so one that cannot be opened or fails during a run is dropped
with a warning, and one that waits for a server gives up after about half a minute.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Protocol

from pbfl_flwr.config import comma_list
from pbfl_flwr.errors import PbflError, printable
from pbfl_flwr.runs.records import Record, RoundRecord, RunRecord
from pbfl_flwr.util.addresses import split_address
from pbfl_flwr.util.extras import lacking

Metrics = dict[str, float]
Ending = Literal["finished", "failed", "killed"]
"""How a run ends: with its last round, by an error, or because it was interrupted."""


class Sink(Protocol):
    """Receives metrics. Its location depends on run_dir and about alone, so a resumed run continues in it."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; steps never decrease."""

    def close(self, ending: Ending) -> None:
        """Flush and close, with how the run ends."""


SINKS = {  # name, which is also the extra that installs its library -> library, class
    "tensorboard": ("tensorboard", "pbfl_flwr.sinks.tensorboard:TensorBoard"),
    "wandb": ("wandb", "pbfl_flwr.sinks.weights_and_biases:WeightsAndBiases"),
    "mlflow": ("mlflow", "pbfl_flwr.sinks.mlflow_store:Mlflow"),
    "prometheus": ("prometheus_client", "pbfl_flwr.sinks.prometheus:Prometheus"),
}

KINDS = {  # of failures, by what their reason begins with
    "upload rejected": "rejected",
    "no answer": "timeout",
    "its node is not connected": "disconnected",
    "Error: Node Unavailable": "disconnected",
}
OTHER_KIND = "error"


def names(sinks: str) -> list[str]:
    """Return the entries of the run-config key ``sinks``, each once."""
    return list(dict.fromkeys(comma_list(sinks)))


def check(sinks: str) -> None:
    """Check before a run that the sinks in a comma list exist, their libraries are installed and their addresses valid.

    Raises:
        PbflError: one line per sink that does not exist, whose library is not installed here, or whose address is none.
    """
    problems = []
    for name in names(sinks):
        if name not in SINKS:
            problems.append(f"sinks = '{sinks}': unknown sink '{name}'; must be one of {', '.join(SINKS)}")
        elif line := lacking(f"sinks = '{sinks}' on the server", SINKS[name][0]):
            problems.append(line)
        elif name == "prometheus":
            try:
                prometheus_address()
            except PbflError as error:
                problems.append(str(error))
    if problems:
        raise PbflError("\n".join(problems))


def prometheus_address() -> tuple[str, int]:
    """Return host and port at which the sink ``prometheus`` serves, those of PBFL_PROMETHEUS if it is set.

    Raises:
        PbflError: if it is not HOST:PORT.
    """
    return split_address(os.environ.get("PBFL_PROMETHEUS", "127.0.0.1:9464"), "PBFL_PROMETHEUS =")


class Sinks:
    """The sinks of a run, a comma list.

    Attributes:
        left_out: a warning for every sink that cannot be opened.

    Raises:
        PbflError: as :func:`check`.
    """

    def __init__(self, sinks: str, run_dir: Path, about: RunRecord) -> None:
        check(sinks)
        self._open: dict[str, Sink] = {}
        self.left_out: list[str] = []
        for name in names(sinks):
            try:
                self._open[name] = resolve_name(SINKS[name][1])(run_dir, about)  # imports the library
            except Exception as error:  # third-party libraries may raise anything
                self.left_out.append(f"sink {name} cannot be opened and is left out: {_text(error)}")

    def log(self, record: RoundRecord) -> list[str]:
        """Log a round of the run in all sinks.

        Returns:
            A warning for every sink that failed, which is then dropped.
        """
        entries = steps(record)

        def log_all(sink: Sink) -> None:
            for step, metrics in entries:
                sink.log(step, metrics)

        return self._each(log_all)

    def close(self, ending: Ending) -> list[str]:
        """Close all; returns warnings as :meth:`log` does."""
        return self._each(lambda sink: sink.close(ending))

    def _each(self, do: Callable[[Sink], None]) -> list[str]:
        warnings = []
        for name, sink in list(self._open.items()):
            try:
                do(sink)
            except Exception as error:  # a full disk or a lost server must not end the run
                del self._open[name]
                warnings.append(f"sink {name} failed and is not used any more: {_text(error)}")
        return warnings


def steps(record: RoundRecord) -> list[tuple[int, Metrics]]:
    """Return (step, metrics) of a round, steps ascending; a step is a number of finished rounds.

    If clients are scored before training, a record's accuracies and loss belong to the previous step, and the last
    record holds the last step's accuracies as ``final``.
    """
    scored = record.accuracy_of_round
    entries: list[tuple[int, str, Any]] = [
        (scored, "accuracy", record.accuracy),
        (scored, "validation", record.validation),
        (scored, "test-loss", record.test_loss),
        (record.round, "clients", record.client_metrics),
        (record.round, "server", record.server_metrics),
        (record.round, "bytes/up", record.bytes_up),
        (record.round, "bytes/down", record.bytes_down),
        (record.round, "scalars", record.scalars),
        (record.round, "seconds", record.seconds),
        (record.round, "peak-mb", record.peak_mb),
        (record.round, "gpu-mb", record.gpu_mb or None),
        (record.round, "trained", len(record.trained)),
        (record.round, "failures", len(record.failures)),
        (record.round, "failures-by-kind", Counter(kind_of(failure.reason) for failure in record.failures)),
        (record.round, "joined", len(record.joined) or None),
    ]
    if record.final is not None:
        entries.append((record.round, "accuracy", record.final.accuracy))
        entries.append((record.round, "validation", record.final.validation))
    by_step: dict[int, Metrics] = {}
    for step, name, value in entries:
        by_step.setdefault(step, {}).update(_flat(name, value))
    return sorted((step, metrics) for step, metrics in by_step.items() if metrics)


def kind_of(reason: str) -> str:
    """Return the kind of a failure: "rejected", "timeout", "disconnected" or "error"."""
    return next((kind for start, kind in KINDS.items() if reason.startswith(start)), OTHER_KIND)


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Record):
        value = value.model_dump()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}/{_name(str(key))}", inner)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)


def _name(key: str) -> str:
    """Return a metric's name, which may come from a device, such that every sink takes it.

    MLflow refuses other characters, and makes a file of a name, which "." and ".." cannot be, nor "a" beside "a/b".
    """
    allowed = re.sub(r"[^\w. -]", "_", printable(key).replace("/", ".")).strip()
    return allowed if allowed.strip(".") else "_"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(printable(str(error)).split())[:200]}"
