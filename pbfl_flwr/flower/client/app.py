"""The client's side of a message: open what the client keeps, run the method, keep it, answer.

A client process may be rebuilt for every message, so everything a client must keep lies in its own directory on its
own disk. A fault in one client becomes an error reply with one readable line; it never costs another client's work.
"""

from __future__ import annotations

import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from torch.random import fork_rng

from pbfl_flwr import seeds
from pbfl_flwr.config import Settings
from pbfl_flwr.data import forget_data
from pbfl_flwr.errors import PbflError, of_full_card, pointed
from pbfl_flwr.flower.client import fault_injection
from pbfl_flwr.flower.client.device import card_given_back, identify, peak_gpu_memory
from pbfl_flwr.flower.client.hello import answer_hello, forget_trials
from pbfl_flwr.flower.client.saving import state_after_round
from pbfl_flwr.flower.client.session import (
    ClientSession,
    ClientSource,
    DataSource,
    configured_data,
    make_room,
    open_client,
    store_of,
)
from pbfl_flwr.flower.legacy import CONFIG, FITINS, fit_result, parameters_of, payload_of, to_be_masked
from pbfl_flwr.flower.memory import peak_memory
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.storage.store import ClientState
from pbfl_flwr.method import Client, Method, Moment, resolved_moment
from pbfl_flwr.methods import build_method
from pbfl_flwr.payloads import Payload, RejectedPayload
from pbfl_flwr.prototypes.attacks import attacked
from pbfl_flwr.scoring import Scores, evaluate
from pbfl_flwr.training import REMEDY, Diverged

CLIENT_FAULT = 2  # Flower's code for "the ClientApp raised an exception"


def make_client_app(data: DataSource | None = None, settings: Settings | None = None) -> ClientApp:
    """Return the ClientApp of every method.

    Args:
        data: where a client's data comes from; by default the configured dataset and partition.
        settings: for apps that do not declare this project's run-config keys: the settings of their strategy
            (``TinyProto(...).settings``). By default the run configuration is read.
    """
    source = ClientSource(data or configured_data, settings)
    app = ClientApp()

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return _guarded(answer_hello, message, context, source)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _guarded(_train_as_asked, message, context, source)

    @app.evaluate()
    def score(message: Message, context: Context) -> Message:
        return _guarded(_evaluate, message, context, source)

    return app


def forget() -> None:
    """Drop all that this process keeps for later messages: in a notebook, networks and data may change between runs."""
    make_room()
    forget_trials()
    forget_data()


def _guarded(
    handler: Callable[[Message, Context, ClientSource], Message],
    message: Message,
    context: Context,
    source: ClientSource,
) -> Message:
    """Answer, or say in one line why not."""
    try:
        return handler(message, context, source)
    except PbflError as error:
        reason = str(error)
    except BdbQuit:
        reason = (
            "a breakpoint() was left by its q, or has no terminal here; with one worker (--engine processes --workers "
            "1) clients run where yours is"
        )
    except Exception as error:  # the boundary: whatever happens here must not cost another client's work
        reason = pointed(error)
        traceback.print_exc(file=sys.stderr)
        if of_full_card(error):
            make_room()
    card_given_back()  # the error, which held on to tensors, is gone here
    return Message(Error(code=CLIENT_FAULT, reason=reason), reply_to=message)


def _train_as_asked(message: Message, context: Context, source: ClientSource) -> Message:
    """Train on our own message, on one of the older interface, or within a stage of secure aggregation."""
    secure = source.settings_of(context).privacy.secure_aggregation
    if secure and RECORD_KEY_CONFIGS in message.content.config_records:
        return secaggplus_mod(message, context, lambda asked, state: _train_older(asked, state, source))
    if secure:
        raise PbflError("secure-aggregation = true, but the server asked for an upload in clear")
    if FITINS in message.content.array_records:
        return _train_older(message, context, source)
    return _train(message, context, source)


def _train_older(message: Message, context: Context, source: ClientSource) -> Message:
    """Answer FitIns with FitRes; under secure aggregation with the vector that is masked next."""
    asked = message.content.config_records[CONFIG]
    payload = payload_of(message.content.array_records[FITINS])
    message.content = wire.content(payload, config=ConfigRecord({**asked}))
    reply = _train(message, context, source)
    if reply.has_error():  # an injected fault
        raise PbflError(reply.error.reason or "no answer")
    answer = reply.content
    report, upload = answer.metric_records[wire.METRICS], answer.array_records[wire.PAYLOAD]
    number = int(str(asked["round"]))
    if (answered := Report.from_record(report).round) != number:  # the server could not tell it in a sum
        raise PbflError(f"answered with its upload of round {answered}, asked for {number}")
    parameters = parameters_of(upload)
    settings = source.settings_of(context)
    if settings.privacy.secure_aggregation:
        method = build_method(settings)
        data = source.data_of(settings, identify(context, settings, str(asked["experiment"])))
        task = data.task(settings.models.feature_dim)
        parameters, clipped = to_be_masked(wire.decode(upload, method.up, task), method)
        if clipped:
            report["secure-clipped"] = float(clipped)
    result = fit_result(parameters, report)
    return Message(fitres_to_recorddict(result, True), reply_to=message)


def _train(message: Message, context: Context, source: ClientSource) -> Message:
    """Train and answer; the same question twice is answered twice and trained for once."""
    with store_of(message, context, source).locked():  # an earlier process may still be at it
        session = open_client(message, context, source)
        stored, number = session.stored, session.client.round
        if stored is not None and stored.round > number:
            raise PbflError(f"asked for round {number}, but its state is already of round {stored.round}")
        best = int(str(message.content.config_records[wire.CONFIG].get(wire.KEEP_BEST, 0)))
        if stored is not None and stored.round <= best:
            session.store.keep_best(best)
        last = None if stored is None else partial(_again, stored, message, session.settings)
        answer = last if stored is not None and stored.round == number else None
        return fault_injection.inject(
            fault_injection.drawn(session.settings, session.client.key, number),
            message,
            answer or partial(_trained, session, message),
            last,
        )


def _trained(session: ClientSession, message: Message) -> Message:
    """Train, keep what stays, answer."""
    method, stored, client = session.method, session.stored, session.client
    down = wire.decode(message.content.array_records[wire.PAYLOAD], method.down, client.task)
    seeds.seed_layers(client.device, client.seed, "layers", client.key, client.round)
    moment, both = (
        resolved_moment(session.settings.evaluation, method),
        session.settings.evaluation.both_moments,
    )
    scores: dict[Moment, Scores] = {}
    evaluated = 0.0
    if moment == "before" or both:
        with nullcontext() if moment == "before" else _unnoticed(client):
            method.install(client, down)
            started = time.perf_counter()
            scores["before"] = evaluate(client, method.predictors(client, down))
            evaluated = time.perf_counter() - started
    started = time.perf_counter()
    trained = method.local_update(client, down)
    _check_usable(trained.payload, method, client)
    update = attacked(session.settings, client, trained)
    fitted = time.perf_counter() - started
    predictors = method.predictors(replace(client, memory=update.memory), down)
    if moment == "after" or both:
        started = time.perf_counter()
        scores["after"] = evaluate(client, predictors)
        evaluated += time.perf_counter() - started
    participations = 1 + (stored.participations if stored else 0)
    seconds = (*session.seconds, fitted, evaluated, 0.0)
    report = replace(
        _report(session, scores.pop(moment), participations, seconds, update.metrics),
        round=client.round,
        other=next((twice.correct for twice in scores.values()), None),
        other_by_class=next((twice.by_class for twice in scores.values()), None),
    )
    payload = wire.encode(update.payload, session.settings.prototypes.wire_dtype)
    started = time.perf_counter()
    session.store.save(state_after_round(session, update, predictors, report))
    if session.settings.privacy.client_report == "full":
        report = replace(report, seconds=(*seconds[:-1], time.perf_counter() - started))
    return Message(wire.content(payload, report.to_record()), reply_to=message)


def _check_usable(upload: Payload, method: Method[Any, Any, Any], client: Client) -> None:
    """Refuse here what the server would refuse: a network whose numbers are without bounds is not worth storing.

    Raises:
        Diverged: saying which numbers.
    """
    try:
        method.up.from_tensors(upload.to_tensors(), client.task)
    except RejectedPayload as error:
        remedies = ", or ".join(filter(None, (REMEDY, method.remedy(client))))
        raise Diverged(f"its upload would be refused: {error}; {remedies}") from None


@contextmanager
def _unnoticed(client: Client) -> Iterator[None]:
    """Give the client's network its weights back afterwards, and the generators of random numbers their state."""
    own = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    with fork_rng([client.device] if client.device.type == "cuda" else []):
        yield
    client.model.load_state_dict(own)


def _evaluate(message: Message, context: Context, source: ClientSource) -> Message:
    """Score what this client has, with what was broadcast; nothing is trained and nothing stored."""
    session = open_client(message, context, source)
    method, client = session.method, session.client
    down = wire.decode(message.content.array_records[wire.PAYLOAD], method.down, client.task)
    if resolved_moment(session.settings.evaluation, method) == "before":
        method.install(client, down)
    started = time.perf_counter()
    scores = evaluate(client, method.predictors(client, down))
    seconds = (*session.seconds, 0.0, time.perf_counter() - started, 0.0)
    report = _report(session, scores, session.stored.participations if session.stored else 0, seconds)
    return Message(wire.content(report=report.to_record()), reply_to=message)


def _report(
    session: ClientSession,
    scores: Scores,
    participations: int,
    seconds: tuple[float, float, float, float, float],
    metrics: Mapping[str, float] | None = None,
) -> Report:
    """Return what is said beside the payload; with client-report none only what says nothing about the samples."""
    if session.settings.privacy.client_report == "none":
        spent = {name: value for name, value in (metrics or {}).items() if name == "epsilon"}
        return Report(0, 0, participations, metrics=spent)
    held_out = scores.validation
    return Report(
        num_train=len(session.client.data.train.labels),
        num_test=scores.num_samples,
        participations=participations,
        correct=scores.correct,
        test_loss=scores.loss,
        seconds=seconds,
        peak_mb=peak_memory(),
        gpu_mb=peak_gpu_memory(),
        metrics=metrics,
        num_validation=held_out.num_samples if held_out else 0,
        validation=held_out.correct if held_out else None,
        by_class=scores.by_class,
    )


def _again(stored: ClientState, message: Message, settings: Settings) -> Message:
    """Answer a question that was answered before, without training twice."""
    payload = wire.encode_tensors(stored.reply, settings.prototypes.wire_dtype)
    return Message(wire.content(payload, MetricRecord(dict(stored.report))), reply_to=message)
