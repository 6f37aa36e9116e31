"""Sending messages and waiting for replies: in which order, how often to poll, and logging which ones are missing."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from logging import INFO
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import joblib
from flwr.app import DEFAULT_TTL, Error, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from pbfl_flwr.errors import FEW, abbreviate
from pbfl_flwr.flower.messages.report import seconds_in
from pbfl_flwr.flower.messages.wire import METRICS

FIRST_LOG = 60.0  # seconds until the first log line; the interval then doubles
MIN_INTERVAL, MAX_INTERVAL = 0.5, 3.0  # seconds between two polls; a SuperLink logs each
INTERVAL_SHARE = 0.02  # poll interval as a share of the time waited so far
MAX_BATCHES = 8  # in which a simulation's messages are pushed
BATCH_PAUSE = 0.15  # seconds between two batches; Flower's simulation forwards messages every 0.1 s
PARTIAL_WAIT = 3.0  # seconds to wait for the rest of partly received replies before polling for the others
BRIEF_WAIT = 0.1  # likewise, for each more if several have used these up
# Flower also reports these for a reply that another poll is fetching, or if the node's heartbeats are delayed.
TRANSIENT_ERRORS = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
CLIENT, CONNECTED = "_client", "_runtime_client"  # of Flower's grid on devices; the second connects first
MIN_PHASE_PER_PAUSE = 10  # push in batches only if the last phase lasted this many times the pauses

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
    nodes = [message.metadata.dst_node_id for message in awaited]
    answered = len(messages) - len(nodes)
    names = [*map(label, nodes[:FEW]), *map(str, nodes[FEW:])]  # a label is looked for among all clients
    return f"{phase}: {answered} of {len(messages)} have answered; waiting for {abbreviate(names)}"


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


def lifetime(timeout: float) -> float:
    """Return for how many seconds Flower keeps a message whose reply is waited for so many, and the reply.

    Flower's own 12 hours would end a longer wait; a late reply, which frees its client, has as long again.
    """
    return max(DEFAULT_TTL, 2 * timeout)


def simulates(grid: Grid) -> bool:
    """Whether this is the grid of Flower's simulation, which has all its nodes soon after the start."""
    return getattr(grid, "pull_interval", None) is not None


class PollingGrid(Grid):
    """Wraps Flower's grid: reports which clients it waits for, and adapts the poll interval to the time waited.

    Flower's grid waits silently and, on devices, polls every three seconds. Its simulation passes messages to the
    workers in the order of node ids, so at the end one worker may be busy with a long training while the others are
    idle. Here the clients that took longest in the previous round go first.

    On devices, Flower's grid also blocks until a partly received reply is complete, past the timeout and without
    fetching other replies. Here that wait runs concurrently, see :class:`ConcurrentPulls`.
    """

    def __init__(self, grid: Grid, label: NodeLabel, on_wait: OnWait = ignore) -> None:
        self._grid, self._label, self._on_wait = grid, label, on_wait
        self.pull_interval = getattr(grid, "pull_interval", None)  # simulation only, where polling is free
        self._order, self._last_duration = LongestFirst(), 0.0
        self._pulls = ConcurrentPulls(grid)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies that arrive in time, in order of arrival.

        A message that Flower does not accept is not waited for; there is at most one per node. If its node has left,
        the reply is Flower's error for a lost one. The timeout is in seconds; None waits for all.
        """
        batch, started = list(messages), time.monotonic()
        accepted = {message_id for message_id in self._push(batch) if message_id}
        awaited = {m.metadata.message_id: m for m in batch if m.metadata.message_id in accepted}
        replies = self._left([m for m in batch if m.metadata.message_id not in accepted])

        def status() -> str:
            return waiting_line(batch, awaited.values(), self._label)

        for _ in poll(math.inf if timeout is None else timeout, status, self._on_wait, self.pull_interval):
            for reply in self.pull_messages(list(awaited)) if awaited else ():
                replies.append(reply)
                message = awaited.pop(reply.metadata.reply_to_message_id, None)
                if message is not None:
                    self._record_duration(message, reply)
            if not awaited:
                break
        self._last_duration = time.monotonic() - started
        return replies

    def _left(self, refused: Sequence[Message]) -> list[Message]:
        """Answer for nodes that are no longer there; Flower forgets those without a key that have signed off."""
        online = set(self._grid.get_node_ids()) if refused else set()
        gone = [message for message in refused if message.metadata.dst_node_id not in online]
        error = Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable")
        return [Message(error, reply_to=message) for message in gone]

    def _record_duration(self, message: Message, reply: Message) -> None:
        record = reply.content.get(METRICS) if reply.has_content() else None
        if self.pull_interval is not None and isinstance(record, MetricRecord):
            self._order.record_duration(message, seconds_in(record))

    def _push(self, messages: list[Message]) -> Iterator[str]:
        """Push messages, in batches if it is a simulation and phases last long enough, and yield their ids."""
        # The first batch occupies all workers.
        size = max(joblib.cpu_count(), math.ceil(len(messages) / MAX_BATCHES))
        pauses = math.ceil(len(messages) / size) - 1
        if self.pull_interval is None or self._last_duration < MIN_PHASE_PER_PAUSE * BATCH_PAUSE * pauses:
            size, pauses = len(messages), 0
        queue = self._order.ordered(messages)
        for batch in range(pauses + 1):
            if batch:
                time.sleep(BATCH_PAUSE)
            yield from self._grid.push_messages(queue[batch * size : (batch + 1) * size])

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

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the connected nodes with their public keys."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        if self.pull_interval is not None:
            return self._grid.pull_messages(message_ids)
        return self._pulls.pull(list(message_ids))


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


class ConcurrentPulls:
    """Pulls replies of devices without letting a partly received reply block the others.

    A SuperLink delivers a reply once, as soon as its first bytes are there, and Flower's grid then blocks until the
    rest arrives. So every pull runs in its own thread and takes one reply, see :class:`_OneAtATime`. A blocked thread
    delivers it later, and the next pull fetches the other ones.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._answers: _OneAtATime | None = None
        self._pulls: list[tuple[threading.Thread, Collection[str]]] = []
        self._results: SimpleQueue[list[Message] | Exception] = SimpleQueue()
        self._replies: dict[str, Message] = {}  # by the id of the message they answer
        self._errors: dict[str, Message] = {}  # likewise, transient errors of Flower in place of a reply

    def pull(self, message_ids: list[str]) -> list[Message]:
        """Return the replies to these messages that have arrived completely, each once.

        Raises:
            Exception: whatever Flower's grid raised.
        """
        grid, until = self._with_single_answers(), time.monotonic() + PARTIAL_WAIT
        for _ in message_ids:
            # A daemon, so that a blocked pull does not delay the exit.
            pull = threading.Thread(target=self._pull, args=(grid, message_ids), daemon=True)
            self._pulls.append((pull, message_ids))
            pull.start()
            pull.join(max(BRIEF_WAIT, until - time.monotonic()))
            if self._answers is None or not self._answers.kept:
                break
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

    def _with_single_answers(self) -> Grid:
        """Return a copy of Flower's grid on devices whose answers have one reply each; the app may use its own on."""
        if (client := getattr(self._grid, CONNECTED, None)) is None:
            return self._grid
        if self._answers is None or self._answers.client is not client:
            self._answers = _OneAtATime(client)
        setattr(single := copy(self._grid), CLIENT, self._answers)
        return single

    def _pull(self, grid: Grid, message_ids: list[str]) -> None:
        try:
            self._results.put(list(grid.pull_messages(message_ids)))
        except Exception as error:
            self._results.put(error)


class _OneAtATime:
    """What Flower's grid asks the SuperLink with, whose every answer then has one reply.

    Flower's grid makes all replies of an answer, one after the other, before it returns any. A device that sends the
    first half of a reply would hold back those that others have sent meanwhile, until the round is over.

    Attributes:
        client: what Flower's grid asked with.
        kept: replies for the next answers.
    """

    def __init__(self, client: Any) -> None:
        self.client, self._lock = client, threading.Lock()
        self.kept: deque[Any] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802, Flower's
        """Return one reply; ask the SuperLink if none is kept."""
        with self._lock:
            if not self.kept:
                pulled = self.client.PullMessages(request)
                self.kept.extend(zip(pulled.messages_list, pulled.message_object_trees, strict=True))
            one = [self.kept.popleft()] if self.kept else []
        return PullAppMessagesResponse(
            messages_list=[message for message, _ in one], message_object_trees=[tree for _, tree in one]
        )
