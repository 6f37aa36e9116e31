"""The messages to the clients in a phase: the broadcast, the round, and whether to train or evaluate."""

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
    """Builds the messages of a phase.

    Attributes:
        method: provides the broadcast for each client.
        experiment: the name under which clients keep their state.
        dtype: of payloads on the wire.
        malicious: clients that send falsified uploads.
        best: the best round so far, whose client states are kept; 0 if none are.
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
        """Return the phase with its messages, which are still to be sent.

        Args:
            state: of the server.
            roster: contains all clients in ``kinds``.
            kinds: client -> "train" or "evaluate".
            server_round: from 1.
            absent: client -> why it gets no message.
        """
        messages, down, scalars, names = [], {}, 0, roster.names
        # A broadcast that is the same object for several clients is encoded once. The payload is kept with its
        # encoding, since the id of a deleted object may be reused.
        encoded: dict[int, tuple[Payload, ArrayRecord]] = {}
        for client in sorted(kinds):
            payload = self.method.broadcast(state, client)
            if id(payload) not in encoded:
                encoded[id(payload)] = payload, wire.encode(payload, self.dtype)
            config = ConfigRecord({"round": server_round, "experiment": self.experiment})
            if client in names:
                config["client"] = client  # clients without a name know their number
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
            messages.append((message, client))
        training = {client for client, kind in kinds.items() if kind == "train"}
        started = time.perf_counter()
        return Phase(
            messages, training, down, scalars, started, names, server_round, dict(absent), self.malicious
        )
