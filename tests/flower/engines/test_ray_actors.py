"""Ray actors: the result of one process on a cluster, whose nodes may be lost."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from flwr.app import Context, Message

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower import code_version
from pbfl_flwr.flower.deploy.processes import free_port
from pbfl_flwr.flower.engines import ray_actors, ray_cluster
from pbfl_flwr.flower.engines.executors import Executor, ExecutorPool, WorkerDied
from pbfl_flwr.flower.engines.local import LocalGrid, federate
from pbfl_flwr.flower.engines.placement import Machine, Resources
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.util.atomic_files import UnsavedState
from tests.flower.engines.test_local import KEYS, ask, echo, said
from tests.real_runs import ROOT

pytestmark = pytest.mark.timeout(600)


# free ports: the workers of all nodes would count up from the same one
START = ("start", "--block", "--num-cpus=1", "--min-worker-port=0", "--max-worker-port=0")


class Cluster:
    """Two nodes with a CPU each on this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self._directory}"]
        (address,) = re.findall("--address='(.*)'", self._start("head", *head))
        self._start("node", f"--address={address}")
        self.node = self._processes[-1]
        self.resources = Resources(engine="ray", ray_address=address)

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                self.kill(process)

    def _start(self, name: str, *options: str) -> str:
        """Start a node, and return what it says; Ray gives up after 30 s, which a busy machine may take."""
        output = self._directory / f"{name}.log"
        for _ in range(3):
            with output.open("wb") as log:
                process = subprocess.Popen(
                    [Path(sys.executable).parent / "ray", *START, *options],
                    env={
                        **os.environ,
                        "PYTHONPATH": str(ROOT),
                        "RAY_USAGE_STATS_ENABLED": "0",
                        "TMPDIR": str(self.scratch),
                    },
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            while process.poll() is None:
                if "will now block forever" in (said_so_far := output.read_text()):  # what it says last
                    self._processes.append(process)
                    return said_so_far
                time.sleep(0.2)
        raise AssertionError(output.read_text())

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # not below tmp_path: the path of a socket of Ray is at most 107 bytes long
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        two_nodes = Cluster(Path(directory))
        try:
            two_nodes.start()
            yield two_nodes
        finally:
            two_nodes.end()


def wait_until_gone(paths: Iterable[Path]) -> None:
    deadline = time.monotonic() + 30
    for path in paths:
        while path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


class NeverReady(Executor):
    def start(self) -> None:
        pass

    def when_ready(self, call: Any) -> None:
        pass

    def handle(self, message: Message, context: Context) -> Message:
        raise WorkerDied("it was ended")

    def kill(self) -> None:
        pass


class Echo(NeverReady):
    def when_ready(self, call: Any) -> None:
        call()

    def handle(self, message: Message, context: Context) -> Message:
        return echo(message, context)


def test_a_worker_that_has_not_started_delays_neither_the_others_nor_the_end() -> None:
    with ThreadPoolExecutor(2) as threads, ExecutorPool([NeverReady(), Echo()]) as pool:
        grid = LocalGrid(pool.handle, threads.submit, {}, 3)
        assert said(grid.send_and_receive(ask(grid, [0, 1, 2]))) == [0, 1, 2]
        waiting = threads.submit(pool._free.get)
        threads.submit(pool._free.get)
    assert waiting.done()


def test_a_node_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pbfl_flwr.flower.code_version", None)
    version, visible = ray_actors._inspector("/")()
    assert version.startswith("no pbfl-flwr (import of pbfl_flwr.flower.code_version halted")
    assert not visible


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_run_on_a_cluster_has_the_result_of_one_process(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First as if the nodes did not see the run directory, so that the clients' states travel, then resumed."""
    keys: dict[str, Scalar] = {**KEYS, "num-server-rounds": 3}
    federate(tmp_path / "one", keys, 3, Resources(workers=1))
    run, log = RunDirectory(tmp_path / "cluster"), tmp_path / "cluster" / "flower.log"
    assert Machine.here(cluster.resources) == Machine(2)
    with pytest.raises(
        PbflError, match=r"fit on no node of the Ray cluster; its nodes have 1 CPUs and 0 GPUs$"
    ):
        Machine.here(replace(cluster.resources, cpus_per_client=2))
    with monkeypatch.context() as patch:
        patch.setattr(ray_actors, "check_nodes", lambda states: False)
        federate(run.path, {**keys, "num-server-rounds": 2}, 3, cluster.resources)
    assert "the clients' states travel" in log.read_text()
    assert len(list((run.path / "clients").glob("*/client-*.safetensors"))) == 3
    wait_until_gone(cluster.scratch.glob("pbfl-*"))
    log.unlink()
    federate(run.path, {**keys, "resume": True}, 3, cluster.resources)
    assert "travel" not in log.read_text()
    assert run.result() == RunDirectory(tmp_path / "one").result()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_names_a_node_with_another_version(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_version, "code_version", lambda: "0.0.1-other")
    with pytest.raises(
        PbflError, match=r"^Ray node \S+ has pbfl-flwr 0\.1\.0-\w+ and flwr .*, this machine pbfl"
    ):
        federate(tmp_path, KEYS, 3, cluster.resources)
    assert not (tmp_path / "run.json").exists()


def test_a_full_disk_of_a_node_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that travel with a message find no room there."""
    unsaved = UnsavedState("/tmp/pbfl-x/client-00000.safetensors cannot be written (No space left on device)")
    failed = ray.exceptions.RayTaskError(
        "handle", f"Traceback:\n  in _write\na.UnsavedState: {unsaved}", unsaved
    )
    monkeypatch.setattr(ray, "get", Mock(side_effect=failed.as_instanceof_cause()))
    executor = ray_actors.RayExecutor(Resources(), tmp_path)
    executor._actor = Mock()
    with pytest.raises(UnsavedState, match=f"^{re.escape(str(unsaved))}$"):
        executor.handle(Mock(), Mock(node_config={"partition-id": 0}))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_the_states_of_a_killed_worker_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not (worker := os.fork()):
        try:
            (ray_actors._scratch_directory() / "client-00000.safetensors").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGKILL
    wait_until_gone(tmp_path.iterdir())


def test_ends_though_the_head_of_the_cluster_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray then awaits it for a minute, and ends the process."""
    answered = threading.Event()
    monkeypatch.setattr(ray, "kill", lambda actor: answered.wait())
    monkeypatch.setattr(ray_actors, "KILL_SECONDS", 0.01)
    executor = ray_actors.RayExecutor(Resources(), None)
    executor._actor = Mock()
    executor.end()
    answered.set()


def test_another_server_is_no_cluster() -> None:
    """Ray would await it for minutes."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever)
        try:
            with pytest.raises(
                PbflError, match=r"no Ray cluster answers \(gRPC's health check: UNAVAILABLE\)$"
            ):
                ray_cluster._need_answer(f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


def node(name: str = "a", *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """A node as ray.nodes() describes it."""
    return {"Alive": alive, "NodeID": "0" * 56, "NodeManagerHostname": name, "Resources": resources}


@pytest.mark.parametrize("seen", [(True, True), (True, False), (False, True)])
def test_states_travel_unless_every_living_node_sees_them(
    seen: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, _ = ray_actors._inspector("/")()
    monkeypatch.setattr(ray, "nodes", lambda: [node("gone", alive=False), node("a"), node("b")])
    monkeypatch.setattr(ray, "remote", Mock())
    monkeypatch.setattr(ray, "get", Mock(side_effect=[(version, each) for each in seen]))
    assert ray_actors.check_nodes(tmp_path) is all(seen)
    assert not [*tmp_path.iterdir()]


def test_a_node_that_cannot_run_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [node("a")])
    monkeypatch.setattr(ray, "remote", Mock())
    monkeypatch.setattr(ray, "get", Mock(side_effect=ray.exceptions.GetTimeoutError("no answer\nin time")))
    with pytest.raises(PbflError, match=r"^Ray node a cannot run clients: in time$"):
        ray_actors.check_nodes(tmp_path)


def test_an_actor_has_its_share_and_keeps_no_clients_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def app(message: Any, context: Any) -> Any:
        ray_actors._write(Path(context.run_config["state-dir"]), {f"x/{name}": b"new"}, replaced={})
        return Mock(**{"has_error.return_value": True})

    name, threads = "client-00003.safetensors", Mock()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(ray_actors, "threadpool_limits", threads)
    monkeypatch.setattr(ray_actors, "make_client_app", lambda: app)
    monkeypatch.setattr(ray_actors, "release_gpu_memory", lambda: False)
    monkeypatch.setattr(ray_actors, "_scratch_directory", lambda: tmp_path)
    actor = ray_actors._Actor(2, 0, travelling=True)
    threads.assert_called_once_with(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    context = Mock(run_config={}, node_config={"partition-id": 3})
    _, state, files, spent = actor.handle(Mock(), context, {f"x/{name}": b"old"})
    assert (state, files, spent) == (context.state, {f"x/{name}": b"new"}, True)
    assert not [*tmp_path.iterdir()]


def test_a_reply_comes_with_flowers_state_and_the_end_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", Mock(return_value=("reply", "state", {}, True)))
    executor = ray_actors.RayExecutor(Resources(), None)
    executor._actor = Mock()
    context = Mock(node_config={"partition-id": 0})
    assert str(executor.handle(Mock(), context)) == "reply"
    assert (context.state, executor.spent) == ("state", True)


def test_a_ray_of_ones_own_leaves_no_files_and_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler of SIGTERM would end this process without its last record."""
    made: list[Path] = []

    def init(**options: Any) -> None:
        made.append(Path(options["_temp_dir"]))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", Mock())
    try:
        with ray_cluster.connected("", 1):
            assert signal.getsignal(signal.SIGTERM) is before
            assert made[0].is_dir()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not made[0].exists()


def test_a_worker_must_fit_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(CPU=8), node(CPU=2, GPU=1), node(CPU=2, GPU=2), node(alive=False, CPU=64, GPU=8)]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert ray_cluster.cluster_resources("auto", 2, 2) == (12, 3)
    with pytest.raises(PbflError, match="8 CPUs and 0 GPUs"):
        ray_cluster.cluster_resources("auto", 4, 1)


def test_an_actor_asks_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Mock()
    monkeypatch.setattr(ray, "remote", remote)
    ray_actors.RayExecutor(Resources(cpus_per_client=2, gpus_per_client=0.5), None)
    remote.return_value.options.assert_called_once_with(
        num_cpus=2, num_gpus=0.5, scheduling_strategy="SPREAD"
    )


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_names_an_address_without_a_cluster(tmp_path: Path) -> None:
    nobody = Resources(engine="ray", ray_address=f"127.0.0.1:{free_port()}")
    with pytest.raises(PbflError, match=r"--ray-address 127\.0\.0\.1:\d+: no Ray cluster answers"):
        federate(tmp_path, KEYS, 3, nobody)
    for address in ("foo", "host:port", ":6379", "127.0.0.1:99999"):
        with pytest.raises(PbflError, match=f"^--ray-address '{address}': must be HOST:PORT, .*, or auto$"):
            federate(tmp_path, KEYS, 3, replace(nobody, ray_address=address))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_killed_in_a_round_costs_its_replies(cluster: Cluster, tmp_path: Path) -> None:
    """The last one: it leaves the cluster with one node."""
    keys: dict[str, Scalar] = {**KEYS, "models": "cnn4", "local-epochs": 30, "num-server-rounds": 12}

    def kill_during_a_round() -> None:
        while len(RunDirectory(tmp_path).round_records()) < 1:
            time.sleep(0.1)
        time.sleep(0.5)
        cluster.kill(cluster.node)

    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill_during_a_round)
        federate(tmp_path, keys, 3, cluster.resources)
        killed.result()
    records = RunDirectory(tmp_path).round_records()
    assert [record.round for record in records] == [*range(1, 13)]
    assert records[-1].trained == [0, 1, 2]
    assert {failure.reason for record in records for failure in record.failures} <= {ray_actors.DIED}
