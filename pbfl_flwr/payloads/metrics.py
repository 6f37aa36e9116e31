"""Names in a client's report: of its lists, and of the method's metrics beside them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pbfl_flwr.errors import PbflError, printable

MAX_ENTRIES = 100  # of one report: lists and metrics
MAX_NAME = 100  # characters of a metric's name


class Part(StrEnum):
    """The lists in a report's record, beside its metrics; every letter of a key costs a byte in every reply.

    Their layout is that of :class:`pbfl_flwr.flower.messages.report.Report`.
    """

    COUNTERS = "n"  # num_train, num_test, participations, round
    CORRECT = "c"  # by predictor, -1 if it was not available
    TIMES = "t"  # test_loss, seconds of every step, peak_mb
    VALIDATION = "v"  # samples, then as CORRECT
    BY_CLASS = "k"  # a table
    GPU = "g"  # gpu_mb
    AREAS = "a"  # macro and micro of every available predictor, -1 if undefined


def check_metrics(metrics: Mapping[str, object]) -> None:
    """Check that metrics can be sent in a report.

    Raises:
        PbflError: if there are too many, or naming the metric, if its name is that of a list or cannot be shown, or if
            it is not a number, or a whole one of more than 64 bits.
    """
    if len(metrics) > (most := MAX_ENTRIES - len(Part)):
        raise PbflError(f"metrics are {len(metrics)}; must be at most {most}")
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or name != printable(name):
            raise PbflError(
                f"metric {ascii(name)[:40]} must have a printable name of 1 to {MAX_NAME} characters"
            )
        if name in {*Part}:
            raise PbflError(f"metric '{name}' must have another name than {', '.join(Part)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PbflError(f"metric '{name}' is of type {type(value).__name__}; must be a number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise PbflError(f"metric '{name}' is a whole number of more than 64 bits; must be a float")
