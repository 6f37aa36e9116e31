"""The simulation without Flower's engine: the same server, clients, messages and results; no SuperLink, no Ray.

It starts in the seconds that importing torch takes, and with one worker everything happens in this very process, so
that a debugger stops in a client. What Flower's engine adds is not there: other machines, ``flwr`` commands.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
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
from threadpoolctl import threadpool_limits
from torch.random import fork_rng

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import forget, make_client_app
from pbfl_flwr.flower.client.device import as_worker
from pbfl_flwr.flower.engines.flwr_engine import LOG
from pbfl_flwr.flower.engines.placement import Machine, Resources, places
from pbfl_flwr.flower.engines.worker_pool import WorkerPool, WorkerSpec, check_not_importing
from pbfl_flwr.flower.server.app import serve
from pbfl_flwr.flower.server.scheduling import LongestFirst
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.flower.server.waiting import MAX_INTERVAL, NodeLabel, OnWait, ignore, poll, waiting_line
from pbfl_flwr.flower.storage.run_locks import claim, lock_of

RUN_ID = FIRST_NODE = 2**62  # of the size of Flower's own, so that messages weigh the same

Answer = Callable[[Message, Context], Message]
Job = Callable[[], Message]
Submit = Callable[[Job], "Future[Message]"]
GiveUp = Callable[[int], object]
"""Takes a node whose question is not waited for any more."""


class LocalGrid(Grid):
    """The clients of a simulation behind Flower's interface.

    Args:
        answer: has a client answer.
        submit: does a job now or later.
        config: the run configuration that every client sees.
        num_clients: M.
        give_up: ends what a client is busy with.
    """

    def __init__(
        self,
        answer: Answer,
        submit: Submit,
        config: Mapping[str, Scalar],
        num_clients: int,
        give_up: GiveUp = lambda node: None,
    ) -> None:
        self._answer, self._submit, self._give_up = answer, submit, give_up
        self._config, self._num_clients = dict(config), num_clients
        self._states = [RecordDict() for _ in range(num_clients)]
        self._asked: dict[str, Future[Message]] = {}
        self._last: dict[int, Future[Message]] = {}  # of each node
        self._messages = 0
        self._order = LongestFirst()
        self._called: NodeLabel = str
        self._on_wait: OnWait = ignore

    def report_waiting(self, called: NodeLabel, on_wait: OnWait) -> None:
        """Take how a person calls the client on a node, and who is told whom one waits for."""
        self._called, self._on_wait = called, on_wait

    @property
    def run(self) -> Run:
        """An empty run."""
        return Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        """Nothing: there is one run."""

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
        """Have the clients answer, as many at once as there are workers.

        A client that is asked again while it is still busy with an earlier question would wait for itself: that
        question is given up.
        """
        return self._push(messages, float("inf"))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the answers that have come, each once."""
        came = [i for i in message_ids if i in self._asked and self._asked[i].done()]
        answers = [self._asked.pop(message_id).result() for message_id in came]
        for answer in answers:
            self._named(answer)
        return answers

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the answers that come in time; who has not begun by then is not asked any more."""
        asked, seconds = list(messages), float("inf") if timeout is None else timeout
        ids = self._push(asked, time.monotonic() + seconds)
        answers = [self._asked[message_id] for message_id in ids]

        def say() -> str:
            open_ = (question for question, answer in zip(asked, answers, strict=True) if not answer.done())
            return waiting_line(asked, open_, self._called)

        for _ in poll(seconds, say, self._on_wait, MAX_INTERVAL, lambda longest: wait(answers, longest)):
            if all(answer.done() for answer in answers):
                break
        return self.pull_messages(ids)

    def _push(self, messages: Iterable[Message], deadline: float) -> list[str]:
        asked = list(messages)
        ids = [self._named(message) for message in asked]
        for message in self._order.ordered(asked):
            node = message.metadata.dst_node_id
            if node in self._last and not self._last[node].done():
                self._give_up(node)
            self._last[node] = self._submit(partial(self._ask, message, deadline))
            self._asked[message.metadata.message_id] = self._last[node]
        return ids

    def _named(self, message: Message) -> str:
        """Give a message its id, as whoever carries messages does."""
        self._messages += 1
        message_id = str(UUID(int=self._messages))
        message.metadata.__dict__["_message_id"] = message_id
        return message_id

    def _ask(self, message: Message, deadline: float) -> Message:
        begin = time.monotonic()
        if begin >= deadline:
            return Message(
                Error(code=ErrorCode.UNKNOWN, reason="its turn came after the deadline"), reply_to=message
            )
        client = message.metadata.dst_node_id - FIRST_NODE
        place: dict[str, bool | float | int | str] = {
            "partition-id": client,
            "num-partitions": self._num_clients,
        }
        context = Context(
            RUN_ID, message.metadata.dst_node_id, place, self._states[client], dict(self._config)
        )
        answered = self._answer(message, context)
        self._states[client] = context.state
        self._order.record_duration(message, time.monotonic() - begin)
        return answered


def in_this_process(app: ClientApp | None = None) -> Answer:
    """Return the clients themselves, sharing nothing with the server but bytes, which nobody can change."""
    clients = app or make_client_app()
    return lambda message, context: deepcopy(clients(deepcopy(message), context))


def run_immediately(job: Job) -> Future[Message]:
    """Do a job in the thread that asks."""
    future: Future[Message] = Future()
    future.set_result(job())
    return future


def federate(
    run_dir: Path | str, config: Mapping[str, Scalar], num_clients: int, resources: Resources
) -> None:
    """Run a federation to its end, the server in this thread.

    Args:
        run_dir: of this run alone; what Flower logs goes into its flower.log.
        config: keys that differ from the defaults; with ``resume`` the run that is there goes on.
        num_clients: M; ``num-clients`` need not be among the keys.
        resources: of the workers; one worker is this process itself.

    Raises:
        RunRefused: if another run has the directory.
        PbflError: as :func:`pbfl_flwr.flower.server.app.serve`.
    """
    with _guest():
        run_here(Path(run_dir).absolute(), config, num_clients, resources)


def run_here(run_dir: Path, config: Mapping[str, Scalar], num_clients: int, resources: Resources) -> None:
    """Do what :func:`federate` does in a process that is the federation's own, and keep data for its next run.

    Args:
        run_dir: absolute, of this run alone.
        config: keys that differ from the defaults.
        num_clients: M.
        resources: of the workers.

    Raises:
        RunRefused: if another run has the directory.
        PbflError: as :func:`pbfl_flwr.flower.server.app.serve`.
    """
    if (said := config.get("num-clients", num_clients)) != num_clients:
        raise PbflError(
            f"num-clients = {said}, but the federation is of {num_clients}: allowed is the same number"
        )
    specs = worker_specs(resources, num_clients, run_dir / LOG)
    if len(specs) > 1:
        check_not_importing()
    lock = lock_of(run_dir)
    claim(lock, run_dir)
    keys = {**config, "num-clients": num_clients, "run-dir": str(run_dir)}
    with ExitStack() as stack:
        stack.callback(lock.release)
        stack.enter_context(_logged_to(run_dir / LOG))
        stack.enter_context(_environment(specs[0]))
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = RUN_ID  # messages ask for them
        if len(specs) == 1:
            stack.enter_context(as_worker(specs[0].cores))
            stack.enter_context(threadpool_limits(specs[0].cores))
            grid = LocalGrid(in_this_process(), run_immediately, keys, num_clients)
        else:
            threads = stack.enter_context(ThreadPoolExecutor(len(specs)))
            pool = stack.enter_context(WorkerPool(specs))  # ended first, so that no thread waits for it
            stack.callback(threads.shutdown, wait=False, cancel_futures=True)
            grid = LocalGrid(pool.answer, threads.submit, keys, num_clients, pool.give_up)
        serve(grid, keys, RUN_ID)


def federate_app(strategy: MethodStrategy, app: ClientApp) -> Result:
    """Run a strategy with any ClientApp in this process, one client after the other: no engine, no worker.

    Args:
        strategy: of as many clients as its ``num_clients`` says. It makes its rounds once; to run again make a new one.
        app: of every client; ``context.node_config["partition-id"]`` is the number of the one that is asked.

    Raises:
        PbflError: as :meth:`pbfl_flwr.flower.server.strategy.MethodStrategy.start`.
    """
    settings = strategy.settings
    with _guest(), as_worker(1), threadpool_limits(1):
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = RUN_ID
        torch.set_num_threads(1 if settings.training.threads == "auto" else settings.training.threads)
        return strategy.start(LocalGrid(in_this_process(app), run_immediately, {}, settings.run.num_clients))


@contextmanager
def _guest() -> Iterator[None]:
    """Be a guest in somebody's process, such as a notebook's.

    Nothing of its earlier runs is taken over, since code and files may have changed, and nothing of this one is kept;
    torch's generator of random numbers and its threads are afterwards as they were.
    """
    threads = torch.get_num_threads()
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    forget()
    try:
        with fork_rng(cards):
            yield
    finally:
        torch.set_num_threads(threads)
        forget()


def worker_specs(resources: Resources, num_clients: int, log: Path) -> list[WorkerSpec]:
    """Return one post a worker: as many as asked for, or as CPUs and GPUs allow, and no more than clients.

    Args:
        resources: of the workers.
        num_clients: M.
        log: the run's.

    Raises:
        PbflError: as :func:`pbfl_flwr.flower.engines.placement.places`.
    """
    found = places(Machine.here(resources), resources)
    return [WorkerSpec(resources.cpus_per_client, gpus, log) for gpus in found[:num_clients]]


@contextmanager
def _logged_to(file: Path) -> Iterator[None]:
    """Write Flower's log into a file instead of the terminal."""
    logger = logging.getLogger("flwr")
    before, handler = logger.handlers[:], logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.close()


@contextmanager
def _environment(spec: WorkerSpec) -> Iterator[None]:
    """What libraries read when they are first used, here or in the processes that are started."""
    wanted = {"OMP_NUM_THREADS": str(spec.cores), "CUDA_VISIBLE_DEVICES": spec.gpus}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
