"""Answers that come after their round's deadline: who still owes one, and where they are when they come.

A client works on one question at a time. One that has not answered is not asked again until it has, or until
PATIENCE rounds have passed; Flower keeps what it sends meanwhile, and it is fetched before the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

PATIENCE = 3  # rounds


@dataclass(frozen=True)
class OverdueReply:
    """An answer that did not come in time: of which client, to which round's question, and whether it was to train."""

    client: int
    round: int
    training: bool


class OverdueReplies:
    """The answers that are still awaited, and those that came late."""

    def __init__(self) -> None:
        self._awaited: dict[str, OverdueReply] = {}  # by the id of the question
        self._came: list[tuple[OverdueReply, Message]] = []

    def note(self, unanswered: Mapping[str, OverdueReply]) -> None:
        """Write down what was not answered by the deadline."""
        self._awaited |= unanswered

    def collect(self, grid: Grid) -> None:
        """Fetch what has come since."""
        if not self._awaited:
            return
        for reply in grid.pull_messages(list(self._awaited)):
            overdue = self._awaited.pop(reply.metadata.reply_to_message_id, None)
            if overdue is not None:
                self._came.append((overdue, reply))

    def outstanding(self, server_round: int) -> dict[int, int]:
        """Return client -> the round that it still has to answer; who owes for PATIENCE rounds may be asked again."""
        self._awaited = {
            q: overdue for q, overdue in self._awaited.items() if server_round - overdue.round < PATIENCE
        }
        return {overdue.client: overdue.round for overdue in self._awaited.values()}

    def forget(self, client: int) -> None:
        """Await nothing any more from a client: it runs on another node now."""
        self._awaited = {q: overdue for q, overdue in self._awaited.items() if overdue.client != client}

    def restore(self, taken: Iterable[tuple[OverdueReply, Message]]) -> None:
        """Have what was taken for a round handed over once more, since that round is asked again."""
        self._came += taken

    def take(self) -> list[tuple[OverdueReply, Message]]:
        """Return what came late, once, the newest first."""
        came, self._came = self._came, []
        return sorted(came, key=lambda item: (-item[0].round, item[0].client))
