"""A federation in one process: real Flower messages through the real ClientApp and strategy, no Ray, no port.

Everything that travels goes through Flower's own serialisation, replies come in any order, and a fault can be put
into any client's reply of any round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from rich.console import Console

from pbfl_flwr.config import Scalar, Settings, parse
from pbfl_flwr.data import ClientData
from pbfl_flwr.experiments.show import show_run
from pbfl_flwr.flower.client import device, session
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.client.worker import DataSource, Run, Worker
from pbfl_flwr.flower.engines.local import Handler, LocalGrid, run_immediately
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.rounds import FinishedRound
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import Upload
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import Record, RoundRecord
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.task import Task
from pbfl_flwr.testing import contract
from pbfl_flwr.testing.clients import SPLITS as SPLITS
from pbfl_flwr.testing.clients import tiny_client as tiny_client
from pbfl_flwr.testing.contract import NUM_CLIENTS as NUM_CLIENTS
from pbfl_flwr.testing.contract import copies as copies
from pbfl_flwr.testing.contract import needs_one_architecture as needs_one_architecture
from pbfl_flwr.testing.contract import same_tensors as same_tensors
from pbfl_flwr.testing.contract import tensors_in as tensors_in

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

FIRST_NODE = 7_000_000_000
KINDS = ("fedproto", "fedavg", "fesem", "fedgen", "fedkd", "gfpl")
"""A method for each kind of payload: rows, weights, a cluster's weights, a generator, factors, mixtures."""

Answer = Callable[[], Message]
"""Runs the client on the message and returns its reply."""
Fault = Callable[[Message, Answer], "Message | Delayed | None"]
"""What a message meets instead of its client: returns the reply that arrives, late or not; None for silence."""
Watcher = Callable[[Sequence[Message], Sequence[Message]], None]


def tiny_data(settings: Settings, client: int) -> ClientData:
    return tiny_client(client)


# A round of one method must not take longer than all others: fewer steps where a method has many of its own.
SHORT: dict[str, dict[str, Scalar]] = {
    "fedtgp": {"fedtgp.server-epochs": 2},
    "fedmrl": {"fedmrl.auxiliary": "cnn2"},
    "fedl2g": {"fedl2g.warm-up-rounds": 1},
    "fml": {"fml.auxiliary": "cnn2"},
    "fedkd": {"fedkd.auxiliary": "cnn2"},
    "tinyproto": {"tinyproto.server-epochs": 2},
    "fedgen": {"fedgen.server-steps": 2},
    "fedpa": {"fedpa.server-steps": 2},
    "fedala": {"fedala.max-epochs": 2},
}


def configuration(directory: Path, method: str = "fedproto", **keys: Scalar) -> dict[str, Scalar]:
    """Return the run configuration of a tiny run: five clients, cnn4 and resnet4, d = 64, two short rounds."""
    base = {**contract.configuration(method), "run-dir": str(directory / "run"), "join-timeout": 0.5}
    overrides = {key.replace("_", "-"): value for key, value in keys.items()}
    return {**base, **SHORT.get(method, {}), **overrides}


# Faults -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delayed:
    """A reply that arrives so many seconds after the question."""

    reply: Message
    seconds: float


def delayed(seconds: float) -> Fault:
    """The client answers, but its reply takes so long, or forever."""
    return lambda message, answer: Delayed(answer(), seconds)


def unreported(message: Message, answer: Answer) -> Delayed:
    """The client never gets the message, and Flower does not say so."""
    return Delayed(flower_error("")(message, answer), math.inf)


def flower_error(reason: str, code: int = 8) -> Callable[[Message, Answer], Message]:
    """What Flower itself answers for a client; such a reply comes from "node 1"."""

    def fault(message: Message, answer: Answer) -> Message:
        reply = Message(Error(code=code, reason=reason), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    return fault


def silent(message: Message, answer: Answer) -> None:
    """The client never gets the message."""


def lost(message: Message, answer: Answer) -> None:
    """The client trains, but its reply does not arrive."""
    answer()


def raises(message: Message, answer: Answer) -> Message:
    """The method trains the network and then raises, within the ClientApp."""

    def exploding(worker: Worker, context: Context) -> Run:
        run = Run((settings := run_of(worker, context).settings), build_method(settings))
        update = type(run.method).local_update

        def local_update(client: Any, down: Any) -> Any:
            update(run.method, client, down)
            raise ZeroDivisionError("boom\nin the middle of the round")

        object.__setattr__(run.method, "local_update", local_update)
        return run

    run_of = Worker.run_of
    with patch.object(Worker, "run_of", exploding):
        return answer()


def altered(change: Callable[[RecordDict], RecordDict | None]) -> Fault:
    """The reply's content is changed on its way; a function that answers None has changed it in place."""

    def fault(message: Message, answer: Answer) -> Message:
        reply = answer()
        return (
            Message(change(reply.content) or reply.content, reply_to=message)
            if reply.has_content()
            else reply
        )

    return fault


# The grid ---------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only where somebody waits; stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class InProcessGrid(LocalGrid):
    """The package's own grid with a fault hook and a fake clock; the only stand-in for Flower's.

    A ClientApp gets its messages, and the grid its replies, through Flower's own serialisation. What a fault raises
    ends the server, as a kill does. A message that nobody answers is reported as lost to whoever asks for its reply
    after the deadline, as Flower does.

    Args:
        app: the ClientApp, or a function in its place, see :func:`scripted`.
        config: the run configuration that every client sees.
        nodes: the node ids; the n-th runs client n unless ``partitions`` says otherwise.
        order: seed of the order in which clients run and replies arrive; None is the order of asking.
        faults: (client, round) -> what goes wrong. The handshake is round 0, the final evaluation round -1.
        partitions: the client id of every node.
        node_configs: what the operators of devices wrote; by default the nodes are the simulation's.
        clock: moved by this grid only, unless it is shared.
        seconds: that every reply takes.
    """

    def __init__(
        self,
        app: Handler,
        config: Mapping[str, Scalar],
        num_clients: int = NUM_CLIENTS,
        *,
        order: int | None = None,
        faults: Mapping[tuple[int, int], Fault] | None = None,
        partitions: Sequence[int] | None = None,
        nodes: Sequence[int] | None = None,
        node_configs: Sequence[Mapping[str, Scalar]] | None = None,
        clock: Clock | None = None,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(app, run_immediately, config, num_clients)
        self.app, self.config, self.node_configs = app, dict(config), node_configs
        self.partitions = list(partitions if partitions is not None else range(num_clients))
        self.nodes = list(nodes or (FIRST_NODE + 13 * n for n in range(len(self.partitions))))
        self.keys: dict[int, bytes] = {}  # of the nodes that have one
        self.registered: dict[int, str] = {}  # under which the operator has registered them
        self.online: Callable[[], Iterable[int]] = lambda: self.nodes  # those that are connected
        self.order = None if order is None else random.Random(order)
        self.faults = dict(faults or {})
        self.clock, self.seconds = clock or Clock(), seconds
        self.cores = 1  # of every client
        self.watchers: list[Watcher] = []  # told of what was asked and what was answered
        self.sent: list[Message] = []
        self.asked: list[tuple[int, int, str]] = []  # (client, round, kind) in the order of asking
        self.states: dict[int, RecordDict] = {}  # what Flower keeps for a node between messages
        self._due: dict[str, float] = {}  # message id -> when its reply is there

    def get_node_ids(self) -> Iterable[int]:
        return list(self.online())

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, public_key=self.keys.get(node, b""), name=self.registered.get(node, ""))
            for node in self.nodes
        ]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        deadline = math.inf if timeout is None else self.clock.now + timeout
        ids = self._push(self._shuffled(sent), deadline)
        self.sent += sent
        in_time = [message_id for message_id in ids if self._due[message_id] < deadline]
        ends = [self._due[message_id] for message_id in in_time] if len(in_time) == len(ids) else [deadline]
        self.clock.now = max([self.clock.now, *ends])
        replies = self._shuffled(self.pull_messages(in_time))
        for watcher in self.watchers:
            watcher(sent, replies)
        return replies

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return super().pull_messages([i for i in message_ids if self._due.get(i, math.inf) <= self.clock.now])

    def _shuffled(self, messages: list[Message]) -> list[Message]:
        return messages if self.order is None else self.order.sample(messages, len(messages))

    def _process(self, message: Message, deadline: float) -> Message:
        client = self.partitions[self.nodes.index(message.metadata.dst_node_id)]
        kind, number = message.metadata.message_type, round_of(message)
        self.asked.append((client, number, kind))
        fault = self.faults.get((client, number if kind != "evaluate" else -1))
        reply: Message | Delayed | None
        if fault is None:
            reply = self._answer(client, message)
        else:
            reply = fault(message, lambda: self._answer(client, message))
        due = self.clock.now + self.seconds
        if isinstance(reply, Delayed):
            due = self.clock.now + reply.seconds
            reply = reply.reply
        elif reply is None:
            reply, due = Message(Error(code=5, reason="its node is unavailable"), reply_to=message), deadline
        self._due[message.metadata.message_id] = due
        return reply

    def _answer(self, client: int, message: Message) -> Message:
        simulated: Mapping[str, Scalar] = {"partition-id": client, "num-partitions": len(self.nodes)}
        context = Context(
            run_id=1,
            node_id=message.metadata.dst_node_id,
            node_config=dict(self.node_configs[client] if self.node_configs else simulated),
            state=self.states.setdefault(client, RecordDict()),
            run_config=dict(self.config),
        )
        if not isinstance(self.app, ClientApp):
            return self.app(message, context)
        received = Message(through_flower(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        with (
            patch.object(device, "in_worker", lambda: self.node_configs is None),
            patch.object(session, "share_of_cores", lambda: self.cores),
        ):
            reply = self.app(received, context)
        return Message(through_flower(reply.content), reply_to=message) if reply.has_content() else reply


def round_of(message: Message) -> int:
    """Return the round of a message, 0 for the handshake."""
    group = message.metadata.group_id or ""
    return int(group) if group.isdecimal() else 0


def scripted(
    task: Task, answers: Callable[[int, int], RecordDict | Message], architecture: str = "cnn4"
) -> Handler:
    """Return clients that do not train: what they answer is written down beforehand.

    Args:
        task: what they bring.
        answers: (client, round) -> the content of the reply, or Flower's error in its place.
        architecture: what they say that they have.
    """

    def app(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if message.metadata.message_type == "query":
            properties = ConfigRecord({**handshake_reply(client, task), "architecture": architecture})
            return Message(wire.content(config=properties), reply_to=message)
        reply = answers(client, round_of(message))
        if isinstance(reply, RecordDict):
            return Message(reply, reply_to=message)
        reply.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        return reply

    return app


def handshake_reply(client: int, task: Task) -> dict[str, Any]:
    """What a client replies in the handshake."""
    return {
        "client": client,
        "simulated": True,
        "configured-data": False,
        "num-classes": task.num_classes,
        "feature-dim": task.feature_dim,
        "input-shape": list(task.input_shape),
        "labels": [str(j) for j in range(task.num_classes)],
        "architecture": "cnn4",
        "parameters": [100, 10],
        "device": "cpu",
        "num-train": 2**20,  # no report of a test counts more
        "num-test": 2**20,
        "num-validation": 2**20,
    }


def reply_of(payload: Upload, report: Report | None = None) -> RecordDict:
    """Return the content of a client's reply."""
    samples = payload.magnitudes().samples or 10
    sent = report or Report(samples, 4, 1, {"head": 2}, 0.5, metrics={"loss.ce": 1.0})
    return wire.content(wire.encode(payload), sent.to_record())


def numbers(record: MetricRecord, name: str) -> list[Any]:
    """Return the list of numbers of this name in a report's record."""
    result = record[name]
    assert isinstance(result, list)
    return result


def through_flower(content: RecordDict) -> RecordDict:
    """Return what arrives at the other end of Flower's serialisation."""
    objects = {name: item.deflate() for name, item in get_all_nested_objects(content).items()}
    arrived = inflate_object_from_contents(content.object_id, objects)
    assert isinstance(arrived, RecordDict)
    return arrived


class Killed(BaseException):
    """The process ends here; no handler of ours runs in its stead."""


@dataclass
class Federation:
    """A strategy and the grid it runs on."""

    strategy: MethodStrategy
    grid: InProcessGrid
    config: dict[str, Scalar]

    def run(self) -> Federation:
        self.strategy.start(self.grid)
        return self

    @property
    def directory(self) -> RunDirectory:
        """The run's directory; it must have one."""
        assert self.strategy.directory is not None
        return self.strategy.directory

    @property
    def fingerprint(self) -> str:
        """A hash of the server's state and of every client's counters: equal bits, equal fingerprint."""
        return contract.fingerprint(self.strategy)


GRID_OPTIONS = ("order", "faults", "partitions", "nodes", "node_configs", "seconds")


def federation(
    directory: Path,
    method: str = "fedproto",
    *,
    data: DataSource | None = tiny_data,
    strategy: type[MethodStrategy] = MethodStrategy,
    on_disk: bool = False,
    **options: Any,
) -> Federation:
    """Return a federation that has not run yet; its options are those of the grid, and keys of the configuration."""
    of_grid = {name: options.pop(name) for name in GRID_OPTIONS if name in options}
    config = configuration(directory, method, **options)
    grid = InProcessGrid(make_client_app(data), config, int(config["num-clients"]), **of_grid)
    place = Path(str(config["run-dir"])) if on_disk else None
    return Federation(strategy(parse(config, SECTIONS), place), grid, config)


def plain(records: Record | Sequence[Record]) -> Any:
    """Return a record, or each of several, as JSON has it."""
    return records.to_json() if isinstance(records, Record) else [record.to_json() for record in records]


def shown(run: Path) -> str:
    """Return what ``pbfl show`` prints of a run on a wide terminal."""
    text = StringIO()
    show_run(run, Console(width=200, file=text))
    return text.getvalue()


def after_round(number: int, happens: Callable[[], object]) -> AbstractContextManager[object]:
    """Let something happen when a round is committed; round 0: when any is."""
    commit = MethodStrategy._commit

    def committed(self: MethodStrategy, finished: FinishedRound) -> RoundRecord:
        record = commit(self, finished)
        if number in (0, record.round):
            happens()
        return record

    return patch.object(MethodStrategy, "_commit", committed)


def stored_rounds(run: Federation) -> dict[int, Any]:
    """Return client -> (round, participations) on its disk."""
    directory = Path(str(run.config["run-dir"])) / "clients" / run.strategy.experiment
    rounds = {}
    for file in directory.glob("client-*.safetensors"):
        _, about = load_tensors(file)
        rounds[int(about["client"])] = int(about["round"]), int(about["participations"])
    return rounds
