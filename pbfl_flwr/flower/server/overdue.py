"""Replies that missed the deadline of their round.

A client handles one message at a time: one with an overdue reply gets no new message until it has replied or
MAX_OVERDUE_ROUNDS rounds have passed. Flower stores late replies until they are fetched; then they are discarded. They
are asked for in every round until Flower, which keeps a message for some hours, answers with an error in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

MAX_OVERDUE_ROUNDS = 3


@dataclass(frozen=True)
class OverdueReply:
    """A reply that missed its deadline: its client and round."""

    client: int
    round: int


class OverdueReplies:
    """Overdue replies that are still outstanding."""

    def __init__(self) -> None:
        self._awaited: dict[str, OverdueReply] = {}  # by the id of the message they answer

    def add(self, unanswered: Mapping[str, OverdueReply]) -> None:
        """Add the messages, by id, that had no reply at the deadline."""
        self._awaited |= unanswered

    def answered(self, replies: Iterable[Message]) -> None:
        """Drop the messages whose replies these are."""
        for reply in replies:
            self._awaited.pop(reply.metadata.reply_to_message_id, None)

    def collect(self, grid: Grid) -> list[tuple[OverdueReply, Message]]:
        """Fetch the replies that have arrived, which are no longer outstanding."""
        replies = list(grid.pull_messages(list(self._awaited))) if self._awaited else []
        answered = [(self._awaited.pop(reply.metadata.reply_to_message_id, None), reply) for reply in replies]
        return [(overdue, reply) for overdue, reply in answered if overdue is not None]

    def outstanding(self, server_round: int) -> dict[int, int]:
        """Return client -> round of its outstanding reply if it is overdue for less than MAX_OVERDUE_ROUNDS."""
        return {
            overdue.client: overdue.round
            for overdue in self._awaited.values()
            if server_round - overdue.round < MAX_OVERDUE_ROUNDS
        }

    def forget(self, client: int) -> None:
        """Drop a client's outstanding replies, since it now runs on another node."""
        self._awaited = {
            message_id: overdue for message_id, overdue in self._awaited.items() if overdue.client != client
        }
