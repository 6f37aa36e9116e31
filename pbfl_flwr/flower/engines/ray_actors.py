"""Workers that are Ray actors, spread over the nodes of a cluster or on a Ray of this run's own.

Clients' states are in the run's directory, as with any engine. If not all nodes see it, each state travels with the
messages of its client and the driver writes it, so that any node can run any client and a lost one loses nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context, Message, RecordDict
from flwr.common import log
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from threadpoolctl import threadpool_limits

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.client.device import release_gpu_memory
from pbfl_flwr.flower.engines.executors import Executor, WorkerDied
from pbfl_flwr.flower.engines.placement import Machine, Resources, places
from pbfl_flwr.flower.engines.ray_cluster import connected
from pbfl_flwr.runs.client_store import ClientStore
from pbfl_flwr.util.atomic_files import UnsavedState, make_directory, write_atomically

DIED = "the Ray worker that ran it or its node died"
RETRY_SECONDS = 10.0  # until a worker that did not start is tried again
KILL_SECONDS = 1.0  # for the cluster's head to have an actor ended
CHECK_SECONDS = 120.0  # for all nodes to import the package
REMOVAL = """exec 3<&0; (trap '' HUP INT TERM; read -r _ <&3; rm -rf -- "$0") &"""

Files = dict[str, bytes]
"""A client's state files by their paths below the directory of all states."""


@contextmanager
def ray_workers(resources: Resources, num_clients: int, states: Path) -> Iterator[list[Executor]]:
    """Yield the workers of a run, not started yet, while connected to the cluster or a Ray of the run's own.

    Raises:
        PbflError: as :func:`pbfl_flwr.flower.engines.ray_cluster.connected`, :func:`check_nodes` and
            :func:`pbfl_flwr.flower.engines.placement.places`.
    """
    cpus = 0 if resources.ray_address else _num_workers(resources, num_clients) * resources.cpus_per_client
    with connected(resources.ray_address, cpus):
        travel = bool(resources.ray_address) and not check_nodes(states)
        if travel:
            log(INFO, "not all Ray nodes see %s: the clients' states travel with their messages", states)
        count = _num_workers(resources, num_clients)
        yield [RayExecutor(resources, states if travel else None) for _ in range(count)]


def _num_workers(resources: Resources, num_clients: int) -> int:
    return min(num_clients, len(places(Machine.here(resources), resources)))


def check_nodes(states: Path) -> bool:
    """Check that all nodes of the cluster run the code of this process.

    Args:
        states: directory of the clients' states.

    Returns:
        Whether all of them see that directory.

    Raises:
        PbflError: naming the first node that has another pbfl-flwr or Flower, or none.
    """
    make_directory(states)
    token = states / f".shared-{uuid.uuid4().hex}"
    token.touch()
    inspect = _inspector(str(token))
    try:
        expected, _ = inspect()
        task = ray.remote(num_cpus=0, max_retries=0)(inspect)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        on_nodes = [NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in nodes]
        answers = [task.options(scheduling_strategy=on_node).remote() for on_node in on_nodes]
        shared = True
        for node, answer in zip(nodes, answers, strict=True):
            name = node["NodeManagerHostname"]
            try:
                version, visible = ray.get(answer, timeout=CHECK_SECONDS)
            except ray.exceptions.RayError as error:
                raise PbflError(f"Ray node {name} cannot run clients: {_last_line(error)}") from None
            if version != expected:
                raise PbflError(f"Ray node {name} has {version}, this machine {expected}: install the same")
            shared = shared and visible
        return shared
    finally:
        token.unlink()


def _inspector(token: str) -> Callable[[], tuple[str, bool]]:
    """Return a function that a node without the package can run, too, since Ray sends inner functions as code."""

    def inspect() -> tuple[str, bool]:
        import importlib.metadata
        import os

        try:
            from pbfl_flwr.flower.code_version import code_version
        except ImportError as error:
            return f"no pbfl-flwr ({error})", False
        version = f"pbfl-flwr {code_version()} and flwr {importlib.metadata.version('flwr')}"
        return version, os.path.exists(token)

    return inspect


class RayExecutor(Executor):
    """An actor with its share of CPUs and GPUs, wherever the cluster has room for it.

    Args:
        resources: of the worker.
        states: directory of the clients' states if they travel with the messages; None if the nodes see it.
    """

    def __init__(self, resources: Resources, states: Path | None) -> None:
        self._states = states
        self._make = ray.remote(_Actor).options(
            num_cpus=resources.cpus_per_client,
            num_gpus=resources.gpus_per_client,
            scheduling_strategy="SPREAD",
        )
        self._arguments = (resources.cpus_per_client, resources.gpus_per_client, states is not None)

    def start(self) -> None:
        """Ask for an actor, which starts once there is room for it; one that is lost is replaced by a new one."""
        self.spent = self._ended = False
        self._actor: Any = self._make.remote(*self._arguments)

    def when_ready(self, call: Callable[[], object]) -> None:
        """Call a function once the actor runs; if it cannot start, ask for another one."""

        def done(ready: Future[None]) -> None:
            if self._ended:
                return
            if (error := ready.exception()) is None:
                call()
                return
            log(WARNING, "a Ray worker did not start: %s", _last_line(error))
            retry = threading.Timer(RETRY_SECONDS, self._start_again, (call,))
            retry.daemon = True
            retry.start()

        self._actor.ready.remote().future().add_done_callback(done)

    def _start_again(self, call: Callable[[], object]) -> None:
        if not self._ended:
            self.start()
            self.when_ready(call)

    def handle(self, message: Message, context: Context) -> Message:
        """Run a client, return its reply and copy its Flower state into ``context``.

        Raises:
            WorkerDied: if the actor or its node died meanwhile.
            UnsavedState: if a disk does not take the client's states, here or on its node; the run ends.
        """
        client = int(context.node_config["partition-id"])
        state_files = _read(self._states, client) if self._states else {}
        try:
            answer = ray.get(self._actor.handle.remote(message, context, state_files))
        except ray.exceptions.RayActorError:
            raise WorkerDied(DIED) from None
        except UnsavedState as error:  # Ray has made a traceback of its text
            raise UnsavedState(_last_line(error).partition(": ")[2]) from None
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"the Ray worker that ran it failed: {_last_line(error)}") from None
        reply: Message
        reply, context.state, files, self.spent = answer
        if self._states:
            _write(self._states, files, replaced=state_files)
        return reply

    def kill(self) -> None:
        """End the actor at once; if the cluster's head has died, Ray would await it until it ends this process."""
        killing = threading.Thread(target=ray.kill, args=(self._actor,), daemon=True)
        killing.start()
        killing.join(KILL_SECONDS)

    def end(self) -> None:
        """End the actor, and do not replace it."""
        self._ended = True
        self.kill()


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[-1]


def _read(states: Path, client: int) -> Files:
    stem = ClientStore(states, "", client, "").path.stem
    return {str(path.relative_to(states)): path.read_bytes() for path in sorted(states.glob(f"*/{stem}.*"))}


def _write(states: Path, files: Mapping[str, bytes], *, replaced: Mapping[str, bytes]) -> None:
    """Write the files that changed; nothing removes a client's state."""
    for name, data in files.items():
        if replaced.get(name) != data:
            make_directory((states / name).parent)
            write_atomically(states / name, data, locked=True, flushed=False)


def _scratch_directory() -> Path:
    """Make a private directory that is removed when this process has ended, even if it is killed.

    Ray ends an actor without running any more of its code, and may kill its children: an orphan waits for the end of
    the pipe that this process holds open.
    """
    directory = tempfile.mkdtemp(prefix="pbfl-")
    waiting, _ = os.pipe()
    subprocess.run(["sh", "-c", REMOVAL, directory], stdin=waiting, start_new_session=True, check=True)
    os.close(waiting)
    return Path(directory)


class _Actor:
    """Runs clients in a worker process of Ray."""

    def __init__(self, cpus: int, gpus: float, travelling: bool) -> None:
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        threadpool_limits(cpus)
        self._app = make_client_app()
        self._states = _scratch_directory() if travelling else None

    def ready(self) -> None:
        """Return once the actor runs."""

    def handle(
        self, message: Message, context: Context, state_files: Files
    ) -> tuple[Message, RecordDict, Files, bool]:
        """Return a client's reply, its Flower state, its state files, and whether the GPU can no longer be used."""
        if (states := self._states) is None:
            reply, files = self._app(message, context), {}
        else:
            context.run_config["state-dir"] = str(states)
            _write(states, state_files, replaced={})
            reply = self._app(message, context)
            files = _read(states, int(context.node_config["partition-id"]))
            for folder in states.iterdir():
                shutil.rmtree(folder)
        return reply, context.state, files, reply.has_error() and not release_gpu_memory()
