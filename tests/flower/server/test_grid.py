"""Waiting: how often one looks, what is said of whom, and that nothing which comes is lost."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from flwr.app import DEFAULT_TTL, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.server.superlink.linkstate.utils import message_ttl_has_expired
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server import grid as waiting
from pbfl_flwr.flower.server import handshake
from pbfl_flwr.flower.server.grid import PollingGrid, poll, polling, waiting_line
from pbfl_flwr.flower.server.handshake import wait_for_nodes
from pbfl_flwr.flower.server.roster import Roster
from tests.flower.inprocess import Answer, Clock, Delayed, InProcessGrid, federation


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (waiting, handshake):
        monkeypatch.setattr(module, "time", clock)
    return clock


class SlowGrid(InProcessGrid):
    """As Flower's grid: it takes no message to a node that is not there, and must be looked at to hand out replies.

    Args:
        clock: of the test.
        seconds: node -> after how many it has joined, and after how many it replies.
    """

    def __init__(self, clock: Clock, seconds: dict[int, float]) -> None:
        super().__init__(self.reply, {}, nodes=list(seconds), partitions=list(seconds), clock=clock)
        self.faults = {(node, number): self.slowly for node in seconds for number in (0, 3)}
        self.joined, self.pulls = seconds, 0
        self.online = lambda: [node for node, joined in seconds.items() if joined <= clock.now]
        self.pull_interval: float | None = None
        self.pushed: list[tuple[float, list[int]]] = []

    def reply(self, message: Message, context: Context) -> Message:
        report = Report(1, 1, seconds={"fit": self.joined[context.node_id]}).to_record()
        return Message(wire.content(report=report), reply_to=message)

    def slowly(self, message: Message, answer: Answer) -> Delayed:
        return Delayed(answer(), self.joined[message.metadata.dst_node_id])

    def push_messages(self, messages: Iterable[Message]) -> list[Any]:
        sent = list(messages)
        self.pushed.append((self.clock.now, [message.metadata.dst_node_id for message in sent]))
        known = [message for message in sent if message.metadata.dst_node_id in self.joined]
        taken = dict(zip(map(id, known), super().push_messages(known), strict=True))
        return [taken.get(id(message)) for message in sent]  # None, as Flower has it

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.pulls += 1
        return super().pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise AssertionError("this would wait in silence")


def questions(*nodes: int, group: str = "3") -> list[Message]:
    content = RecordDict({"config": ConfigRecord({"round": 3})})
    return [Message(content, dst_node_id=node, message_type="train", group_id=group) for node in nodes]


def ids(*messages: Message) -> list[str]:
    return [message.metadata.message_id for message in messages]


def senders(answers: Iterable[Message]) -> list[int]:
    return [answer.metadata.src_node_id for answer in answers]


def test_returns_when_the_last_reply_arrives(clock: Clock) -> None:
    grid = SlowGrid(clock, {1: 0.25, 2: 5.0, 3: 0.0})
    assert senders(PollingGrid(grid, str).send_and_receive(questions(1, 2, 3), timeout=5)) == [3, 1, 2]
    assert clock.now == 5.0, "one that comes at the deadline counts"
    assert clock.now / grid.pulls > 0.4  # looks come every half second at first
    grid = SlowGrid(clock, {1: 104.9})
    grid.pull_interval = 0.1  # of Flower's simulation
    assert senders(PollingGrid(grid, str).send_and_receive(questions(1), timeout=600)) == [1]
    assert 109.9 <= clock.now < 110.1


def test_poll_interval_grows_with_the_waiting_time(clock: Clock) -> None:
    grid = SlowGrid(clock, {1: 1000.0})
    assert senders(PollingGrid(grid, str).send_and_receive(questions(1), timeout=None)) == [1]
    assert clock.now < 1003.1
    # Every 0.5 s for 25 s, then by 2 % more each time up to 3 s at 150 s, then every 3 s.
    assert grid.pulls < 25 / 0.5 + math.log(150 / 25) / math.log(1.02) + 850 / 3 + 10


def test_slowest_simulated_clients_go_first(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower hands on what lies there in the order of nodes: in parts, none of which leaves a core idle."""
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    monkeypatch.setattr(waiting, "MAX_BATCHES", 3)
    monkeypatch.setattr(waiting, "MIN_PHASE_PER_PAUSE", 20)
    grid = SlowGrid(clock, {1: 1.0, 2: 5.0, 3: 3.0, 4: 9.0, 5: 2.0})
    grid.pull_interval = 0.1
    watched = PollingGrid(grid, str)
    for asked in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 5], [1, 2, 3]):
        watched.send_and_receive(questions(*asked), timeout=60)
    (_, first), (begun, *second), third, fourth, *others = grid.pushed
    assert first == [1, 2, 3, 4, 5]
    assert [second, third[1], fourth[1]] == [[[4, 2]], [3, 5], [1]]
    assert [third[0] - begun, fourth[0] - begun] == pytest.approx(
        [waiting.BATCH_PAUSE, 2 * waiting.BATCH_PAUSE]
    )
    # Two clients are one part anyway; after a phase of two seconds a pause would not be worth it.
    assert [nodes for _, nodes in others] == [[5, 1], [2, 3, 1]]
    devices = SlowGrid(clock, {1: 1.0, 2: 50.0})
    watched = PollingGrid(devices, str)
    for _ in range(2):
        watched.send_and_receive(questions(1, 2), timeout=60)
    assert [nodes for _, nodes in devices.pushed] == [[1, 2], [1, 2]]


def test_late_reply_can_be_pulled_after_the_timeout(clock: Clock) -> None:
    grid = SlowGrid(clock, {1: 0.0, 2: 10.0})
    polling_grid, asked = PollingGrid(grid, str), questions(1, 2)
    assert senders(polling_grid.send_and_receive(asked, timeout=4.0)) == [1]
    assert clock.now == pytest.approx(4.0)
    clock.sleep(6.5)
    assert senders(polling_grid.pull_messages(ids(*asked))) == [2]


@pytest.mark.parametrize("timeout", [60.0, 43_200.0, 86_400.0])
def test_flower_keeps_messages_as_long_as_replies_are_waited_for(tmp_path: Path, timeout: float) -> None:
    run = federation(tmp_path, "fedavg", models="cnn4", fraction_train=0.5, round_timeout=timeout).run()
    assert {message.metadata.message_type for message in run.grid.sent} == {"query", "train", "evaluate"}
    for sent in (message.metadata for message in run.grid.sent):
        assert not message_ttl_has_expired(sent, sent.created_at + timeout + 60)
        assert sent.ttl >= DEFAULT_TTL


def test_does_not_wait_for_refused_messages(clock: Clock) -> None:
    """Those to nodes that have left are answered as those to lost ones; others, e.g. too large ones, are not."""
    grid = SlowGrid(clock, {1: 1.0})
    asked = questions(1, 7)
    lost, answer = PollingGrid(grid, str).send_and_receive(asked, timeout=600)
    assert lost.error.code == ErrorCode.NODE_UNAVAILABLE
    assert lost.metadata.reply_to_message_id == asked[1].metadata.message_id
    assert senders([answer]) == [1]
    assert clock.now < 2
    grid.online = lambda: [1, 7]
    assert PollingGrid(grid, str).send_and_receive(questions(7), timeout=600) == []
    assert PollingGrid(grid, str).send_and_receive([], timeout=600) == []
    assert clock.now < 2


def test_exception_of_the_grid_ends_the_waiting(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: SlowGrid, message_ids: Iterable[str]) -> list[Message]:
        raise ConnectionError("the SuperLink is gone")

    monkeypatch.setattr(SlowGrid, "pull_messages", gone)
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        PollingGrid(SlowGrid(clock, {1: 1.0}), str).send_and_receive(questions(1), timeout=600)


@pytest.mark.parametrize("interval", [None, 0.1])
def test_error_is_a_reply(clock: Clock, monkeypatch: pytest.MonkeyPatch, interval: float | None) -> None:
    asked = questions(1)
    monkeypatch.setattr(SlowGrid, "pull_messages", lambda *_: [Message(Error(3, "boom"), reply_to=asked[0])])
    grid = SlowGrid(clock, {1: 1.0})
    grid.pull_interval = interval
    (answer,) = PollingGrid(grid, str).send_and_receive(asked, timeout=600)
    assert answer.error.reason == "boom"
    assert clock.now < 1


def test_logs_missing_clients_after_one_two_and_four_minutes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    grid = SlowGrid(clock, {1: 0.0, **dict.fromkeys(range(2, 9), 200.0), 9: 130.0})
    heard: list[str] = []
    with caplog.at_level(logging.INFO, "flwr"):
        watched = PollingGrid(grid, lambda node: f"client {node}", heard.append)
        watched.send_and_receive(questions(*range(1, 10)), timeout=290)
    assert heard == caplog.messages
    first, second = (record.getMessage().rpartition(",")[0] for record in caplog.records)
    named = "client 2, client 3, client 4, client 5, client 6"
    assert first == f"round 3: 1 of 9 have answered; waiting for {named} and 3 more"
    assert second == f"round 3: 1 of 9 have answered; waiting for {named} and 3 more"
    said_at = [int(record.getMessage().split()[-4]) for record in caplog.records]
    assert 60 <= said_at[0] <= 61
    assert 120 <= said_at[1] <= 122


def test_only_the_clients_that_a_line_names_are_looked_for() -> None:
    asked: list[int] = []

    def label(node: int) -> str:
        asked.append(node)
        return f"client {node}"

    messages = questions(*range(100))
    line = waiting_line(messages, messages[1:], label)
    named = "client 1, client 2, client 3, client 4, client 5"
    assert line == f"round 3: 1 of 100 have answered; waiting for {named} and 94 more"
    assert asked == [1, 2, 3, 4, 5]


def test_unknown_node_is_labelled_by_its_id(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    grid = SlowGrid(clock, {5: 0.0, 6: 1000.0})
    with caplog.at_level(logging.INFO, "flwr"):
        watched = PollingGrid(grid, Roster({}).node_label)
        watched.send_and_receive(questions(5, 6, group="handshake"), timeout=100)
    assert caplog.messages == ["handshake: 1 of 2 have answered; waiting for node 6, 61 s so far"]


def test_logs_number_of_joined_nodes(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    grid = SlowGrid(clock, {5: 0.0, 6: 70.0, 7: 1000.0})
    heard: list[str] = []
    with caplog.at_level(logging.INFO, "flwr"):
        assert wait_for_nodes(grid, 2, 100, heard.append) == [5, 6]
    assert caplog.messages == heard == ["waiting for nodes: 1 of 2 have joined, 61 s so far"]
    assert wait_for_nodes(grid, 3, 10, without=[6]) == [5]


def test_does_not_wait_for_more_nodes_of_a_simulation(clock: Clock) -> None:
    grid = SlowGrid(clock, {5: 0.0, 6: 1.5, 7: 1000.0})
    grid.pull_interval = 0.1
    assert wait_for_nodes(PollingGrid(grid, str), 3, 180) == [5, 6]
    assert clock.now < 5
    grid.pull_interval = None  # devices
    assert wait_for_nodes(PollingGrid(grid, str), 3, 180) == [5, 6]
    assert clock.now > 180


class HalfComeGrid(SlowGrid):
    """Hands a reply out when its first bytes are there and then waits for the rest, as Flower's grid does."""

    def __init__(self, clock: Clock, halves: set[int]) -> None:
        super().__init__(clock, {1: 0.0, 2: 0.0, 3: 0.0})
        self.halves, self.rest = halves, threading.Event()
        self.lost: list[Message] = []  # those whose nodes Flower has given up
        self.code = ErrorCode.NODE_UNAVAILABLE

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        lost = {message.metadata.message_id: message for message in self.lost}
        replies = super().pull_messages([message_id for message_id in message_ids if message_id not in lost])
        if self.halves.intersection(senders(replies)):
            self.rest.wait(20)
        errors = [Message(Error(self.code, "Node Unavailable"), reply_to=m) for m in self.lost]
        self.lost = []
        return replies + errors


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PARTIAL_WAIT", 0.05)


@pytest.mark.usefixtures("halves")
def test_partly_received_reply_blocks_neither_others_nor_the_deadline(clock: Clock) -> None:
    grid = HalfComeGrid(clock, {2})
    grid.joined[3] = 5.0
    heard: list[str] = []
    before = threading.enumerate()
    watched, asked = PollingGrid(grid, str, heard.append), questions(1, 2, 3)
    assert senders(watched.send_and_receive(asked, timeout=70)) == [3]
    assert clock.now == pytest.approx(70)
    assert heard == ["round 3: 1 of 3 have answered; waiting for 1, 2, 61 s so far"]
    waits = [thread for thread in threading.enumerate() if thread not in before]
    assert [thread.daemon for thread in waits] == [True], "a server ends without the last byte"
    grid.rest.set()
    late = eventually(lambda: watched.pull_messages(ids(asked[1], asked[0])), 2)
    assert senders(late) == [2, 1]


class SuperLink:
    """What Flower's own grid talks to: it hands out all replies at once, of which some are not yet whole."""

    def __init__(self, replies: Iterable[Message], halves: set[int]) -> None:
        self.replies, self.halves = {reply.metadata.reply_to_message_id: reply for reply in replies}, halves
        self.objects: dict[str, bytes] = {}
        self.asked = 0

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        self.asked += 1
        whose = [self.replies.pop(each) for each in request.message_ids if each in self.replies]
        for reply in whose:
            whole = reply.metadata.src_node_id not in self.halves
            for name, made in get_all_nested_objects(reply).items():
                self.objects.setdefault(name, made.deflate() if whole else b"")
            reply.metadata.__dict__["_message_id"] = reply.object_id
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(reply)) for reply in whose],
            message_object_trees=map(get_object_tree, whose),
        )

    def complete(self, replies: Iterable[Message]) -> None:
        """Let these be whole."""
        for reply in replies:
            self.objects.update(
                (name, made.deflate()) for name, made in get_all_nested_objects(reply).items()
            )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: ConfirmMessageReceivedRequest) -> None:  # noqa: N802
        pass


def devices(count: int, halves: set[int]) -> tuple[HttpGrid, SuperLink, list[str]]:
    """Return Flower's grid and SuperLink of so many devices that all have answered, and the ids of the questions."""
    asked = questions(*range(1, count + 1))
    for message in asked:
        message.metadata.__dict__["_message_id"] = message.object_id
    answers = [
        Message(wire.content(report=Report(node, 1).to_record()), reply_to=message)
        for node, message in enumerate(asked, 1)
    ]
    grid, superlink = HttpGrid(token="t"), SuperLink(answers, halves)
    grid.set_run(Run.create_empty(7))
    setattr(grid, waiting.CLIENT, superlink)
    return grid, superlink, ids(*asked)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("half", [1, 2, 3])
def test_whole_replies_do_not_wait_for_one_that_came_with_them(half: int) -> None:
    """Otherwise whoever sends only half of a reply costs the others theirs."""
    grid, superlink, asked = devices(3, {half})
    missing = superlink.replies[asked[half - 1]]
    watched = PollingGrid(grid, str)
    whole = eventually(lambda: watched.pull_messages(asked), 2)
    assert sorted(senders(whole)) == [node for node in (1, 2, 3) if node != half]
    assert superlink.asked <= 3
    superlink.complete([missing])
    assert senders(eventually(lambda: watched.pull_messages(asked), 1)) == [half]


def test_many_halves_hold_a_deadline_back_by_little_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PARTIAL_WAIT", 1.0)
    monkeypatch.setattr(waiting, "BRIEF_WAIT", 0.01)
    waits: list[float] = []

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if timeout is not None:
                waits.append(timeout)
            super().join(timeout)

    monkeypatch.setattr(threading, "Thread", Thread)
    grid, superlink, asked = devices(40, {*range(1, 40)})
    replies = [*superlink.replies.values()]
    watched = PollingGrid(grid, str)
    whole, first = watched.pull_messages(asked), [*waits]
    whole = whole or eventually(lambda: watched.pull_messages(asked), 1)
    superlink.complete(replies)  # before anything fails: Python's exit would wait for their threads
    assert senders(whole) == [40]
    assert len(first) == 40
    assert sum(first) < 3  # not one second for each of 39
    assert sorted(senders(eventually(lambda: watched.pull_messages(asked), 39))) == [*range(1, 40)]


def test_the_apps_own_grid_goes_on_to_take_all_replies_at_once() -> None:
    grid, _, asked = devices(4, set())
    assert senders(PollingGrid(grid, str).pull_messages(asked[:2])) == [1, 2]
    assert senders(grid.pull_messages(asked[2:])) == [3, 4]


@pytest.mark.usefixtures("halves")
def test_transient_error_of_a_partly_received_reply_is_ignored(clock: Clock) -> None:
    grid = HalfComeGrid(clock, {2})
    watched, asked = PollingGrid(grid, str), questions(2)
    assert watched.send_and_receive(asked, timeout=5) == []
    grid.lost = asked
    assert watched.pull_messages(ids(*asked)) == []
    grid.rest.set()
    assert senders(eventually(lambda: watched.pull_messages(ids(*asked)), 1)) == [2]
    grid.lost = asked  # and nobody else's bytes are on their way
    (gone,) = eventually(lambda: watched.pull_messages(ids(*asked)), 1)
    assert gone.has_error()


@pytest.mark.usefixtures("halves")
def test_failure_is_reported_while_another_reply_arrives(clock: Clock) -> None:
    grid = HalfComeGrid(clock, {2})
    grid.joined[3] = 1000.0
    watched, asked = PollingGrid(grid, str), questions(2, 3)
    assert watched.send_and_receive(asked, timeout=5) == []
    grid.lost, grid.code = asked[1:], ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    (failed,) = eventually(lambda: watched.pull_messages(ids(*asked)), 1)
    assert failed.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    grid.rest.set()


def eventually(pull: Callable[[], Iterable[Message]], count: int) -> list[Message]:
    """Pull until so many have come: on a busy machine the thread of an earlier pull may take seconds to wake up."""
    result, deadline = list(pull()), time.monotonic() + 60
    while len(result) < count and time.monotonic() < deadline:
        time.sleep(0.01)
        result += pull()
    return result


def test_wraps_only_grids_of_flower(clock: Clock) -> None:
    other = SlowGrid(clock, {})
    assert polling(other, str) is other
    flowers = InMemoryGrid.__new__(InMemoryGrid)  # it would connect to a SuperLink's state
    assert isinstance(polling(flowers, str), PollingGrid)
    # Seconds, which its attribute of this name keeps.
    assert "pull_interval" in signature(InMemoryGrid).parameters


def test_polls_once_without_timeout(clock: Clock) -> None:
    assert len(list(poll(0.0, str))) == 1
