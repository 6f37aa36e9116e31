"""In which order the clients of a simulation begin."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message


class LongestFirst:
    """Those first who took longest the last time.

    So no worker begins a long training when the others have nothing left to do.
    """

    def __init__(self) -> None:
        self._durations: dict[tuple[int, str], float] = {}  # seconds, by node and kind of message

    def ordered(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages in the order of their turns; those of whom nothing is known last, as they came."""
        return sorted(messages, key=lambda message: self._durations.get(_job(message), 0.0), reverse=True)

    def record_duration(self, message: Message, seconds: float) -> None:
        """Remember what answering a message has taken."""
        self._durations[_job(message)] = seconds


def _job(message: Message) -> tuple[int, str]:
    return message.metadata.dst_node_id, message.metadata.message_type
