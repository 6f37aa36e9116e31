"""What the clients of a phase are sent: the method's broadcast, the round, and what they are asked to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message

from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.declaration import DECLARATION
from pbfl_flwr.flower.messages.traffic import weigh
from pbfl_flwr.flower.server.replies import Phase
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Payload


@dataclass(frozen=True)
class Instructions:
    """Writes the messages of a phase.

    Attributes:
        method: says what each client is sent.
        experiment: the name under which clients keep their state.
        dtype: of payloads on the wire.
        malicious: who lies on purpose.
        best: the best round so far, whose states clients keep; 0 if they are not asked to.
    """

    method: Method[Any, Any, Any]
    experiment: str
    dtype: wire.WireDtype
    malicious: frozenset[int] = frozenset()
    best: int = 0

    def phase(
        self,
        state: Payload,
        roster: Roster,
        kinds: Mapping[int, str],
        server_round: int,
        absent: Mapping[int, str],
    ) -> Phase:
        """Return the phase, whose messages are to be sent.

        Args:
            state: of the server.
            roster: who is who; all that are asked are in it.
            kinds: client -> "train" or "evaluate".
            server_round: from 1.
            absent: who is not asked, and why.
        """
        sent, down, scalars, names = [], {}, 0, roster.names
        # One encoding for a broadcast that is the same object for all; kept beside it, since the id of an object that
        # is gone may be another's.
        encoded: dict[int, tuple[Payload, ArrayRecord]] = {}
        for client in sorted(kinds):
            payload = self.method.broadcast(state, client)
            if id(payload) not in encoded:
                encoded[id(payload)] = payload, wire.encode(payload, self.dtype)
            config = ConfigRecord({"round": server_round, "experiment": self.experiment})
            if client in names:
                config["client"] = client  # a numbered one knows
            if self.best:
                config[wire.KEEP_BEST] = self.best
            if not (member := roster.members[client]).simulated:
                config[DECLARATION] = member.declaration
            message = Message(
                wire.content(encoded[id(payload)][1], config=config),
                dst_node_id=member.node,
                message_type=kinds[client],
                group_id=str(server_round),
            )
            down[client] = weigh(message)
            scalars += payload.scalars()
            sent.append((message, client))
        training = {client for client, kind in kinds.items() if kind == "train"}
        started = time.perf_counter()
        return Phase(
            sent, training, down, scalars, started, names, server_round, dict(absent), self.malicious
        )
