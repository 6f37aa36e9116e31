"""What runs clients: message and context in, reply and context out; a pool of executors, and local processes."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context, resource_tracker
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import RAISED, make_client_app
from pbfl_flwr.flower.client.device import as_worker, release_gpu_memory
from pbfl_flwr.flower.deploy.processes import HANGUPS
from pbfl_flwr.flower.engines.channel import Channel, channel
from pbfl_flwr.util.atomic_files import private_opener

DIED = "the worker process that ran it died; was there too little memory?"
FAILED = (
    "the worker process that ran it failed, see the error in flower.log or above; a script that uses several workers "
    "must start the run under if __name__ == '__main__':"
)
EXIT_SECONDS = 5.0  # to wait until a process whose pipe is closed has ended
WORKER = "pbfl-worker"  # name of a worker process
IMPORTS_A_RUN = 77  # its exit status if the script that it imports starts a run


@dataclass(frozen=True)
class WorkerSpec:
    """The resources of a worker process.

    Attributes:
        cores: number of CPU cores.
        gpus: value of CUDA_VISIBLE_DEVICES; empty hides all GPUs.
        log: the file to which its output is appended.
    """

    cores: int
    gpus: str
    log: Path


class WorkerDied(Exception):
    """A worker ended while it ran a client; gives the reason."""


class Executor(ABC):
    """Runs one client at a time in a process of its own.

    Attributes:
        spent: whether it can no longer use its GPU.
    """

    spent = False

    @abstractmethod
    def start(self) -> None:
        """Start the process, also a new one after the last one was killed."""

    def when_ready(self, call: Callable[[], object]) -> None:
        """Call a function once messages can be handled, here at once."""
        call()

    @abstractmethod
    def handle(self, message: Message, context: Context) -> Message:
        """Run a client, return its reply and copy its Flower state into ``context``.

        Raises:
            WorkerDied: if the process ended meanwhile.
        """

    @property
    def alive(self) -> bool:
        """Whether the process can handle another message, as far as is known."""
        return True

    @abstractmethod
    def kill(self) -> None:
        """End the process at once; safe, since clients write their files atomically."""

    def end(self) -> None:
        """End the process and release what belongs to it."""
        self.kill()


class ExecutorPool:
    """Executors, started on entering the context, ended on leaving it; one that dies costs a reply and is replaced."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._free: queue.SimpleQueue[Executor] = queue.SimpleQueue()
        self._ending = False
        self._busy: dict[int, Executor] = {}  # by node
        self._lock = threading.Lock()  # guards _busy, _ending, and starting and ending workers

    def __enter__(self) -> ExecutorPool:
        started: list[Executor] = []
        try:
            for executor in self._executors:
                executor.start()
                started.append(executor)
        except BaseException:
            with ExitStack() as stack:
                for executor in started:
                    stack.callback(executor.end)
            raise
        for executor in self._executors:
            self._await(executor)
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lock, ExitStack() as stack:  # a Ctrl-C meanwhile leaves no other worker behind
            self._ending = True
            for executor in self._executors:
                stack.callback(self._free.put, executor)  # so that no thread waits for one
                stack.callback(executor.end)

    def handle(self, message: Message, context: Context) -> Message:
        """Run a client on a free worker, return its reply and copy its Flower state into ``context``.

        Thread-safe. If the worker dies, only this call returns an error reply.
        """
        executor, node = self._free.get(), message.metadata.dst_node_id
        with self._lock:
            self._busy[node] = executor
        died = False
        try:
            return executor.handle(message, context)
        except WorkerDied as error:
            died = True
            return Message(Error(code=RAISED, reason=str(error)), reply_to=message)
        except PbflError:  # no worker can start; the run ends
            self._ending = True
            raise
        finally:
            with self._lock:
                if self._busy.get(node) is executor:
                    del self._busy[node]
                if (died or executor.spent or not executor.alive) and not self._ending:
                    executor.end()
                    executor.start()
            self._await(executor)

    def give_up(self, node: int) -> None:
        """Kill the worker that is processing a node's message, if there is one; it is restarted."""
        with self._lock:
            if (executor := self._busy.pop(node, None)) is not None:
                executor.kill()

    def _await(self, executor: Executor) -> None:
        executor.when_ready(partial(self._free.put, executor))


class ProcessExecutor(Executor):
    """A process on this machine and the parent's end of the channel to it.

    Not of :mod:`concurrent.futures`, whose workers outlive a killed parent, and whose pool is lost with one of them.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec

    def start(self) -> None:
        """Start the process, also a new one after the last one was killed."""
        self.spent = False
        self._channel, child_end = channel()
        context = get_context("spawn")  # torch's threads do not survive a fork
        self._process = context.Process(target=_work, args=(child_end, self._spec), daemon=True, name=WORKER)
        try:
            with environment(self._spec), _signals_blocked():
                self._process.start()
        except BaseException:  # a Ctrl-C that was blocked during the start
            if self._process.pid is not None:
                self.kill()
            raise
        child_end.close()  # so that reading fails when the process dies

    def handle(self, message: Message, context: Context) -> Message:
        """Run a client, return its reply and copy its Flower state into ``context``.

        Raises:
            WorkerDied: if the process ended meanwhile.
            PbflError: if the script that started the run has no main guard.
        """
        try:
            self._channel.send((message, context))
            answer: tuple[Message, RecordDict, bool] = self._channel.receive()
        except (EOFError, OSError):
            self._process.join(EXIT_SECONDS)
            if self._process.exitcode == IMPORTS_A_RUN:
                raise PbflError(
                    f"'{_script()}' starts a run with several workers, and each worker imports it and would start the "
                    "run again: must start it under if __name__ == '__main__':, or with one worker, "
                    "Resources(workers=1)"
                ) from None
            # 1 after an exception; negative after a signal.
            raise WorkerDied(FAILED if self._process.exitcode == 1 else DIED) from None
        reply, context.state, self.spent = answer
        return reply

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        """End the process and close the channel to it."""
        self.kill()
        self._channel.close()


def check_not_worker() -> None:
    """End this process if it is a worker of a run that imports the script that starts the run.

    Nothing is printed: what started the worker says it once.
    """
    if current_process().name == WORKER and _importing():
        raise SystemExit(IMPORTS_A_RUN)


def check_may_start_workers() -> None:
    """Check that this process can start workers, which import its script.

    Raises:
        PbflError: saying what to change.
    """
    one = "must take one worker, Resources(workers=1)"
    if _importing():
        raise PbflError(
            f"'{_script()}' is imported by a process that it starts, and would start the run there as well: must start "
            "it under if __name__ == '__main__':"
        )
    if current_process().daemon:
        raise PbflError(
            f"this process, '{current_process().name}', may not start others, like all of multiprocessing.Pool: {one}, "
            "or be one of concurrent.futures.ProcessPoolExecutor"
        )
    if _script() == "<stdin>":
        raise PbflError(
            f"workers import the script that starts them, and a script on standard input is no file: {one}"
        )


def _importing() -> bool:
    """Whether this process still imports the script of its parent; multiprocessing makes the same check."""
    return bool(getattr(current_process(), "_inheriting", False))


def _script() -> str:
    """Return the file of the script that was started."""
    return str(getattr(sys.modules["__main__"], "__file__", "this script"))


@contextmanager
def environment(spec: WorkerSpec) -> Iterator[None]:
    """Set environment variables that libraries read at their first use, here or in child processes."""
    variables = {"OMP_NUM_THREADS": str(spec.cores), "CUDA_VISIBLE_DEVICES": spec.gpus}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP in processes started meanwhile; only the parent handles these signals."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it together with the first process would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, *HANGUPS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(parent: Channel, spec: WorkerSpec) -> None:
    """Handle messages until the channel is closed, which also happens when the parent ends."""
    for number in (signal.SIGINT, signal.SIGTERM, *HANGUPS):  # clusters signal every process of a job
        signal.signal(number, signal.SIG_IGN)
    with open(spec.log, "ab", opener=private_opener) as log:
        for output in (1, 2):  # descriptors, since sys.stdout may be None
            os.dup2(log.fileno(), output)
    with as_worker(spec.cores):
        _handle_all(parent, make_client_app())


def _handle_all(parent: Channel, app: Callable[[Message, Context], Message]) -> None:
    while True:
        try:
            message, context = parent.receive()
        except EOFError:
            return
        reply = app(message, context)
        spent = reply.has_error() and not release_gpu_memory()
        parent.send((reply, context.state, spent))
