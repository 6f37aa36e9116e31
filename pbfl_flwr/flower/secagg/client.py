"""A client's training under secure aggregation: Flower's SecAgg+ mod around the train handler."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.device import identify
from pbfl_flwr.flower.client.session import ClientSource
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.secagg.messages import CONFIG, FITINS, fit_result, payload_of, to_be_masked
from pbfl_flwr.methods import build_method

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
    payload = payload_of(message.content.array_records[FITINS])
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
    parameters, clipped = to_be_masked(wire.decode(upload, method.up, task), method)
    if clipped:
        report["secure-clipped"] = float(clipped)
    result = fit_result(parameters, report)
    return Message(fitres_to_recorddict(result, True), reply_to=message)
