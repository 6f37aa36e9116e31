"""Runs beside each other on one machine, each in a process of its own: how many fit, and how they are made."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pbfl_flwr.errors import PbflError, writing
from pbfl_flwr.experiments.comparing import compare
from pbfl_flwr.experiments.comparing.compare import INTERRUPTED, Planned, refused, to_make
from pbfl_flwr.experiments.running import configuration
from pbfl_flwr.experiments.running.live_log import Follower
from pbfl_flwr.experiments.running.runner import interruptible
from pbfl_flwr.experiments.text.numbers import say
from pbfl_flwr.flower.engines.placement import Machine, Resources, Slot, slots
from pbfl_flwr.flower.engines.processes import Processes, signals_ignored
from pbfl_flwr.flower.memory import available_memory

ENGINE_MB = 900  # SuperLink, SuperExec, simulation and Ray; docs/experiments.md has the measurement
WORKER_MB = 350
PROCESS_MB = (
    600  # of --engine processes, where the command serves, and trains itself if it has no worker beside it
)
LOG = "pbfl.log"
POLL_SECONDS = 0.5
CLEARING_SECONDS = 60.0  # an interrupted run stops Flower and ends its processes, the last of them by force


def room(wanted: int, available: int | None, machine: Machine, wishes: Resources) -> list[Slot]:
    """Return what each of the runs that fit beside each other gets: at least one run and at most as many as wanted.

    Args:
        wanted: runs.
        available: bytes of memory that programs can still get; None where it is not known.
        machine: its CPUs and cards, which the runs share.
        wishes: of the workers of each run.

    Raises:
        PbflError: as :func:`pbfl_flwr.flower.engines.placement.places`.
    """
    need = _without_engine if wishes.processes else _with_engine
    room_mb = math.inf if available is None else available / 2**20
    shared = [slots(machine, wishes, count) for count in range(1, min(wanted, machine.cpus) + 1)]
    fit = [found for found in shared if found and sum(need(slot.workers) for slot in found) <= room_mb]
    return fit[-1] if fit else shared[0]


def _with_engine(workers: int) -> float:
    return ENGINE_MB + workers * WORKER_MB


def _without_engine(workers: int) -> float:
    return PROCESS_MB * (1 if workers == 1 else 1 + workers)


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


def room_here(wanted: int, wishes: Resources, console: Console) -> list[Slot]:
    """Return what each of the runs that are made at once on this machine gets, and say if they are fewer than wanted.

    Raises:
        PbflError: see :func:`room`.
    """
    shared = room(wanted, available_memory(), Machine.here(wishes), wishes)
    if len(shared) < wanted:
        what = "memory, CPUs and GPUs have" if wishes.gpus_per_client else "memory and CPUs have"
        say(console, f"--parallel {wanted}: {what} room for {len(shared)}", "yellow")
    return shared


def make(
    planned: Sequence[Planned],
    shared: Sequence[Slot],
    app: Path,
    resources: Resources,
    console: Console,
    after: Callable[[Planned], object] = lambda run: None,
) -> list[str]:
    """Make the runs that are not finished, in this process or beside each other, and return what failed.

    Args:
        planned: in the order in which they are made.
        shared: what each of those that are made at once gets; a single one is made here.
        app: directory of the Flower app.
        resources: of the workers of each run.
        console: where the lines go.
        after: called after every run that was made.

    Raises:
        KeyboardInterrupt: if this process or one of the runs was interrupted.
    """
    if len(shared) == 1:
        return compare.make(planned, compare.starter(app, resources, console), after)

    def command_of(run: Planned, slot: Slot) -> list[str]:
        return command(run, app, replace(resources, workers=slot.workers))

    return make_side_by_side(planned, shared, command_of, console, after)


def make_side_by_side(
    planned: Sequence[Planned],
    shared: Sequence[Slot],
    command_of: Callable[[Planned, Slot], Sequence[str]],
    console: Console,
    after: Callable[[Planned], object] = lambda run: None,
) -> list[str]:
    """Make the runs that are not finished, several at once, and return what failed.

    Each is a process of its own, whose output goes to ``pbfl.log`` in the run's directory. When this process is
    interrupted, all of them are, and have cleared up when it ends; when it is killed, their wardens end them.

    Args:
        planned: in the order in which they are started.
        shared: what each of those that are made at once gets.
        command_of: the command line of a run in a slot.
        console: where a line goes when a run starts and ends, and for each of its rounds.
        after: called after every run that was made.

    Raises:
        KeyboardInterrupt: if this process or one of the runs was interrupted.
    """
    waiting: list[Planned] = []
    running: list[_Running] = []
    free = [*shared]
    failed: list[str] = []
    for run in planned:
        try:
            waiting += [] if to_make(run) is None else [run]
        except PbflError as error:
            failed.append(refused(run, error))
    names = _names(planned)
    with interruptible():
        try:
            while waiting or running:
                while waiting and free:
                    run, slot = waiting.pop(0), free.pop(0)
                    name = names[run.directory]
                    rounds = configuration.check(run.wishes).run.num_server_rounds
                    follower = Follower(run.directory, rounds, console, name)
                    try:
                        running.append(_start(run, command_of(run, slot), slot, follower))
                    except PbflError as error:
                        failed.append(refused(run, error))
                        free.append(slot)
                        continue
                    say(console, f"{name}: started, see {run.directory / LOG}")
                for one in running[:]:
                    code = one.process.poll()
                    one.follower.look()
                    if code is None:
                        continue
                    one.processes.close()
                    running.remove(one)
                    free.append(one.slot)
                    if code == INTERRUPTED:
                        raise KeyboardInterrupt
                    said = f"failed, see {one.run.directory / LOG}" if code else "finished"
                    say(console, f"{names[one.run.directory]}: {said}", "red" if code else "")
                    failed += [one.run.name] if code else []
                    after(one.run)
                time.sleep(POLL_SECONDS)
        finally:
            with signals_ignored():
                _end(running)
    return failed


def _names(planned: Sequence[Planned]) -> dict[Path, str]:
    """Return directory -> what its lines begin with: its path below what all runs have in common."""
    if not planned:
        return {}
    common = os.path.commonpath([run.directory.parent for run in planned])
    return {run.directory: str(run.directory.relative_to(common)) for run in planned}


@dataclass(frozen=True, eq=False)
class _Running:
    """A run that is being made, in a process with a warden of its own: a number may be another process's later."""

    run: Planned
    slot: Slot
    process: subprocess.Popen[bytes]
    processes: Processes
    follower: Follower


def _start(run: Planned, words: Sequence[str], slot: Slot, follower: Follower) -> _Running:
    cards = {"CUDA_VISIBLE_DEVICES": slot.cards} if slot.cards else {}
    with writing(run.directory):
        run.directory.mkdir(parents=True, exist_ok=True)
        log = (run.directory / LOG).open("ab")
    processes = Processes()
    with log:
        environment = {**os.environ, **cards, "COLUMNS": "160"}
        process = processes.start(words, Path.cwd(), environment, log)
        return _Running(run, slot, process, processes, follower)


def _end(running: Sequence[_Running]) -> None:
    """Interrupt all at once, give them time to clear up, and end what is left."""
    for one in running:
        one.process.terminate()
    end = time.monotonic() + CLEARING_SECONDS
    for one in running:
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, end - time.monotonic()))
    for one in running:
        one.processes.close()
