"""Replies after the deadline of their round: which are outstanding, and which have arrived.

A client handles one message at a time. A client with an outstanding reply gets no new message until it has replied or
MAX_OVERDUE_ROUNDS rounds have passed. Flower stores a late reply until it is fetched before the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

MAX_OVERDUE_ROUNDS = 3


@dataclass(frozen=True)
class OverdueReply:
    """A reply that missed its deadline: its client and round, and whether the message was for training."""

    client: int
    round: int
    training: bool


class OverdueReplies:
    """Overdue replies: those still outstanding and those received late."""

    def __init__(self) -> None:
        self._awaited: dict[str, OverdueReply] = {}  # by the id of the message they answer
        self._received: list[tuple[OverdueReply, Message]] = []

    def add(self, unanswered: Mapping[str, OverdueReply]) -> None:
        """Add the messages, by id, that had no reply at the deadline."""
        self._awaited |= unanswered

    def collect(self, grid: Grid) -> None:
        """Fetch the replies that have arrived."""
        if not self._awaited:
            return
        for reply in grid.pull_messages(list(self._awaited)):
            overdue = self._awaited.pop(reply.metadata.reply_to_message_id, None)
            if overdue is not None:
                self._received.append((overdue, reply))

    def outstanding(self, server_round: int) -> dict[int, int]:
        """Return client -> round of its outstanding reply; drops replies overdue for MAX_OVERDUE_ROUNDS or more."""
        self._awaited = {
            message_id: overdue
            for message_id, overdue in self._awaited.items()
            if server_round - overdue.round < MAX_OVERDUE_ROUNDS
        }
        return {overdue.client: overdue.round for overdue in self._awaited.values()}

    def forget(self, client: int) -> None:
        """Drop a client's outstanding replies, since it now runs on another node."""
        self._awaited = {
            message_id: overdue for message_id, overdue in self._awaited.items() if overdue.client != client
        }

    def restore(self, taken: Iterable[tuple[OverdueReply, Message]]) -> None:
        """Put back replies taken for a round that is repeated."""
        self._received += taken

    def take(self) -> list[tuple[OverdueReply, Message]]:
        """Return and remove the late replies received, newest round first."""
        received, self._received = self._received, []
        return sorted(received, key=lambda item: (-item[0].round, item[0].client))
