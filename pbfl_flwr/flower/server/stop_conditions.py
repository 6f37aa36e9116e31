"""When a run ends before its last round. Each function looks for one reason and raises if it finds it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from flwr.app import Message
from flwr.common.constant import ErrorCode

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.availability import NOT_CONNECTED
from pbfl_flwr.flower.server.replies import Outcome, Phase, worker_died
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.payloads import Payload

# What Flower answers for a node whose heartbeats or whose answer did not get through.
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


class RunEnded(PbflError):
    """The run cannot go on; everything up to the last finished round is on disk and can be resumed."""


class OutOfReach(RunEnded):
    """Too few clients answered, since nodes or answers were lost on the way, as when the server's link is down."""


def need_success(phase: Phase, outcome: Outcome) -> None:
    """Make sure that nobody failed, for a run that is to end at the first failure.

    Raises:
        RunEnded: if somebody did.
    """
    if outcome.failures:
        client, reason = next(iter(outcome.failures.items()))
        raise RunEnded(
            f"round {phase.number}: client {phase.called(client)} failed: {reason}; failure-policy is "
            f"'stop'. Rounds up to {phase.number - 1} are kept and can be resumed"
        )


def need_workers(roster: Roster, phase: Phase, outcome: Outcome, replies: Iterable[Message]) -> None:
    """Make sure that a simulation has all its workers.

    Args:
        roster: who takes part.
        phase: what was sent.
        outcome: what came back.
        replies: as they came.

    Raises:
        RunEnded: if one died.
    """
    # Of a device it would be its own word, which must not end the others' run.
    simulation = all(member.simulated for member in roster.members.values())
    if simulation and any(worker_died(reply) for reply in replies if reply.has_error()):
        raise RunEnded(
            f"round {phase.number}: a simulation worker died (client "
            f"{', '.join(map(phase.called, outcome.failures))}); Flower cannot replace it. Rounds up to "
            f"{phase.number - 1} are kept and can be resumed"
        )


def need_replies(wanted: int, phase: Phase, outcome: Outcome, replies: Iterable[Message]) -> None:
    """Make sure that enough clients trained.

    Args:
        wanted: min-replies.
        phase: what was sent.
        outcome: what came back.
        replies: as they came.

    Raises:
        OutOfReach: if fewer did, and there would be enough with those whose nodes or answers were lost.
        RunEnded: if fewer did for other reasons; with the first reasons either way.
    """
    valid = len(outcome.trained)
    if valid < wanted:
        few = list(outcome.failures.items())[:5]
        reasons = "; ".join(f"client {phase.called(client)}: {reason}" for client, reason in few)
        lost = sum(reason == NOT_CONNECTED for reason in phase.absent.values())
        asked = {m.metadata.message_id for m, client in phase.messages if client in phase.training}
        errors = (reply for reply in replies if reply.has_error())
        lost += sum(e.error.code in LOST and e.metadata.reply_to_message_id in asked for e in errors)
        kind = OutOfReach if valid + lost >= wanted else RunEnded
        raise kind(f"round {phase.number}: {valid} valid replies, min-replies is {wanted}: {reasons}")


def need_numbers(broadcast: Payload, server_round: int) -> None:
    """Make sure that what clients would get next is finite.

    Raises:
        RunEnded: naming the tensor that is not.
    """
    for name, tensor in broadcast.to_tensors().items():
        if not bool(torch.isfinite(tensor).all()):
            raise RunEnded(
                f"round {server_round}: after aggregation '{name}' of the broadcast holds NaN or infinity; lower the "
                f"learning rates. Rounds up to {server_round - 1} are kept"
            )
