"""Processes of this machine that run clients: each answers one message at a time, and one that dies is replaced."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import current_process, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.app import Context, Error, Message
from threadpoolctl import threadpool_limits

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import CLIENT_FAULT, make_client_app
from pbfl_flwr.flower.client.device import as_worker, release_gpu_memory
from pbfl_flwr.flower.engines.processes import HANGUPS

DIED = "the worker process that ran it died; was there too little memory?"
FAILED = (
    "the worker process that ran it ended with an error of its own, which stands in flower.log or above; a script that "
    "takes several workers starts them under if __name__ == '__main__':"
)
LAST_SECONDS = 5.0  # until a process whose pipe is closed has ended


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process is given.

    Attributes:
        cores: its share.
        gpus: what CUDA_VISIBLE_DEVICES is to be; empty hides them all.
        log: the file to which its output is added.
    """

    cores: int
    gpus: str
    log: Path


class WorkerPool:
    """Worker processes, started on entering and ended on leaving.

    Args:
        posts: one a process.
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._specs = specs
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._ending = False
        self._busy: dict[int, _Worker] = {}  # by node
        self._deciding = threading.Lock()

    def __enter__(self) -> WorkerPool:
        try:
            for spec in self._specs:
                self._workers.append(_Worker(spec))
        except BaseException:
            self.__exit__()
            raise
        for worker in self._workers:
            self._free.put(worker)
        return self

    def __exit__(self, *raised: object) -> None:
        with self._deciding:
            self._ending = True
            for worker in self._workers:
                worker.end()

    def answer(self, message: Message, context: Context) -> Message:
        """Have a free worker answer, and take what the client keeps in Flower's context from there.

        Several threads may call this at once; a worker that dies costs this answer alone.
        """
        worker, node = self._free.get(), message.metadata.dst_node_id
        with self._deciding:
            self._busy[node] = worker
        died = False
        try:
            return worker.answer(message, context)
        except (EOFError, OSError):
            died = True
            return Message(Error(code=CLIENT_FAULT, reason=worker.fate()), reply_to=message)
        finally:
            with self._deciding:
                if self._busy.get(node) is worker:
                    del self._busy[node]
                if (died or worker.spent or not worker.alive) and not self._ending:
                    worker.end()
                    worker.start()
            self._free.put(worker)

    def give_up(self, node: int) -> None:
        """End the worker that is busy with a node's message, if one is: another takes its place."""
        with self._deciding:
            if (worker := self._busy.pop(node, None)) is not None:
                worker.kill()


class _Worker:
    """One process and our end of the pipe to it.

    Attributes:
        spent: whether it cannot use its GPU any more.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.start()

    def start(self) -> None:
        self.spent = False
        context = get_context("spawn")  # a forked process has torch's threads half
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._spec), daemon=True)
        try:
            with _signals_blocked():
                self._process.start()
        except BaseException:  # Ctrl-C waited for the start
            if self._process.pid is not None:
                self.kill()
            raise
        theirs.close()  # so that its end is seen when it dies

    def answer(self, message: Message, context: Context) -> Message:
        self._ours.send_bytes(pickle.dumps((message, context)))
        answered: Message
        answered, context.state, self.spent = pickle.loads(self._ours.recv_bytes())
        return answered

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def fate(self) -> str:
        self._process.join(LAST_SECONDS)
        return FAILED if self._process.exitcode == 1 else DIED  # 1: of an exception; a signal's is negative

    def kill(self) -> None:
        self._process.kill()  # all that clients write is written atomically
        self._process.join()

    def end(self) -> None:
        self.kill()
        self._ours.close()


def check_not_importing() -> None:
    """Make sure that this is no worker that imports the script which started it.

    Raises:
        PbflError: naming what the script lacks.
    """
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise PbflError(
            "a worker imports the script that starts it, and would start the run again: put the call under "
            "if __name__ == '__main__': or take one worker"
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Have processes that are started not hear Ctrl-C, SIGTERM, nor that the terminal goes, from their first moment.

    It is the parent's to act upon.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its start, with that of the first process, would end our deafness
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, *HANGUPS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, spec: WorkerSpec) -> None:
    """Answer until the pipe is closed, as it is when the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, *HANGUPS):  # a cluster signals every process of a job
        signal.signal(number, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = spec.gpus
    with spec.log.open("ab") as log:
        for output in (1, 2):  # sys.stdout is None where the command's was closed
            os.dup2(log.fileno(), output)
    with as_worker(spec.cores), threadpool_limits(spec.cores):
        _answer_all(connection, make_client_app())


def _answer_all(connection: Connection, app: Callable[[Message, Context], Message]) -> None:
    while True:
        try:
            message, context = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answered = app(message, context)
        spent = answered.has_error() and not release_gpu_memory()
        connection.send_bytes(pickle.dumps((answered, context.state, spent)))
