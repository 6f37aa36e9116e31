"""The messages of a phase.

::

    plan (client -> "train" or "evaluate") -> Phase (messages) -> grid -> replies -> read -> Replies
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message

from pbfl_flwr import calls
from pbfl_flwr.config import RunSettings
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.identity import DEAL, IDENTITY, declared_identity
from pbfl_flwr.flower.messages.traffic import weigh
from pbfl_flwr.flower.server.grid import lifetime
from pbfl_flwr.flower.server.overdue import OverdueReply
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Payload, Serializable
from pbfl_flwr.runs.records import Bytes, ClientRecord
from pbfl_flwr.task import Task

Kind = Literal["train", "evaluate"]
"""What a message asks of a client; with "train" it is scored as well, unless the plan says otherwise."""


@dataclass(frozen=True)
class RoundPlan:
    """Who does what in a phase of a round.

    Attributes:
        number: of the round, from 1.
        kinds: client -> what it is asked to do.
        absent: client -> why it gets no message.
        scored: whether clients are scored.
    """

    number: int
    kinds: Mapping[int, Kind]
    absent: Mapping[int, str] = field(default_factory=dict)
    scored: bool = True


def plan_of(
    number: int, roster: Roster, run: RunSettings, absent: Mapping[int, str], scored: bool
) -> RoundPlan:
    """Sample the clients that train in a round, and those of the others that are only scored, if clients are scored."""
    training = roster.sample(run.fraction_train, run.seed, number, absent)
    others = roster.scored(run.fraction_evaluate, run.seed, number, training)
    kinds: dict[int, Kind] = {client: "evaluate" for client in others if scored and client not in absent}
    return RoundPlan(number, {**kinds, **dict.fromkeys(training, "train")}, absent, scored)


@dataclass(frozen=True)
class Phase:
    """The messages of a phase, and what is needed to evaluate their replies.

    Flower sets message ids on these same objects when it sends them, so ids are read only once replies arrive.

    Attributes:
        messages: each with its client.
        plan: who does what.
        down: client -> bytes of its message.
        scalars_down: numbers that carry information.
        started: :func:`time.perf_counter` when the messages were ready.
        names: of clients that have one.
        declared: client -> what it declared in the handshake, which bounds what its report may count.
    """

    messages: list[tuple[Message, int]]
    plan: RoundPlan
    down: dict[int, Bytes]
    scalars_down: int
    started: float
    names: dict[int, str] = field(default_factory=dict)
    declared: Mapping[int, ClientRecord] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The round's number, from 1."""
        return self.plan.number

    @cached_property
    def training(self) -> frozenset[int]:
        """The clients that train."""
        return frozenset(client for client, kind in self.plan.kinds.items() if kind == "train")

    def client_label(self, client: int) -> str:
        """Return a client's name, or its number if it has none."""
        return self.names.get(client, str(client))

    def unanswered(self, replies: Iterable[Message]) -> dict[str, OverdueReply]:
        """Return the messages that have no reply yet, by message id."""
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        return {
            message.metadata.message_id: OverdueReply(client, self.number)
            for message, client in self.messages
            if message.metadata.message_id not in answered
        }


def phase_of(
    plan: RoundPlan,
    method: Method[Any, Any, Any],
    state: Serializable,
    roster: Roster,
    task: Task,
    experiment: str,
    dtype: wire.WireDtype,
    timeout: float,
    digest: str,
) -> Phase:
    """Return the phase with its messages, which are still to be sent; replies have ``timeout`` seconds.

    ``digest`` is that of the state, for :data:`~pbfl_flwr.flower.messages.wire.STATE`.
    """
    messages, down, scalars, names = [], {}, 0, roster.names
    # A broadcast that is the same object for several clients is encoded once. The payload is kept with its encoding,
    # since the id of a deleted object may be reused.
    encoded: dict[int, tuple[Payload, ArrayRecord]] = {}
    for number in sorted(plan.kinds):
        payload = calls.broadcast(method, state, number, task)
        if id(payload) not in encoded:
            encoded[id(payload)] = payload, wire.encode(payload, dtype)
        config = ConfigRecord({"round": plan.number, "experiment": experiment})
        if not plan.scored:
            config[wire.UNSCORED] = True
        if digest and plan.kinds[number] == "train":
            config[wire.STATE] = digest
        if number in names:
            config["client"] = number  # clients without a name know their number
        client = roster.clients[number]
        if client.deal:
            config[DEAL] = client.deal
        if not client.simulated:
            config[IDENTITY] = declared_identity(client)
        message = Message(
            wire.content(encoded[id(payload)][1], config=config),
            dst_node_id=client.node,
            message_type=plan.kinds[number],
            ttl=lifetime(timeout),
            group_id=str(plan.number),
        )
        down[number] = weigh(message)
        scalars += calls.scalars(payload)
        messages.append((message, number))
    return Phase(messages, plan, down, scalars, time.perf_counter(), names, roster.clients)
