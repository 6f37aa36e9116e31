"""Conditions that end a run with an error. Each function checks one and raises if it holds."""

from __future__ import annotations

from pbfl_flwr.config import RunSettings, Settings, TrainingSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.replies import LOST, Replies, error_reason, worker_died
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.payloads import Payload, RejectedPayload, Serializable, separate
from pbfl_flwr.payloads.contract import OutOfRange
from pbfl_flwr.runs.records import NOT_CONNECTED
from pbfl_flwr.task import Task


class RunEnded(PbflError):
    """The run cannot continue; everything up to the last finished round is on disk and can be resumed."""


class NodesUnreachable(RunEnded):
    """Too few valid replies because nodes or replies were lost, e.g. while the server's network link was down."""


def check_replies(replies: Replies, roster: Roster, settings: Settings) -> None:
    """Check that a round counts.

    Raises:
        RunEnded: if a client failed and failure-policy is "stop", a worker of a simulation died or its disk is
            full, too few clients trained, or in the first round no client of the federation could make a step; gives
            the first reasons.
        NodesUnreachable: if too few trained, but lost nodes and replies would have made up for it; likewise.
    """
    _need_success(replies, settings.run)
    _need_workers(replies, roster)
    _need_replies(replies, settings.run.min_replies)
    if replies.phase.number == 1 and len(replies.trained) == len(roster.clients):
        _need_steps(replies, settings.training)


def check_scored(replies: Replies, roster: Roster, run: RunSettings) -> None:
    """Check that the final scoring counts: clients that fail in it do, as they would again, unless all do.

    Raises:
        RunEnded: if a client failed and failure-policy is "stop", a worker of a simulation died or its disk is full, or
            nobody was scored.
        NodesUnreachable: if fewer than min-replies were, but lost nodes and replies would have made up for it.
    """
    _need_success(replies, run)
    _need_workers(replies, roster)
    try:
        _need_replies(replies, run.min_replies)
    except NodesUnreachable:
        raise
    except RunEnded:
        if not replies.reports:
            raise


def _need_success(replies: Replies, run: RunSettings) -> None:
    if replies.failures and run.failure_policy == "stop":
        number, (client, reason) = replies.phase.number, next(iter(replies.failures.items()))
        label = replies.phase.client_label(client)
        raise RunEnded(
            f"round {number}: client {label} failed: {reason}; failure-policy is 'stop'. Rounds up to {number - 1} are "
            "kept and can be resumed"
        )


def _need_workers(replies: Replies, roster: Roster) -> None:
    # A device could send such an error itself, and must not be able to end the run.
    if not all(client.simulated for client in roster.clients.values()):
        return
    phase, errors = replies.phase, [reply for reply in replies.messages if reply.has_error()]
    kept = f"Rounds up to {phase.number - 1} are kept and can be resumed"
    if any(map(worker_died, errors)):
        clients = ", ".join(map(phase.client_label, replies.failures))
        raise RunEnded(
            f"round {phase.number}: a simulation worker died (client {clients}); Flower cannot replace it. {kept}"
        )
    for reply in errors:
        if reply.error.code == wire.UNSAVED:
            raise RunEnded(f"round {phase.number}: {error_reason(reply)}. {kept}")


def _need_replies(replies: Replies, min_replies: int) -> None:
    phase = replies.phase
    asked = phase.training or phase.plan.kinds.keys()  # nobody trains in the final scoring
    valid = len(asked & replies.reports.keys())
    if valid < min_replies:
        few = list(replies.failures.items())[:5]
        reasons = "; ".join(f"client {phase.client_label(client)}: {reason}" for client, reason in few)
        lost = sum(reason == NOT_CONNECTED for reason in phase.plan.absent.values())
        asked_ids = {m.metadata.message_id for m, client in phase.messages if client in asked}
        errors = (reply for reply in replies.messages if reply.has_error())
        lost += sum(e.error.code in LOST and e.metadata.reply_to_message_id in asked_ids for e in errors)
        kind = NodesUnreachable if valid + lost >= min_replies else RunEnded
        raise kind(f"round {phase.number}: {valid} valid replies, min-replies is {min_replies}: {reasons}")


def _need_steps(replies: Replies, training: TrainingSettings) -> None:
    metrics = (replies.reports[client].metrics or {} for client in replies.trained)
    if all(reported.get("idle") for reported in metrics):
        raise RunEnded(
            "round 1: no client made a training step, since each has fewer samples than a batch needs (batch-size = "
            f"{training.batch_size}, drop-last = '{training.drop_last}'; BatchNorm needs two)"
        )


def as_saved(state: Serializable, kind: type[Serializable], task: Task, server_round: int) -> Serializable:
    """Return a state of this kind as a checkpoint of it is read, so that a resumed run goes on with the same numbers.

    Raises:
        RunEnded: naming the tensor that would not be read, e.g. since it is not finite.
    """
    tensors = separate(state.to_tensors())
    try:
        return kind.from_tensors(dict(sorted(tensors.items())), task)  # as they are in a file
    except (RejectedPayload, KeyError) as error:
        raise RunEnded(
            f"round {server_round}: after aggregation the server's state could not be read again: {error}. Rounds up "
            f"to {server_round - 1} are kept"
        ) from None


def need_usable(broadcast: Payload, kind: type[Payload], task: Task, server_round: int) -> None:
    """Check that clients can read the next broadcast, which is of this kind, e.g. that numbers are finite and bounded.

    Raises:
        RunEnded: naming the tensor that is not.
    """
    try:
        kind.from_tensors(broadcast.to_tensors(), task)
    except RejectedPayload as error:
        advice = "; lower the learning rates" if isinstance(error, OutOfRange) else ""
        raise RunEnded(
            f"round {server_round}: after aggregation the broadcast would be rejected: {error}{advice}. Rounds up to "
            f"{server_round - 1} are kept"
        ) from None
