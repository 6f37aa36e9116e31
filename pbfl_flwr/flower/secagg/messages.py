"""Messages of Flower's older interface, which its secure aggregation uses, for clients and the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.common import FitRes, Parameters, Scalar, ndarrays_to_parameters
from flwr.common.typing import Code, Status
from flwr.compat.common import recorddict_compat as compat

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages.report import TOTALS, Report, Requested, plain
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Payload, Prototypes
from pbfl_flwr.prototypes import secure_sums as sums
from pbfl_flwr.prototypes.pipeline import Pipeline

FITINS, CONFIG = "fitins.parameters", "fitins.config"  # records of a training message
REPORT = "report"


def parameters_of(record: ArrayRecord) -> Parameters:
    """Return an encoded payload as legacy parameters, with the checksum in ``tensor_type``."""
    return compat.arrayrecord_to_parameters(record, keep_input=True)


def payload_of(record: ArrayRecord) -> ArrayRecord:
    """Return the encoded payload in a record of legacy parameters, without the empty array that stands for none."""
    return ArrayRecord({key: array for key, array in record.items() if key != compat.EMPTY_TENSOR_KEY})


def report_of(metrics: Mapping[str, Scalar], requested: Requested = TOTALS) -> Report:
    """Return the report in the metrics of a client's FitRes.

    Raises:
        RejectedPayload: if it is invalid.
    """
    return Report.from_record(MetricRecord(json.loads(str(metrics[REPORT]))), requested)


def fit_result(parameters: Parameters, report: MetricRecord) -> FitRes:
    """Return a client's FitRes; num_examples is 1, since sums are unweighted and methods send n_i in their payload."""
    return FitRes(Status(Code.OK, ""), parameters, 1, {REPORT: json.dumps(plain(report))})


def summing(method: Method[Any, Any, Any]) -> Pipeline:
    """Return the method as a pipeline, the only kind whose uploads can be summed.

    Raises:
        PbflError: if it is of another kind.
    """
    if not isinstance(method, Pipeline):
        raise PbflError(f"secure-aggregation = true: method '{method.name}' does not aggregate by a sum")
    return method


def to_be_masked(upload: Payload, method: Method[Any, Any, Any]) -> tuple[Parameters, int]:
    """Return an upload as the vector that a client masks, and the number of clipped entries."""
    assert isinstance(upload, Prototypes), "only methods whose uploads are prototypes can be summed"
    vector, clipped = sums.to_vector(upload, summing(method).bound)
    return ndarrays_to_parameters([vector]), clipped
