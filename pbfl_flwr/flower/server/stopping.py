"""Conditions that end a run with an error. Each function checks one and raises if it holds."""

from __future__ import annotations

import torch
from flwr.common.constant import ErrorCode

from pbfl_flwr.config import RunSettings, Settings, TrainingSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.membership import NOT_CONNECTED
from pbfl_flwr.flower.server.replies import Exchange, worker_died
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.payloads import Payload

# Flower's errors for a node whose heartbeats or reply were lost.
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


class RunEnded(PbflError):
    """The run cannot continue; everything up to the last finished round is on disk and can be resumed."""


class NodesUnreachable(RunEnded):
    """Too few valid replies because nodes or replies were lost, e.g. while the server's network link was down."""


def check_exchange(exchange: Exchange, roster: Roster, settings: Settings) -> None:
    """Check that a round counts.

    Raises:
        RunEnded: if a client failed and failure-policy is "stop", a worker of a simulation died, too few clients
            trained, or in the first round no client of the federation could make a step; gives the first reasons.
        NodesUnreachable: if too few trained, but lost nodes and replies would have made up for it; likewise.
    """
    need_success(exchange, settings.run)
    _need_workers(exchange, roster)
    _need_replies(exchange, settings.run.min_replies)
    if exchange.phase.number == 1 and len(exchange.trained) == len(roster.clients):
        _need_steps(exchange, settings.training)


def need_success(exchange: Exchange, run: RunSettings) -> None:
    """Check that no client failed, for failure-policy "stop".

    Raises:
        RunEnded: if one did.
    """
    if exchange.failures and run.failure_policy == "stop":
        number, (client, reason) = exchange.phase.number, next(iter(exchange.failures.items()))
        label = exchange.phase.client_label(client)
        raise RunEnded(
            f"round {number}: client {label} failed: {reason}; failure-policy is 'stop'. Rounds up to {number - 1} are "
            "kept and can be resumed"
        )


def _need_workers(exchange: Exchange, roster: Roster) -> None:
    # A device could send such an error itself, and must not be able to end the run.
    simulation = all(client.simulated for client in roster.clients.values())
    if simulation and any(worker_died(reply) for reply in exchange.replies if reply.has_error()):
        phase = exchange.phase
        raise RunEnded(
            f"round {phase.number}: a simulation worker died (client "
            f"{', '.join(map(phase.client_label, exchange.failures))}); Flower cannot replace it. Rounds up to "
            f"{phase.number - 1} are kept and can be resumed"
        )


def _need_replies(exchange: Exchange, min_replies: int) -> None:
    valid, phase = len(exchange.trained), exchange.phase
    if valid < min_replies:
        few = list(exchange.failures.items())[:5]
        reasons = "; ".join(f"client {phase.client_label(client)}: {reason}" for client, reason in few)
        lost = sum(reason == NOT_CONNECTED for reason in phase.plan.absent.values())
        training_ids = {m.metadata.message_id for m, client in phase.messages if client in phase.training}
        errors = (reply for reply in exchange.replies if reply.has_error())
        lost += sum(e.error.code in LOST and e.metadata.reply_to_message_id in training_ids for e in errors)
        kind = NodesUnreachable if valid + lost >= min_replies else RunEnded
        raise kind(f"round {phase.number}: {valid} valid replies, min-replies is {min_replies}: {reasons}")


def _need_steps(exchange: Exchange, training: TrainingSettings) -> None:
    metrics = (exchange.reports[client].metrics or {} for client in exchange.trained)
    if all(reported.get("idle") for reported in metrics):
        raise RunEnded(
            "round 1: no client made a training step, since each has fewer samples than a batch needs (batch-size = "
            f"{training.batch_size}, drop-last = '{training.drop_last}'; BatchNorm needs two)"
        )


def need_finite(broadcast: Payload, server_round: int) -> None:
    """Check that the next broadcast is finite.

    Raises:
        RunEnded: naming the tensor that is not.
    """
    for name, tensor in broadcast.to_tensors().items():
        if not bool(torch.isfinite(tensor).all()):
            raise RunEnded(
                f"round {server_round}: after aggregation '{name}' of the broadcast holds NaN or infinity; lower the "
                f"learning rates. Rounds up to {server_round - 1} are kept"
            )
