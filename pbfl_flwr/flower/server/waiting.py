"""Waiting for clients: looking in often enough, and saying whom one waits for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from logging import INFO
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

import joblib
from flwr.app import Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from pbfl_flwr.errors import some
from pbfl_flwr.flower.messages.report import seconds_in
from pbfl_flwr.flower.messages.wire import METRICS
from pbfl_flwr.flower.server.scheduling import LongestFirst

FIRST_WORD = 60.0  # seconds of silence; then twice as long, and so on
SHORTEST, LONGEST = 0.5, 3.0  # seconds between two looks; a SuperLink logs each
SHARE = 0.02  # of what was waited already
PARTS = 8  # at most, in which a simulation's messages are pushed
PAUSE = 0.15  # seconds between two of them: Flower's simulation hands on what lies there every 0.1 s
HALF_COME = 3.0  # seconds in which an answer that began to come is waited for before one looks at the others
# Flower says these also of an answer that another look is fetching, or whose node's heartbeats do not get through.
DOUBTFUL = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
WORTH = 10  # times the pauses is what a phase must have lasted to be pushed in parts

OnWait = Callable[[str], object]
"""Takes a line on whom one waits for."""
NameOf = Callable[[int], str]
"""Says how a person calls the client on a node."""


def ignore(line: str) -> None:
    """Nobody listens beside the log."""


def poll(
    timeout: float,
    say: Callable[[], str],
    on_wait: OnWait = ignore,
    interval: float | None = None,
    rest: Callable[[float], object] | None = None,
) -> Iterator[None]:
    """Yield whenever it is time to look, for the last time when the time is over.

    Args:
        timeout: seconds.
        say: what is logged after one minute, two, four and so on, before the seconds.
        on_wait: is told the same.
        interval: seconds between two looks; by default a share of what was waited already.
        rest: lets these seconds pass, or fewer if there is something to see; by default sleep.
    """
    started, word = time.monotonic(), FIRST_WORD
    while True:
        yield
        waited = time.monotonic() - started
        if waited >= timeout:
            return
        if waited >= word:
            line = f"{say()}, {waited:.0f} s so far"
            log(INFO, "%s", line)
            on_wait(line)
            word *= 2
        (rest or time.sleep)(min(interval or max(SHORTEST, SHARE * waited), LONGEST, timeout - waited))


def waiting_line(asked: Sequence[Message], awaited: Iterable[Message], called: NameOf) -> str:
    """Return whom one waits for, in words.

    Args:
        asked: all messages of the round, at least one.
        awaited: those that have no answer yet.
        called: how a person calls the client on a node.
    """
    group = asked[0].metadata.group_id
    what = f"round {group}" if group.isdigit() else group
    names = [called(message.metadata.dst_node_id) for message in awaited]
    return f"{what}: {len(asked) - len(names)} of {len(asked)} have answered; waiting for {some(names)}"


@runtime_checkable
class ReportsWaiting(Protocol):
    """A grid that can say itself whom it waits for."""

    def report_waiting(self, called: NameOf, on_wait: OnWait) -> None:
        """Take how a person calls the client on a node, and who is told what is logged."""


def polling(grid: Grid, called: NameOf, on_wait: OnWait = ignore) -> Grid:
    """Return a grid that says whom it waits for, if this is one of ours or Flower's; others wait as they like."""
    if isinstance(grid, ReportsWaiting):
        grid.report_waiting(called, on_wait)
    return PollingGrid(grid, called, on_wait) if type(grid).__module__.split(".")[0] == "flwr" else grid


class PollingGrid(Grid):
    """A grid that says whom it waits for, and looks for answers as often as the time they take is worth.

    Flower's own waits without a word and, where clients are devices, looks every three seconds. Its simulation hands
    messages to the workers in the order of their nodes, so that at the end one may be busy with a long training while
    the others have nothing left to do. Here those who took longest the last time go first.

    Where clients are devices, Flower's own also waits for the last byte of an answer that has begun to come, past any
    deadline and deaf to all others. Here that happens beside the rest, see :class:`ConcurrentPulls`.

    Args:
        grid: Flower's.
        called: how a person calls the client on a node.
        on_wait: is told what is logged.
    """

    def __init__(self, grid: Grid, called: NameOf, on_wait: OnWait = ignore) -> None:
        self._grid, self._called, self._on_wait = grid, called, on_wait
        self._interval = getattr(
            grid, "pull_interval", None
        )  # of the simulation's, where looking costs nothing
        self._order, self._lasted = LongestFirst(), 0.0
        self._pulls = ConcurrentPulls(grid)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the answers that come in time, in the order in which they come.

        A message that Flower does not take is not waited for.

        Args:
            messages: at most one a node.
            timeout: seconds; None waits for all.
        """
        asked, started = list(messages), time.monotonic()
        sent = {message_id for message_id in self._pushed(asked) if message_id}
        awaited = {m.metadata.message_id: m for m in asked if m.metadata.message_id in sent}
        came: list[Message] = []

        def say() -> str:
            return waiting_line(asked, awaited.values(), self._called)

        for _ in poll(math.inf if timeout is None else timeout, say, self._on_wait, self._interval):
            for answer in self.pull_messages(list(awaited)) if awaited else ():
                came.append(answer)
                question = awaited.pop(answer.metadata.reply_to_message_id, None)
                if question is not None:
                    self._learn(question, answer)
            if not awaited:
                break
        self._lasted = time.monotonic() - started
        return came

    def _learn(self, question: Message, answer: Message) -> None:
        record = answer.content.get(METRICS) if answer.has_content() else None
        if self._interval is not None and isinstance(record, MetricRecord):
            self._order.record_duration(question, seconds_in(record))

    def _pushed(self, asked: list[Message]) -> Iterator[str]:
        """Push messages, a simulation's in parts if it is long enough, and yield their ids."""
        size = max(joblib.cpu_count(), math.ceil(len(asked) / PARTS))  # no worker waits for the second part
        pauses = math.ceil(len(asked) / size) - 1
        if self._interval is None or self._lasted < WORTH * PAUSE * pauses:
            size, pauses = len(asked), 0
        queue = self._order.ordered(asked)
        for part in range(pauses + 1):
            if part:
                time.sleep(PAUSE)
            yield from self._grid.push_messages(queue[part * size : (part + 1) * size])

    # The rest is the grid's own ----------------------------------------------------------------------------

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
        """Return the nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that have come."""
        if self._interval is not None:
            return self._grid.pull_messages(message_ids)
        return self._pulls.of(list(message_ids))


class ConcurrentPulls:
    """Answers of devices, each fetched without waiting for those of which only a part has come.

    A SuperLink hands an answer out once, when its first bytes are there, and Flower's grid then waits for the rest. So
    every look is a thread of its own. One that waits keeps its answers; the next look is given those of the others.

    Args:
        grid: Flower's.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._looks: list[tuple[threading.Thread, Collection[str]]] = []
        self._done: SimpleQueue[list[Message] | Exception] = SimpleQueue()
        self._came: dict[str, Message] = {}  # by the id of the question
        self._errors: dict[str, Message] = {}  # likewise, Flower's, in place of an answer

    def of(self, message_ids: list[str]) -> list[Message]:
        """Return the answers to these questions that have come as a whole, each once.

        Raises:
            Exception: what Flower's grid raised.
        """
        look = threading.Thread(target=self._look, args=(message_ids,), daemon=True)  # none holds the end up
        self._looks.append((look, message_ids))
        look.start()
        look.join(HALF_COME)
        self._looks = [(thread, ids) for thread, ids in self._looks if thread.is_alive()]
        while not self._done.empty():
            found = self._done.get()
            if isinstance(found, Exception):
                raise found
            for answer in found:
                doubtful = answer.has_error() and answer.error.code in DOUBTFUL
                kept = self._errors if doubtful else self._came
                kept[answer.metadata.reply_to_message_id] = answer
        perhaps = {question for _, ids in self._looks for question in ids}
        for question in self._errors.keys() - perhaps:
            error = self._errors.pop(question)
            self._came.setdefault(question, error)
        return [self._came.pop(question) for question in message_ids if question in self._came]

    def _look(self, message_ids: list[str]) -> None:
        try:
            self._done.put(list(self._grid.pull_messages(message_ids)))
        except Exception as error:
            self._done.put(error)
