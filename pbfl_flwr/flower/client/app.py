"""The ClientApp: load a client's state, run the method, save the state, reply.

Every message may start a new client process, so all client state is stored in its own directory on its own disk. An
exception in one client becomes an error reply with one readable line and does not affect other clients. Text that may
quote a device's data stays in the device's log.
"""

from __future__ import annotations

import sys
import traceback
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from logging import ERROR, WARNING

from filelock import Timeout
from flwr.app import Context, Error, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import log
from torch import Tensor

from pbfl_flwr import calls, seeds
from pbfl_flwr.config import Settings
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import (
    PbflError,
    QuotesData,
    format_exception,
    is_disk_full,
    is_out_of_memory,
    pass_on_exit,
)
from pbfl_flwr.flower.client.device import peak_gpu_memory, release_gpu_memory, simulated
from pbfl_flwr.flower.client.handshake import answer_handshake, reason_of
from pbfl_flwr.flower.client.mods import call_with_mods, checked_mods
from pbfl_flwr.flower.client.saving import needs_state, state_after_round
from pbfl_flwr.flower.client.session import ClientSession, open_client, store_of
from pbfl_flwr.flower.client.worker import DataSource, Worker
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report, Requested, reported
from pbfl_flwr.method import Moment, resolved_moment
from pbfl_flwr.models.contract import has_batch_norm
from pbfl_flwr.payloads import Payload, RejectedPayload, separate
from pbfl_flwr.payloads.contract import OutOfRange
from pbfl_flwr.training.evaluation import Scores, evaluate
from pbfl_flwr.training.loop import REMEDY, Diverged
from pbfl_flwr.util.atomic_files import UnsavedState
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
    of_device, unsaved = not simulated(context.node_config), False
    try:
        return handler(message, context)
    except PbflError as error:
        if of_device and isinstance(error, QuotesData):
            log(ERROR, "%s", error)
            error = PbflError(error.told)
        reason, unsaved = reason_of(error, message, context), isinstance(error, UnsavedState)
    except BdbQuit:
        reason = (
            "a breakpoint() was quit with q, or has no terminal here; with one worker (--engine processes --workers "
            "1) clients run in your terminal"
        )
    except (Exception, SystemExit) as error:  # an exception here must not affect other clients
        pass_on_exit(error)
        reason = format_exception(error, text=not of_device) + "; see the device's log" * of_device
        unsaved = is_disk_full(error)
        with suppress(OSError):  # the log is on a full disk
            traceback.print_exc(file=sys.stderr)
        if is_out_of_memory(error):
            worker.release_networks()
    release_gpu_memory()  # only now: the exception, which referenced tensors, has been released
    code = RAISED if of_device or not unsaved else wire.UNSAVED
    return Message(Error(code=code, reason=reason), reply_to=message)


def _train(message: Message, context: Context, worker: Worker) -> Message:
    """Train and reply; a repeated message gets the stored reply without training again."""
    lock = store_of(message, context, worker.run_of(context).settings).locked()
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        log(WARNING, "waiting for an earlier process of this client, which holds %s", lock.lock_file)
        held = lock.acquire()
    with held:
        session = open_client(message, context, worker)
        return _stored_reply(session, message, worker) or _train_and_save(session, message, worker)


def _train_and_save(session: ClientSession, message: Message, worker: Worker) -> Message:
    """Train, save the state, reply."""
    method, client = session.method, session.client
    down = _broadcast(session, message, worker)
    seeds.seed_code(client.device, client.seed, "layers", client.key, client.round)
    moment, scores = _moment(session, message), None
    if moment == "before":
        scores = _scores(session, down)
    with session.timed("fit"):
        update = calls.local_update(method, client, down)
        reply = separate(update.payload.to_tensors())  # a user's may be on the network's device
        _check_usable(reply, session)
    predictors = calls.predictors(method, replace(client, memory=update.memory), down)
    if moment == "after":
        with session.timed("evaluate"):
            scores = evaluate(client, predictors, method.predicts)
    keeps = needs_state(session, update)
    participations = 1 + session.participations if keeps else 0
    report = replace(_report(session, scores, participations), round=client.round, metrics=update.metrics)
    payload = wire.encode_tensors(reply, session.settings.prototypes.wire_dtype)
    with session.timed("save"):
        if keeps:
            session.store.save(state_after_round(session, reply, update.memory, predictors, report))
    report = replace(report, seconds=session.seconds)
    return Message(wire.content(payload, report.to_record()), reply_to=message)


def _evaluate(message: Message, context: Context, worker: Worker) -> Message:
    """Evaluate the client's network with the broadcast; neither trains nor stores anything."""
    session = open_client(message, context, worker)
    client = session.client
    seeds.seed_code(client.device, client.seed, "scoring", client.key, client.round)
    scores = _scores(session, _broadcast(session, message, worker))
    report = _report(session, scores, session.participations)
    return Message(wire.content(report=report.to_record()), reply_to=message)


def _stored_reply(session: ClientSession, message: Message, worker: Worker) -> Message | None:
    """Return the reply stored with the state of this round; None if the client has not trained in it yet.

    Scores that it lacks are added: a resumed run may end with a round in which nobody was to be scored before.

    Raises:
        PbflError: if the client has already trained in a later round, or in this one of another history.
    """
    stored, number = session.stored, session.client.round
    if stored is None or stored.round < number:
        return None
    if stored.round > number:
        raise PbflError(f"asked for round {number}, but its state is already of round {stored.round}")
    if stored.server_state and session.server_state not in ("", stored.server_state):
        raise PbflError(
            f"its state of round {number} was trained on another broadcast, as the run's history has been replaced "
            f"since; it takes part from round {number + 1}, or from scratch if its state file is moved away"
        )
    payload = wire.encode_tensors(stored.reply, session.settings.prototypes.wire_dtype)
    record, method = MetricRecord(dict(stored.report)), session.method
    if _moment(session, message) == "after":
        report = Report.from_record(record, Requested(predictors=reported(method.predicts)))
        if not report.correct:
            predictors = calls.predictors(method, session.client, _broadcast(session, message, worker))
            scores = evaluate(session.client, predictors, method.predicts)
            record = _scored(report, scores).to_record()
    return Message(wire.content(payload, record), reply_to=message)


def _broadcast(session: ClientSession, message: Message, worker: Worker) -> Payload:
    record = message.content.array_records[wire.PAYLOAD]
    down: Payload = worker.broadcast(record, session.method.down, session.client.task)
    return down


def _moment(session: ClientSession, message: Message) -> Moment | None:
    """Return when the client is scored, None if it is not in this round."""
    if wire.UNSCORED in message.content.config_records[wire.CONFIG]:
        return None
    return resolved_moment(session.settings.evaluation, session.method)


def _scores(session: ClientSession, down: Payload) -> Scores:
    """Return the scores of the network as it is, with the broadcast installed if clients are scored before training."""
    method, client = session.method, session.client
    if resolved_moment(session.settings.evaluation, method) == "before":
        method.install(client, down)
    predictors = calls.predictors(method, client, down)
    with session.timed("evaluate"):
        return evaluate(client, predictors, method.predicts)


def _check_usable(upload: Mapping[str, Tensor], session: ClientSession) -> None:
    """Check the upload as the server does, so that a diverged network is not stored.

    Raises:
        Diverged: naming numbers that are not finite or too large.
        PbflError: naming anything else for which it would be rejected.
    """
    method, client = session.method, session.client
    try:
        method.up.from_tensors(upload, client.task)
    except OutOfRange as error:
        during = session.settings.prototypes.collect in ("trajectory", "last-epoch")
        collects = "collect" in method.uses and not during and has_batch_norm(client.model)
        advice = ", or collect = 'trajectory' with BatchNorm" if collects else ""
        raise Diverged(f"its upload would be rejected: {error}; {REMEDY}{advice}") from None
    except RejectedPayload as error:
        raise PbflError(f"its upload would be rejected: {error}") from None


def _report(session: ClientSession, scores: Scores | None, participations: int) -> Report:
    data = session.client.data
    report = Report(
        num_train=len(data.train.labels),
        num_test=len(data.test.labels),
        participations=participations,
        seconds=session.seconds,
        peak_mb=peak_memory(),
        gpu_mb=peak_gpu_memory(),
        predictors=reported(session.method.predicts),
    )
    return report if scores is None else _scored(report, scores)


def _scored(report: Report, scores: Scores) -> Report:
    """Return a report with scores."""
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
