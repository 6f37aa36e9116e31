"""Runs beside each other on one machine, each in a process of its own: how many fit, and how they are made."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pbfl_flwr.errors import PbflError, writing
from pbfl_flwr.experiments.compare import INTERRUPTED, Planned, ready, refused
from pbfl_flwr.experiments.runner import interruptible
from pbfl_flwr.flower.engine import Resources

ENGINE_MB = 900  # SuperLink, SuperExec, simulation and Ray; docs/experiments.md has the measurement
WORKER_MB = 350
PROCESS_MB = (
    600  # of --engine processes, where the command serves, and trains itself if it has no worker beside it
)
POLL_SECONDS = 0.5


def room(wanted: int, available: int | None, cpus: int, *, processes: bool = False) -> int:
    """Return how many runs fit beside each other, at least 1 and at most as many as wanted.

    Args:
        wanted: runs.
        available: bytes of memory that programs can still get; None where it is not known.
        cpus: CPUs of the machine; each run has at least one worker.
        processes: whether they are made without Flower's engine.
    """
    need = _without_engine if processes else _with_engine
    room_mb = math.inf if available is None else available / 2**20
    fit = [
        count for count in range(1, min(wanted, cpus) + 1) if count * need(workers(count, cpus)) <= room_mb
    ]
    return max(fit, default=1)


def _with_engine(workers: int) -> float:
    return ENGINE_MB + workers * WORKER_MB


def _without_engine(workers: int) -> float:
    return PROCESS_MB * (1 if workers == 1 else 1 + workers)


def workers(count: int, cpus: int) -> int:
    """Return the worker processes of each of ``count`` runs: together one for every CPU."""
    return max(1, cpus // count)


def command(run: Planned, app: Path, resources: Resources) -> list[str]:
    """Return the command line that makes or goes on with a run in a process of its own."""
    wishes = run.wishes.values
    engine = ["--engine", "processes"] if resources.processes else ["--app", str(app)]
    words = [sys.executable, "-m", "pbfl_flwr.cli", "run", *engine]
    words += ["--gpus-per-client", str(resources.gpus_per_client), "--workers", str(resources.workers or 1)]
    words += ["--resume" if (run.directory / "run.json").exists() else "--run-dir", str(run.directory)]
    for key, value in wishes.items():
        words += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    return words


def make_side_by_side(
    planned: Sequence[Planned],
    slots: int,
    command_of: Callable[[Planned], Sequence[str]],
    tell: Callable[[str], None],
    after: Callable[[Planned], object] = lambda run: None,
) -> list[str]:
    """Make the runs that are not finished, several at once, and return what failed.

    Each is a process of its own, whose output goes to ``pbfl.log`` in the run's directory. When this process is
    interrupted, all of them are, and have cleared up when it ends.

    Args:
        planned: in the order in which they are started.
        slots: how many at once.
        command_of: the command line of a run.
        tell: takes a line when a run starts and ends.
        after: called after every run that was made.

    Raises:
        KeyboardInterrupt: if this process or one of the runs was interrupted.
    """
    waiting: list[Planned] = []
    running: dict[subprocess.Popen[bytes], Planned] = {}
    failed: list[str] = []
    for run in planned:
        try:
            waiting += [] if ready(run) else [run]
        except PbflError as error:
            failed.append(refused(run, error))
    with interruptible():
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    run = waiting.pop(0)
                    tell(f"{run.directory.name}: started, see {run.directory / 'pbfl.log'}")
                    running[_start(run, command_of(run))] = run
                for process, run in list(running.items()):
                    if (code := process.poll()) is None:
                        continue
                    del running[process]
                    if code == INTERRUPTED:
                        raise KeyboardInterrupt
                    tell(f"{run.directory.name}: {'failed' if code else 'finished'}")
                    failed += [run.name] if code else []
                    after(run)
                time.sleep(POLL_SECONDS)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    return failed


def _start(run: Planned, words: Sequence[str]) -> subprocess.Popen[bytes]:
    with writing(run.directory):
        run.directory.mkdir(parents=True, exist_ok=True)
        log = (run.directory / "pbfl.log").open("ab")
    with log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "160"},
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on
        )
