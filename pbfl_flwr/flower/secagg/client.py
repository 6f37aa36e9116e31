"""A client's training under secure aggregation: Flower's SecAgg+ mod around the train handler."""

from __future__ import annotations

import json
from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.common import FitRes, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.common.typing import Code, Status
from flwr.compat.common import recorddict_compat as compat

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.device import identify
from pbfl_flwr.flower.client.session import ClientSource
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report, plain
from pbfl_flwr.flower.secagg.messages import REPORT, summing
from pbfl_flwr.methods import build_method
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes import secure_sums as sums

FITINS, CONFIG = "fitins.parameters", "fitins.config"  # records of a training message

Train = Callable[[Message, Context, ClientSource], Message]


def train_masked(message: Message, context: Context, source: ClientSource, train: Train) -> Message:
    """Answer a stage of the protocol; in one of them the client trains.

    Raises:
        PbflError: if the message is of another kind, so that the upload would not be masked.
    """
    if RECORD_KEY_CONFIGS not in message.content.config_records:
        raise PbflError("secure-aggregation = true, but the server requested an unmasked upload")
    return secaggplus_mod(message, context, lambda inner, state: _train(inner, state, source, train))


def _train(message: Message, context: Context, source: ClientSource, train: Train) -> Message:
    """Reply to FitIns with FitRes, whose parameters are the vector to be masked next."""
    config = message.content.config_records[CONFIG]
    broadcast = message.content.array_records[FITINS].items()
    # Without the empty array that stands for none.
    payload = ArrayRecord({key: array for key, array in broadcast if key != compat.EMPTY_TENSOR_KEY})
    message.content = wire.content(payload, config=ConfigRecord({**config}))
    reply = train(message, context, source)
    if reply.has_error():  # an injected fault
        raise PbflError(reply.error.reason or "no answer")
    content = reply.content
    report, upload = content.metric_records[wire.METRICS], content.array_records[wire.PAYLOAD]
    number = int(str(config["round"]))
    if (uploaded := Report.from_record(report).round) != number:  # the server could not detect this in a sum
        raise PbflError(f"sent its upload of round {uploaded} instead of round {number}")
    settings = source.settings_of(context)
    data = source.data_of(settings, identify(context, settings, str(config["experiment"])))
    method, task = build_method(settings), data.task(settings.models.feature_dim)
    decoded = wire.decode(upload, method.up, task)
    assert isinstance(decoded, Prototypes), "only methods whose uploads are prototypes can be summed"
    vector, clipped = sums.to_vector(decoded, summing(method).bound)
    if clipped:
        report["secure-clipped"] = float(clipped)
    # num_examples is 1, since sums are unweighted and methods send n_i in their payload.
    result = FitRes(
        Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, {REPORT: json.dumps(plain(report))}
    )
    return Message(compat.fitres_to_recorddict(result, True), reply_to=message)
