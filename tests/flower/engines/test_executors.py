"""The pool of workers: one that dies or hangs costs one reply; processes leave signals to their command."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message

from pbfl_flwr.config import Scalar
from pbfl_flwr.flower.engines import executors
from pbfl_flwr.flower.engines.channel import channel
from pbfl_flwr.flower.engines.executors import (
    DIED,
    Executor,
    ExecutorPool,
    ProcessExecutor,
    WorkerDied,
    WorkerSpec,
    environment,
)
from pbfl_flwr.flower.engines.local import Handler, LocalGrid, run_immediately
from pbfl_flwr.flower.messages import wire
from tests.flower.engines.test_local import KEYS, ask, echo, said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_dead_or_hanging_worker_costs_one_reply_and_sigterm_none(tmp_path: Path) -> None:
    config: dict[str, Scalar] = {**KEYS, "run-dir": str(tmp_path / "run")}
    workers = [ProcessExecutor(WorkerSpec(1, "", tmp_path / "log")) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads, ExecutorPool(workers) as pool:
        grid = LocalGrid(pool.handle, threads.submit, config, 3, pool.give_up)
        for worker in workers:
            worker._process.terminate()  # as a cluster does at the end of a job's time; no client's failure
        assert said(grid.send_and_receive(ask(grid, [0, 1, 2]))) == [0, 1, 2]
        os.kill(workers[0]._process.pid or 0, signal.SIGKILL)
        replies = grid.send_and_receive(ask(grid, [0, 1, 2]))
        (failed,) = [reply for reply in replies if reply.has_error()]
        assert failed.error.reason == DIED
        assert said(grid.send_and_receive(ask(grid, [0, 1]))) == [0, 1], "another took its place"
        hanging = pool._free.get()
        assert isinstance(hanging, ProcessExecutor)
        os.kill(hanging._process.pid or 0, signal.SIGSTOP)
        pool._free, others = SimpleQueue(), pool._free
        pool._free.put(hanging)
        asked = ask(grid, [2])
        assert grid.send_and_receive(asked, timeout=1) == []
        pool._free.put(others.get())
        assert said(grid.send_and_receive(ask(grid, [0]))) == [0], "the others go on"
        assert said(grid.send_and_receive(ask(grid, [2, 1]))) == [2, 1], (
            "it is killed when its client is asked"
        )
        wait([grid._replies[asked[0].metadata.message_id]], 60)
        (given_up,) = grid.pull_messages([asked[0].metadata.message_id])
        assert given_up.error.reason == DIED
        assert said(grid.send_and_receive(ask(grid, [0, 1, 2]))) == [0, 1, 2]
        processes = [worker._process for worker in workers]
    assert not any(process.is_alive() for process in processes)


def test_a_worker_has_a_card_of_its_own_before_it_imports_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA looks once, which may be in the script that a worker imports."""
    seen: list[str | None] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    monkeypatch.setattr(SpawnProcess, "start", lambda _: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    for card in ("0", "1", ""):
        ProcessExecutor(WorkerSpec(1, card, tmp_path / "log")).start()
    assert seen == ["0", "1", ""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "all"


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_first_worker_ignores_sigterm_from_its_start() -> None:
    """With it Python starts one of its own, after which it hears all signals again."""
    lines = [
        "import signal, sys",
        "from multiprocessing import get_context",
        "from pbfl_flwr.flower.engines.executors import _signals_blocked",
        "process = get_context('spawn').Process(target=signal.raise_signal, args=(signal.SIGTERM,))",
        "with _signals_blocked():",
        "    process.start()",
        "process.join()",
        "sys.exit(process.exitcode)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, timeout=100).returncode == 0


class InThread(ProcessExecutor):
    """A worker that is a thread of this process, behind the same channel."""

    alive = True

    def __init__(self, answer: Handler, gpu: str = "") -> None:
        super().__init__(WorkerSpec(1, gpu, Path("log")))
        self._answer, self.started = answer, 0

    def start(self) -> None:
        self.started += 1
        self.spent = False
        self._channel, child_end = channel()
        threading.Thread(target=executors._handle_all, args=(child_end, self._answer), daemon=True).start()

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_finds_what_it_kept_in_flowers_context(workers: int) -> None:
    """Whichever worker runs it the next time, and whether that is this process or another."""

    def count(message: Message, context: Context) -> Message:
        calls = context.state.config_records.setdefault("kept", ConfigRecord({"calls": 0}))
        calls["calls"] = int(str(calls["calls"])) + 1
        return Message(wire.content(config=ConfigRecord({"client": calls["calls"]})), reply_to=message)

    with ExecutorPool([InThread(count) for _ in range(workers)]) as pool:
        for handle in (count, pool.handle):
            grid = LocalGrid(handle, run_immediately, {}, 2)
            assert said(grid.send_and_receive(ask(grid, [0, 1, 0, 0]))) == [1, 1, 2, 3]


def test_incomplete_pool_leaves_no_worker(tmp_path: Path) -> None:
    ended: list[object] = []

    class Starting(ProcessExecutor):
        def start(self) -> None:
            if self._spec.cores == 2:
                raise BlockingIOError("Resource temporarily unavailable")

        def end(self) -> None:
            ended.append(self)

    log = tmp_path / "log"
    workers = [Starting(WorkerSpec(cores, "", log)) for cores in (1, 2)]
    with pytest.raises(BlockingIOError), ExecutorPool(workers):
        pass
    assert len(ended) == 1


def test_a_second_interruption_leaves_no_worker_behind() -> None:
    ended: list[InThread] = []

    class Interrupted(InThread):
        def end(self) -> None:
            ended.append(self)
            if len(ended) == 1:
                raise KeyboardInterrupt

    workers = [Interrupted(echo) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt), ExecutorPool(workers):
        pass
    assert len(ended) == 3


@pytest.mark.parametrize(("fails", "broken"), [(False, True), (True, False), (True, True)])
def test_worker_with_a_broken_gpu_is_replaced(
    fails: bool, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within this process, on a card that is none; the memory of one that goes on is given back."""
    given_back: list[int] = []

    def wait_for_card() -> None:
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def answer(message: Message, context: Context) -> Message:
        return (
            Message(Error(code=1, reason="it failed"), reply_to=message) if fails else echo(message, context)
        )

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait_for_card)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    worker = InThread(answer, "0")
    with ExecutorPool([worker]) as workers:
        grid = LocalGrid(workers.handle, run_immediately, {}, 1)
        replies = grid.send_and_receive(ask(grid, [0]))
        replaced = worker.started - 1
    assert [reply.has_error() for reply in replies] == [fails]
    assert replaced == int(fails and broken)
    assert given_back == [1] * (fails and not broken)


class Pretended(Executor):
    """Answers in this process; a message of client 1 waits until its worker is killed or let go."""

    def __init__(self) -> None:
        self.starts = 0
        self.begun, self.go = threading.Event(), threading.Event()
        self.killed = False

    def start(self) -> None:
        self.starts += 1
        self.killed = False

    def handle(self, message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            self.begun.set()
            self.go.wait(10)
        if self.killed:
            raise WorkerDied("killed")
        return echo(message, context)

    @property
    def alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True
        self.go.set()


def test_giving_up_a_client_that_has_answered_kills_no_other_clients_worker() -> None:
    worker = Pretended()
    with ThreadPoolExecutor(1) as threads, ExecutorPool([worker]) as pool:
        grid = LocalGrid(pool.handle, threads.submit, {}, 2, pool.give_up)
        assert said(grid.send_and_receive(ask(grid, [0]))) == [0]
        (asked,) = ask(grid, [1])
        ids = [*grid.push_messages([asked])]
        assert worker.begun.wait(10)
        pool.give_up(next(iter(grid.get_node_ids())))  # as if client 0's next message waited for a worker
        assert not worker.killed
        worker.go.set()
        wait([grid._replies[ids[0]]], 10)
    assert said(grid.pull_messages(ids)) == [1]


def test_a_worker_that_dies_as_the_pool_ends_is_not_replaced() -> None:
    worker = Pretended()
    with ThreadPoolExecutor(1) as threads, ExecutorPool([worker]) as pool:
        grid = LocalGrid(pool.handle, threads.submit, {}, 2, pool.give_up)
        grid.push_messages(ask(grid, [1]))
        assert worker.begun.wait(10)
    assert worker.starts == 1


def test_a_worker_that_died_after_its_answer_is_replaced_and_costs_nothing() -> None:
    class Ends(Pretended):
        def handle(self, message: Message, context: Context) -> Message:
            if self.killed:
                raise WorkerDied("killed")
            reply = echo(message, context)
            self.killed = self.starts == 1
            return reply

    with ExecutorPool([Ends()]) as pool:
        grid = LocalGrid(pool.handle, run_immediately, {}, 2)
        replies = grid.send_and_receive(ask(grid, [0, 1]))
    assert [reply.has_error() for reply in replies] == [False, False]


def test_variables_that_were_not_set_are_removed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with environment(WorkerSpec(3, "", Path("log"))):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("3", "")
    assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & {*os.environ}
