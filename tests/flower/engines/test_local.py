"""The simulation without Flower's engine: the grid, the workers, and the same results as any other."""

import gc
import logging
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from flwr.app import ConfigRecord, Context, Message

from pbfl_flwr import seeds
from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import device
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.engines import local
from pbfl_flwr.flower.engines.local import LocalGrid, federate, in_this_process, run_immediately, worker_specs
from pbfl_flwr.flower.engines.only_run import only_run
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server import grid as waiting
from pbfl_flwr.flower.server import handshake
from pbfl_flwr.flower.server.app import serve
from pbfl_flwr.flower.server.grid import polling
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.tensor_files import load_tensors
from tests.flower.inprocess import InProcessGrid, same_tensors

KEYS: dict[str, Scalar] = {
    "num-clients": 3,
    "num-server-rounds": 2,
    "models": "cnn2,resnet4",
    "feature-dim": 16,
    "partition": "iid",
    "max-samples": 150,
    "threads": 1,
}


def ask(grid: LocalGrid, clients: list[int]) -> list[Message]:
    config = ConfigRecord({"experiment": "e", "round": 0})
    nodes = list(grid.get_node_ids())
    return [
        Message(wire.content(config=config), dst_node_id=nodes[client], message_type="query")
        for client in clients
    ]


def echo(message: Message, context: Context) -> Message:
    return Message(
        wire.content(config=ConfigRecord({"client": context.node_config["partition-id"]})), reply_to=message
    )


def said(replies: list[Message]) -> list[object]:
    return [reply.content.config_records[wire.CONFIG]["client"] for reply in replies]


def test_gives_the_results_of_the_grid_of_the_tests(tmp_path: Path) -> None:
    federate(tmp_path / "run", KEYS, 3, Resources(workers=1))
    config = {**KEYS, "run-dir": str(tmp_path / "again")}
    twin = MethodStrategy(parse(config, SECTIONS), None)
    twin.start(InProcessGrid(make_client_app(), config, 3))
    assert same_tensors(load_tensors(tmp_path / "run" / "checkpoint.safetensors")[0], twin.state.to_tensors())
    lines = RunDirectory(tmp_path / "run").round_records()
    assert [line.accuracy for line in lines] == [line.accuracy for line in twin.history]
    assert [line.failures for line in lines] == [[], []]
    assert "round 2/2" in (tmp_path / "run" / "flower.log").read_text()
    assert not device.in_worker(), "it was one only for a while"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_log_that_finds_no_room_is_lost_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "private_opener", lambda name, flags: os.open("/dev/full", flags))
    federate(tmp_path, KEYS, 3, Resources(workers=1))
    assert RunDirectory(tmp_path).result()
    assert capfd.readouterr().err == ""


def test_zero_clients_stand_for_all_nodes_of_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "JOIN_PAUSE", 0.1)
    keys = {**KEYS, "num-server-rounds": 1}
    everyone: dict[str, Scalar] = {**keys, "num-clients": 0, "run-dir": str(tmp_path / "all")}
    with device.as_worker(1):
        serve(LocalGrid(in_this_process(make_client_app()), run_immediately, everyone, 3), everyone, 1)
    federate(tmp_path / "three", keys, 3, Resources(workers=1))
    runs = [RunDirectory(tmp_path / name) for name in ("all", "three")]
    assert runs[0].record().configuration["num-clients"] == 3
    assert runs[0].result() == runs[1].result() != ""


def test_devices_need_their_number() -> None:
    grid = LocalGrid(in_this_process(make_client_app()), run_immediately, {"num-clients": 0}, 1)
    (reply,) = grid.send_and_receive(ask(grid, [0]))
    assert "num-clients = 0: only in simulations" in str(reply.error.reason)


def test_refuses_directory_of_another_run(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(PbflError, match="in use by another run"):
        federate(tmp_path, KEYS, 3, Resources(workers=1))


def test_a_refused_run_touches_no_random_state_of_the_one_that_goes_on(tmp_path: Path) -> None:
    with (
        only_run("other"),
        patch.object(seeds, "restored") as restored,
        pytest.raises(PbflError, match="this process is in the run 'other' already"),
    ):
        federate(tmp_path, KEYS, 3, Resources(workers=1))
    restored.assert_not_called()


def test_message_not_started_before_the_deadline_is_dropped() -> None:
    grid = LocalGrid(echo, run_immediately, {}, 3)
    assert said(grid.send_and_receive(ask(grid, [2, 0]))) == [2, 0]
    (reply,) = grid.send_and_receive(ask(grid, [1]), timeout=0)
    assert reply.error.reason == "not started before the deadline"


def test_slowest_clients_start_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = 0.0, []

    def answer(message: Message, context: Context) -> Message:
        nonlocal now
        client = int(str(context.node_config["partition-id"]))
        order.append(client)
        now += [3.0, 5.0, 1.0, 5.0][client]
        return echo(message, context)

    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: now))
    grid = LocalGrid(answer, run_immediately, {}, 5)
    assert said(grid.send_and_receive(ask(grid, [0, 1, 2, 3]))) == [0, 1, 2, 3]
    asked = ask(grid, [2, 3, 0, 1])
    assert said(grid.send_and_receive(asked)) == [2, 3, 0, 1]  # answers come in the order of the questions
    ids = [int(message.metadata.message_id.replace("-", ""), 16) for message in asked]
    assert ids == sorted(ids)
    other = Message(asked[0].content, dst_node_id=[*grid.get_node_ids()][2], message_type="train")
    grid.send_and_receive([other, *ask(grid, [0])])
    assert order == [*range(4), *(3, 1, 0, 2), *(0, 2)]  # of another kind of question nothing is known yet


def test_late_reply_is_pulled_once() -> None:
    released = threading.Event()

    def slow(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            released.wait(60)
        return echo(message, context)

    with ThreadPoolExecutor(2) as threads:
        grid = LocalGrid(slow, threads.submit, {}, 2)
        asked = ask(grid, [0, 1])
        assert said(grid.send_and_receive(asked, timeout=2)) == [0]
        ids = [message.metadata.message_id for message in asked]
        assert grid.pull_messages(ids) == []
        released.set()
    assert said(grid.pull_messages(ids)) == [1]
    assert grid.pull_messages(ids) == []


def test_keeps_no_reply_that_was_handed_out() -> None:
    made: list[weakref.ref[Message]] = []

    def answer(message: Message, context: Context) -> Message:
        reply = echo(message, context)
        made.append(weakref.ref(reply))
        return reply

    grid = LocalGrid(answer, run_immediately, {}, 3)
    for client in range(3):  # each in a round of its own
        assert said(grid.send_and_receive(ask(grid, [client]))) == [client]
    gc.collect()
    assert [reply() for reply in made] == [None, None, None]


def test_logs_clients_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_LOG", 0.05)
    monkeypatch.setattr(local, "MAX_INTERVAL", 0.01)
    released, heard = threading.Event(), list[str]()

    def slow(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            released.wait(60)
        return echo(message, context)

    def hear(line: str) -> None:
        heard.append(line)
        released.set()

    with ThreadPoolExecutor(2) as threads:
        grid = LocalGrid(slow, threads.submit, {}, 2)
        assert polling(grid, lambda node: f"client {node - local.FIRST_NODE}", hear) is grid
        assert said(grid.send_and_receive(ask(grid, [0, 1]), timeout=60)) == [0, 1]
    assert ": 1 of 2 have answered; waiting for client 1, " in heard[0]


def test_gives_up_a_pending_message_when_its_client_is_asked_again() -> None:
    released, given_up = threading.Event(), list[int]()

    def answer(message: Message, context: Context) -> Message:
        if message.metadata.group_id == "hangs":
            released.wait(60)
        return echo(message, context)

    def give_up(node: int) -> None:
        given_up.append(node)
        released.set()

    with ThreadPoolExecutor(2) as threads:
        grid = LocalGrid(answer, threads.submit, {}, 2, give_up)
        (question,) = ask(grid, [1])
        question.metadata.group_id = "hangs"
        assert grid.send_and_receive([question], timeout=0.2) == []
        assert said(grid.send_and_receive(ask(grid, [0]), timeout=60)) == [0]
        assert given_up == []
        assert said(grid.send_and_receive(ask(grid, [1, 0]), timeout=60)) == [1, 0]
    assert given_up == [list(grid.get_node_ids())[1]]


def test_failing_client_releases_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    grid = LocalGrid(in_this_process(make_client_app()), run_immediately, {**KEYS, "models": "har-cnn"}, 3)
    (reply,) = grid.send_and_receive(ask(grid, [0]))
    assert "har-cnn" in str(reply.error.reason)
    assert given_back == [1]


def test_workers_are_at_most_one_per_client(tmp_path: Path) -> None:
    specs = worker_specs(Resources(cpus_per_client=2, workers=5), 3, tmp_path)
    assert [(spec.gpus, spec.cores) for spec in specs] == [
        ("", 2)
    ] * 3  # places of tests of placement, no more


def test_what_a_client_does_to_its_message_reaches_nobody() -> None:
    kept: list[Message] = []

    def changing(message: Message, context: Context) -> Message:
        config = message.content.config_records[wire.CONFIG]
        config["round"] = int(str(config["round"])) + 1
        reply = Message(wire.content(config=ConfigRecord({"client": config["round"]})), reply_to=message)
        kept.append(reply)
        return reply

    app: Any = changing
    grid = LocalGrid(in_this_process(app), run_immediately, {}, 2)
    shared = ask(grid, [0, 1])
    both = [
        Message(shared[0].content, dst_node_id=m.metadata.dst_node_id, message_type="query") for m in shared
    ]
    replies = grid.send_and_receive(both)
    assert said(replies) == [1, 1]
    assert replies[0].content is not kept[0].content


def test_one_worker_sees_its_cores_and_no_hidden_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(local, "serve", lambda *_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    before = logging.getLogger("flwr").handlers[:]
    local.federate(tmp_path, {}, 3, Resources(workers=1))
    assert seen == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert logging.getLogger("flwr").handlers == before
