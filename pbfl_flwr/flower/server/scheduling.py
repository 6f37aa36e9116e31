"""The order in which a simulation's clients are started."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message


class LongestFirst:
    """Orders messages by the time they took last, longest first, so no long training starts when others are done."""

    def __init__(self) -> None:
        self._durations: dict[tuple[int, str], float] = {}  # seconds, by node and kind of message

    def ordered(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages, longest first; those without a recorded duration last, in their given order."""
        return sorted(messages, key=lambda message: self._durations.get(_job(message), 0.0), reverse=True)

    def record_duration(self, message: Message, seconds: float) -> None:
        """Record how long a message took to be answered."""
        self._durations[_job(message)] = seconds


def _job(message: Message) -> tuple[int, str]:
    return message.metadata.dst_node_id, message.metadata.message_type
