"""What clients and the server agree on beside Flower's SecAgg+: where a report is, and which methods can be summed."""

from __future__ import annotations

from typing import Any

from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Method
from pbfl_flwr.prototypes.pipeline import Pipeline

REPORT = "report"  # key of a client's report, as JSON, in the metrics of its FitRes


def summing(method: Method[Any, Any, Any]) -> Pipeline:
    """Return the method as a pipeline, the only kind whose uploads can be summed.

    Raises:
        PbflError: if it is of another kind.
    """
    if not isinstance(method, Pipeline):
        raise PbflError(f"secure-aggregation = true: method '{method.name}' does not aggregate by a sum")
    return method
