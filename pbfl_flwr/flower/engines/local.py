"""Simulation without SuperLink: same server, clients, messages and results as through ``flwr run``.

With local processes it starts in the seconds that importing torch takes; with one worker everything runs in this
process, so a debugger can stop in a client.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from uuid import UUID

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from pbfl_flwr import seeds
from pbfl_flwr.config import Scalar
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.client.device import as_worker
from pbfl_flwr.flower.deploy.superlink import LOG
from pbfl_flwr.flower.engines.executors import (
    Executor,
    ExecutorPool,
    ProcessExecutor,
    WorkerSpec,
    check_may_start_workers,
    check_not_worker,
    environment,
)
from pbfl_flwr.flower.engines.only_run import only_run
from pbfl_flwr.flower.engines.placement import Machine, Resources, places
from pbfl_flwr.flower.server.app import serve
from pbfl_flwr.flower.server.grid import (
    MAX_INTERVAL,
    LongestFirst,
    NodeLabel,
    OnWait,
    ignore,
    poll,
    waiting_line,
)
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.runs.locks import claim, lock_of
from pbfl_flwr.util.atomic_files import private_opener

RUN_ID = FIRST_NODE = 2**62  # as large as Flower's own, so that messages have the same size

Handler = Callable[[Message, Context], Message]
Job = Callable[[], Message]
Submit = Callable[[Job], "Future[Message]"]
GiveUp = Callable[[int], object]
"""Called with the id of a node whose current message is no longer waited for."""


class LocalGrid(Grid):
    """A Flower grid whose nodes are the clients of a local simulation.

    ``give_up`` is called with a node whose current message is no longer waited for.
    """

    def __init__(
        self,
        handle: Handler,
        submit: Submit,
        config: Mapping[str, Scalar],
        num_clients: int,
        give_up: GiveUp = lambda node: None,
    ) -> None:
        self._handle, self._submit, self._give_up = handle, submit, give_up
        self._config, self._num_clients = dict(config), num_clients
        self._states = [RecordDict() for _ in range(num_clients)]
        self._replies: dict[str, Future[Message]] = {}  # by message id
        self._last: dict[int, Future[Message]] = {}  # latest reply by node, at least of those at work
        self._num_messages = 0
        self._order = LongestFirst()
        self._label: NodeLabel = str
        self._on_wait: OnWait = ignore

    def report_waiting(self, label: NodeLabel, on_wait: OnWait) -> None:
        """Set how clients are labelled, and what is called with each line on the clients waited for."""
        self._label, self._on_wait = label, on_wait

    @property
    def run(self) -> Run:
        """An empty run."""
        return Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        """Do nothing, since there is only one run."""

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the node of every client."""
        return [FIRST_NODE + client for client in range(self._num_clients)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Submit messages to the clients, which run in parallel on the workers.

        If a node is still processing an earlier message, that one is given up; the new one would wait for its lock.
        """
        return self._push(messages, float("inf"))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived, each once."""
        done = [i for i in message_ids if i in self._replies and self._replies[i].done()]
        replies = [self._replies.pop(message_id).result() for message_id in done]
        self._last = {node: reply for node, reply in self._last.items() if not reply.done()}  # frees replies
        for reply in replies:
            self._set_id(reply)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the replies that arrive in time; messages whose processing has not begun by then are dropped."""
        batch, seconds = list(messages), float("inf") if timeout is None else timeout
        ids = self._push(batch, time.monotonic() + seconds)
        replies = [self._replies[message_id] for message_id in ids]

        def status() -> str:
            awaited = (message for message, reply in zip(batch, replies, strict=True) if not reply.done())
            return waiting_line(batch, awaited, self._label)

        for _ in poll(seconds, status, self._on_wait, MAX_INTERVAL, lambda longest: wait(replies, longest)):
            if all(reply.done() for reply in replies):
                break
        return self.pull_messages(ids)

    def _push(self, messages: Iterable[Message], deadline: float) -> list[str]:
        batch = list(messages)
        ids = [self._set_id(message) for message in batch]
        for message in self._order.ordered(batch):
            node = message.metadata.dst_node_id
            if node in self._last and not self._last[node].done():
                self._give_up(node)
            self._last[node] = self._submit(partial(self._process, message, deadline))
            self._replies[message.metadata.message_id] = self._last[node]
        return ids

    def _set_id(self, message: Message) -> str:
        """Give a message its id, as Flower's grids do."""
        self._num_messages += 1
        message_id = str(UUID(int=self._num_messages))
        message.metadata.__dict__["_message_id"] = message_id
        return message_id

    def _process(self, message: Message, deadline: float) -> Message:
        begin = time.monotonic()
        if begin >= deadline:
            return Message(
                Error(code=ErrorCode.UNKNOWN, reason="not started before the deadline"), reply_to=message
            )
        client = message.metadata.dst_node_id - FIRST_NODE
        node_config: dict[str, bool | float | int | str] = {
            "partition-id": client,
            "num-partitions": self._num_clients,
        }
        context = Context(
            RUN_ID, message.metadata.dst_node_id, node_config, self._states[client], dict(self._config)
        )
        reply = self._handle(message, context)
        self._states[client] = context.state
        self._order.record_duration(message, time.monotonic() - begin)
        return reply


def in_this_process(clients: ClientApp) -> Handler:
    """Return a handler that runs clients in this process on copies of messages, so that no objects are shared."""
    return lambda message, context: deepcopy(clients(deepcopy(message), context))


def run_immediately(job: Job) -> Future[Message]:
    """Run a job in the calling thread."""
    future: Future[Message] = Future()
    future.set_result(job())
    return future


def federate(
    run_dir: Path | str, config: Mapping[str, Scalar], num_clients: int, resources: Resources
) -> None:
    """Run a federation to its end, with the server in this thread.

    Args:
        run_dir: used by this run only; Flower's log is written to its flower.log.
        config: keys that differ from the defaults; with ``resume`` the existing run is continued.
        num_clients: M; ``num-clients`` need not be among the keys.
        resources: of the workers; with one worker, clients run in this process.

    Raises:
        RunRefused: if another run uses the directory.
        PbflError: if this process is in a run already, or several workers cannot import its script; also as
            :func:`pbfl_flwr.flower.server.app.serve`.
    """
    _run(Path(run_dir).absolute(), config, num_clients, resources, LoadedData(), _restored())


def run_here(
    run_dir: Path,
    config: Mapping[str, Scalar],
    num_clients: int,
    resources: Resources,
    loaded: LoadedData | None = None,
) -> None:
    """Do the same as :func:`federate` in a dedicated process, whose random states may change.

    The directory is an absolute path; ``loaded`` is data that this process has read before.

    Raises:
        RunRefused: if another run uses the directory.
        PbflError: as :func:`federate`.
    """
    _run(run_dir, config, num_clients, resources, loaded or LoadedData(), nullcontext())


def _run(
    run_dir: Path,
    config: Mapping[str, Scalar],
    num_clients: int,
    resources: Resources,
    loaded: LoadedData,
    around: AbstractContextManager[None],
) -> None:
    """Run a federation in a context, which is entered once the run is this process's only one."""
    check_not_worker()
    if (configured := config.get("num-clients", num_clients)) != num_clients:
        raise PbflError(
            f"num-clients = {configured}, but the federation has {num_clients} clients: must be the same number"
        )
    if resources.engine != "ray":
        specs = worker_specs(resources, num_clients, run_dir / LOG)
        if len(specs) > 1:
            check_may_start_workers()
    lock = lock_of(run_dir)
    claim(lock, run_dir)
    keys = {**config, "num-clients": num_clients, "run-dir": str(run_dir)}
    with ExitStack() as stack:
        stack.callback(lock.release)
        stack.enter_context(only_run(str(run_dir)))
        stack.enter_context(around)
        stack.enter_context(_logged_to(run_dir / LOG))
        # Read by Flower's messages.
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = RUN_ID
        if resources.engine == "ray":
            from pbfl_flwr.flower.engines.ray_actors import ray_workers

            states = Path(str(config.get("state-dir") or run_dir / "clients"))
            workers = stack.enter_context(ray_workers(resources, num_clients, states))
            grid = stack.enter_context(_pooled(workers, keys, num_clients))
        elif len(specs) > 1:
            stack.enter_context(environment(specs[0]))
            grid = stack.enter_context(_pooled([*map(ProcessExecutor, specs)], keys, num_clients))
        else:
            stack.enter_context(environment(specs[0]))
            stack.enter_context(as_worker(specs[0].cores))
            clients = in_this_process(make_client_app(loaded=loaded))
            grid = LocalGrid(clients, run_immediately, keys, num_clients)
        serve(grid, keys, RUN_ID, loaded)


@contextmanager
def _pooled(
    workers: Sequence[Executor], config: Mapping[str, Scalar], num_clients: int
) -> Iterator[LocalGrid]:
    """Yield a grid each of whose messages runs on the next free worker."""
    # The pool is closed first, so that no thread waits for a worker.
    with ThreadPoolExecutor(len(workers)) as threads, ExecutorPool(workers) as pool:
        try:
            yield LocalGrid(pool.handle, threads.submit, config, num_clients, pool.give_up)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def federate_app(strategy: MethodStrategy, app: ClientApp) -> Result:
    """Run a strategy with any ClientApp in this process, one client after the other, without engine or workers.

    Args:
        strategy: its ``num_clients`` is the number of clients. It can run only once; make a new one to run again. After
            an interruption it makes the remaining rounds.
        app: run for every client; ``context.node_config["partition-id"]`` is the client's number, and
            ``context.run_config`` has the strategy's settings.

    Raises:
        PbflError: if this process is in a run already, or the strategy has made all its rounds; also as
            :meth:`pbfl_flwr.flower.server.strategy.MethodStrategy.start`.
    """
    check_not_worker()
    if strategy.finished:
        raise PbflError("this strategy has made all its rounds; must be a new one to run again")
    settings = strategy.settings
    name = str(strategy.directory.path) if strategy.directory else f"a strategy of {strategy.method.name}"
    with only_run(name), _restored(), as_worker(1):
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = RUN_ID
        torch.set_num_threads(1 if settings.training.threads == "auto" else settings.training.threads)
        config, num_clients = settings.as_dict(), settings.run.num_clients
        return strategy.start(LocalGrid(in_this_process(app), run_immediately, config, num_clients))


@contextmanager
def _restored() -> Iterator[None]:
    """Leave no side effects in a user's process, such as a notebook.

    Random states, torch's number of threads and its deterministic mode are restored.
    """
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with seeds.restored(gpus):
            yield
    finally:
        torch.set_num_threads(threads)
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warns)
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


def worker_specs(resources: Resources, num_clients: int, log: Path) -> list[WorkerSpec]:
    """Return a spec for each worker: as many as configured, or as CPUs and GPUs allow, and at most one per client.

    Raises:
        PbflError: as :func:`pbfl_flwr.flower.engines.placement.places`.
    """
    shares = places(Machine.here(resources), resources)
    return [WorkerSpec(resources.cpus_per_client, gpus, log) for gpus in shares[:num_clients]]


class _LogFile(logging.FileHandler):
    """A log in a private file; lines that the disk does not take are lost, since a run ends for its results alone."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=private_opener)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        """Print no traceback for every line that finds no room."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, which tries once more to write."""
        with suppress(OSError):
            super().close()


@contextmanager
def _logged_to(file: Path) -> Iterator[None]:
    """Write Flower's log to a file instead of the terminal."""
    logger = logging.getLogger("flwr")
    before = logger.handlers[:]
    handler = _LogFile(file)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.close()
