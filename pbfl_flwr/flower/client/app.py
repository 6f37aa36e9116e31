"""The ClientApp: load a client's state, run the method, save the state, reply.

Every message may start a new client process, so all client state is stored in its own directory on its own disk. An
exception in one client becomes an error reply with one readable line and does not affect other clients.
"""

from __future__ import annotations

import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import Context, Error, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from pbfl_flwr import seeds
from pbfl_flwr.config import Settings
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError, format_exception, is_out_of_memory
from pbfl_flwr.flower.client.device import peak_gpu_memory, release_gpu_memory
from pbfl_flwr.flower.client.handshake import answer_handshake, reason_of
from pbfl_flwr.flower.client.mods import call_with_mods, checked_mods
from pbfl_flwr.flower.client.saving import needs_state, state_after_round
from pbfl_flwr.flower.client.session import (
    ClientSession,
    open_client,
    store_of,
)
from pbfl_flwr.flower.client.worker import DataSource, Worker
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.method import Client, Method, Predictor, resolved_moment
from pbfl_flwr.payloads import Payload, RejectedPayload
from pbfl_flwr.runs.client_store import ClientState
from pbfl_flwr.training.evaluation import Scores, evaluate
from pbfl_flwr.training.loop import REMEDY, Diverged
from pbfl_flwr.util.memory import peak_memory

RAISED = 2  # Flower's code for "the ClientApp raised an exception"


def make_client_app(
    data: DataSource | None = None,
    settings: Settings | None = None,
    mods: Sequence[Mod] = (),
    loaded: LoadedData | None = None,
) -> ClientApp:
    """Return the ClientApp of every method, with a worker of its own.

    Args:
        data: returns a client's data; by default the configured dataset and partition.
        settings: for apps that do not declare this project's run-config keys: the settings of their strategy
            (``TinyProto(...).settings``). By default the run configuration is used.
        mods: Flower mods around the clients, the outermost first; the configured ``mods`` are inside them.
        loaded: data that this process has read before.

    Raises:
        PbflError: if one of the mods cannot be called.
    """
    worker, given = Worker(data, settings, loaded), checked_mods(mods)

    def guarded(message: Message, context: Context, handler: ClientAppCallable) -> Message:
        return _guarded(message, context, handler, worker)

    def surrounded(message: Message, context: Context, handler: ClientAppCallable) -> Message:
        return call_with_mods(given, worker.run_of(context).settings, message, context, handler)

    app = ClientApp(mods=[guarded, surrounded])

    @app.query()
    def handshake(message: Message, context: Context) -> Message:
        return answer_handshake(message, context, worker)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _train(message, context, worker)

    @app.evaluate()
    def score(message: Message, context: Context) -> Message:
        return _evaluate(message, context, worker)

    return app


def _guarded(message: Message, context: Context, handler: ClientAppCallable, worker: Worker) -> Message:
    """Return the handler's reply, or an error reply with a one-line reason."""
    try:
        return handler(message, context)
    except PbflError as error:
        reason = reason_of(error, message, context)
    except BdbQuit:
        reason = (
            "a breakpoint() was quit with q, or has no terminal here; with one worker (--engine processes --workers "
            "1) clients run in your terminal"
        )
    except Exception as error:  # an exception here must not affect other clients
        reason = format_exception(error)
        traceback.print_exc(file=sys.stderr)
        if is_out_of_memory(error):
            worker.release_networks()
    release_gpu_memory()  # only now: the exception, which referenced tensors, has been released
    return Message(Error(code=RAISED, reason=reason), reply_to=message)


def _train(message: Message, context: Context, worker: Worker) -> Message:
    """Train and reply; a repeated message gets the stored reply without training again."""
    settings = worker.run_of(context).settings
    with store_of(message, context, settings).locked():  # an earlier process may still be running
        session = open_client(message, context, worker)
        stored, number = session.stored, session.client.round
        if stored is not None and stored.round > number:
            raise PbflError(f"asked for round {number}, but its state is already of round {stored.round}")
        if stored is not None and stored.round == number:
            return _stored_reply(stored, message, session.settings)
        return _train_and_save(session, message, worker)


def _train_and_save(session: ClientSession, message: Message, worker: Worker) -> Message:
    """Train, save the state, reply."""
    method, stored, client = session.method, session.stored, session.client
    down = worker.broadcast(message.content.array_records[wire.PAYLOAD], method.down, client.task)
    seeds.seed_code(client.device, client.seed, "layers", client.key, client.round)
    scored = wire.UNSCORED not in message.content.config_records[wire.CONFIG]
    moment = resolved_moment(session.settings.evaluation, method) if scored else None
    scores, evaluated = None, 0.0
    if moment == "before":
        method.install(client, down)
        scores, evaluated = _timed_scores(client, method.predictors(client, down))
    started = time.perf_counter()
    update = method.local_update(client, down)
    _check_usable(update.payload, method, client)
    fitted = time.perf_counter() - started
    predictors = method.predictors(replace(client, memory=update.memory), down)
    if moment == "after":
        scores, evaluated = _timed_scores(client, predictors)
    keeps = needs_state(session, update)
    participations = 1 + (stored.participations if stored else 0) if keeps else 0
    seconds = (*session.seconds, fitted, evaluated, 0.0)
    report = replace(_report(session, scores, participations, seconds, update.metrics), round=client.round)
    payload = wire.encode(update.payload, session.settings.prototypes.wire_dtype)
    started = time.perf_counter()
    if keeps:
        session.store.save(state_after_round(session, update, predictors, report))
    report = replace(report, seconds=(*seconds[:-1], time.perf_counter() - started))
    return Message(wire.content(payload, report.to_record()), reply_to=message)


def _check_usable(upload: Payload, method: Method[Any, Any, Any], client: Client) -> None:
    """Check the upload as the server does, so that a diverged network is not stored.

    Raises:
        Diverged: naming the invalid numbers.
    """
    try:
        method.up.from_tensors(upload.to_tensors(), client.task)
    except RejectedPayload as error:
        remedies = ", or ".join(filter(None, (REMEDY, method.divergence_hint(client))))
        raise Diverged(f"its upload would be rejected: {error}; {remedies}") from None


def _timed_scores(client: Client, predictors: Mapping[str, Predictor]) -> tuple[Scores, float]:
    """Return the client's scores, and the seconds that scoring took."""
    started = time.perf_counter()
    scores = evaluate(client, predictors)
    return scores, time.perf_counter() - started


def _evaluate(message: Message, context: Context, worker: Worker) -> Message:
    """Evaluate the client's network with the broadcast; neither trains nor stores anything."""
    session = open_client(message, context, worker)
    method, client = session.method, session.client
    seeds.seed_code(client.device, client.seed, "scoring", client.key, client.round)
    down = worker.broadcast(message.content.array_records[wire.PAYLOAD], method.down, client.task)
    if resolved_moment(session.settings.evaluation, method) == "before":
        method.install(client, down)
    scores, evaluated = _timed_scores(client, method.predictors(client, down))
    seconds = (*session.seconds, 0.0, evaluated, 0.0)
    report = _report(session, scores, session.stored.participations if session.stored else 0, seconds)
    return Message(wire.content(report=report.to_record()), reply_to=message)


def _report(
    session: ClientSession,
    scores: Scores | None,
    participations: int,
    seconds: tuple[float, float, float, float, float],
    metrics: Mapping[str, float] | None = None,
) -> Report:
    data = session.client.data
    report = Report(
        num_train=len(data.train.labels),
        num_test=len(data.test.labels),
        participations=participations,
        seconds=seconds,
        peak_mb=peak_memory(),
        gpu_mb=peak_gpu_memory(),
        metrics=metrics,
    )
    if scores is None:
        return report
    held_out = scores.validation
    return replace(
        report,
        correct=scores.correct,
        test_loss=scores.loss,
        num_validation=held_out.num_samples if held_out else 0,
        validation=held_out.correct if held_out else None,
        by_class=scores.by_class,
        areas=scores.areas,
    )


def _stored_reply(stored: ClientState, message: Message, settings: Settings) -> Message:
    """Return the reply stored with the state, without training again."""
    payload = wire.encode_tensors(stored.reply, settings.prototypes.wire_dtype)
    return Message(wire.content(payload, MetricRecord(dict(stored.report))), reply_to=message)
