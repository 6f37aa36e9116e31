"""Sending messages and waiting for replies: how often to poll, and logging which ones are missing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from logging import INFO
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from pbfl_flwr.errors import abbreviate

FIRST_LOG = 60.0  # seconds until the first log line; the interval then doubles
MIN_INTERVAL, MAX_INTERVAL = 0.5, 3.0  # seconds between two polls; a SuperLink logs each
INTERVAL_SHARE = 0.02  # poll interval as a share of the time waited so far
PARTIAL_WAIT = 3.0  # seconds to wait for the rest of a partly received reply before polling for the others
# Flower also reports these for a reply that another poll is fetching, or if the node's heartbeats are delayed.
TRANSIENT_ERRORS = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)

OnWait = Callable[[str], object]
"""Called with a line that says what the server waits for."""
NodeLabel = Callable[[int], str]
"""Node id -> readable label of the client on it."""


def ignore(line: str) -> None:
    """The default :data:`OnWait`: does nothing."""


def poll(
    timeout: float,
    status: Callable[[], str],
    on_wait: OnWait = ignore,
    interval: float | None = None,
    rest: Callable[[float], object] | None = None,
) -> Iterator[None]:
    """Yield at each time to poll, the last time when the timeout has passed.

    Args:
        timeout: seconds.
        status: returns the line that is logged, with the seconds, after one minute, two, four and so on.
        on_wait: called with the same line.
        interval: seconds between two polls; by default a share of the time waited so far.
        rest: called with the seconds to wait, may return earlier if there is something to poll; by default sleep.
    """
    started, next_log = time.monotonic(), FIRST_LOG
    while True:
        yield
        waited = time.monotonic() - started
        if waited >= timeout:
            return
        if waited >= next_log:
            line = f"{status()}, {waited:.0f} s so far"
            log(INFO, "%s", line)
            on_wait(line)
            next_log *= 2
        pause = interval or max(MIN_INTERVAL, INTERVAL_SHARE * waited)
        (rest or time.sleep)(min(pause, MAX_INTERVAL, timeout - waited))


def waiting_line(messages: Sequence[Message], awaited: Iterable[Message], label: NodeLabel) -> str:
    """Return a line that names the clients whose replies are missing."""
    group = messages[0].metadata.group_id
    phase = f"round {group}" if group.isdigit() else group
    labels = [label(message.metadata.dst_node_id) for message in awaited]
    answered = len(messages) - len(labels)
    return f"{phase}: {answered} of {len(messages)} have answered; waiting for {abbreviate(labels)}"


@runtime_checkable
class ReportsWaiting(Protocol):
    """A grid that reports by itself which clients it waits for."""

    def report_waiting(self, label: NodeLabel, on_wait: OnWait) -> None:
        """Set how clients are labelled, and what is called with each line that is logged."""


def polling(grid: Grid, label: NodeLabel, on_wait: OnWait = ignore) -> Grid:
    """Return a grid that reports which clients it waits for; a grid neither ours nor Flower's is returned as it is."""
    if isinstance(grid, ReportsWaiting):
        grid.report_waiting(label, on_wait)
    return PollingGrid(grid, label, on_wait) if type(grid).__module__.split(".")[0] == "flwr" else grid


class PollingGrid(Grid):
    """Wraps Flower's grid: reports which clients it waits for, and adapts the poll interval to the time waited.

    Flower's grid waits silently and, on devices, polls every three seconds. There it also blocks until a partly
    received reply is complete, past the timeout and without fetching other replies. Here that wait runs concurrently,
    see :class:`ConcurrentPulls`.
    """

    def __init__(self, grid: Grid, label: NodeLabel, on_wait: OnWait = ignore) -> None:
        self._grid, self._label, self._on_wait = grid, label, on_wait
        self._interval = getattr(grid, "pull_interval", None)  # simulation only, where polling is free
        self._pulls = ConcurrentPulls(grid)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies that arrive in time, in order of arrival.

        A message that Flower does not accept is not waited for; there is at most one per node. The timeout is in
        seconds; None waits for all.
        """
        sent = list(messages)
        accepted = {message_id for message_id in self._grid.push_messages(sent) if message_id}
        awaited = {m.metadata.message_id: m for m in sent if m.metadata.message_id in accepted}
        replies: list[Message] = []

        def status() -> str:
            return waiting_line(sent, awaited.values(), self._label)

        for _ in poll(math.inf if timeout is None else timeout, status, self._on_wait, self._interval):
            for reply in self.pull_messages(list(awaited)) if awaited else ():
                replies.append(reply)
                awaited.pop(reply.metadata.reply_to_message_id, None)
            if not awaited:
                break
        return replies

    # The remaining methods forward to Flower's grid, except pull_messages on devices ---------------------------

    @property
    def run(self) -> Run:
        """Flower's run."""
        return self._grid.run

    def set_run(self, run: Run) -> None:
        """Set Flower's run."""
        self._grid.set_run(run)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        if self._interval is not None:
            return self._grid.pull_messages(message_ids)
        return self._pulls.pull(list(message_ids))


class ConcurrentPulls:
    """Pulls replies of devices without letting a partly received reply block the others.

    A SuperLink delivers a reply once, as soon as its first bytes are there, and Flower's grid then blocks until the
    rest arrives. So every pull runs in its own thread. A blocked thread delivers its replies later, and the next pull
    fetches the other ones.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pulls: list[tuple[threading.Thread, Collection[str]]] = []
        self._results: SimpleQueue[list[Message] | Exception] = SimpleQueue()
        self._replies: dict[str, Message] = {}  # by the id of the message they answer
        self._errors: dict[str, Message] = {}  # likewise, transient errors of Flower in place of a reply

    def pull(self, message_ids: list[str]) -> list[Message]:
        """Return the replies to these messages that have arrived completely, each once.

        Raises:
            Exception: whatever Flower's grid raised.
        """
        # A daemon, so that a blocked pull does not delay the exit.
        pull = threading.Thread(target=self._pull, args=(message_ids,), daemon=True)
        self._pulls.append((pull, message_ids))
        pull.start()
        pull.join(PARTIAL_WAIT)
        self._pulls = [(thread, ids) for thread, ids in self._pulls if thread.is_alive()]
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, Exception):
                raise result
            for reply in result:
                transient = reply.has_error() and reply.error.code in TRANSIENT_ERRORS
                replies = self._errors if transient else self._replies
                replies[reply.metadata.reply_to_message_id] = reply
        pending = {message_id for _, ids in self._pulls for message_id in ids}
        for message_id in self._errors.keys() - pending:
            error = self._errors.pop(message_id)
            self._replies.setdefault(message_id, error)
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def _pull(self, message_ids: list[str]) -> None:
        try:
            self._results.put(list(self._grid.pull_messages(message_ids)))
        except Exception as error:
            self._results.put(error)
