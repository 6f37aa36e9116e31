"""Execution of several runs, one after the other or in parallel.

Parallel runs share this machine, each in a process of its own, as many as memory, CPUs and GPUs allow.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pbfl_flwr.config.toml import written
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError, writing
from pbfl_flwr.experiments.console import print_blocks, say
from pbfl_flwr.experiments.execute.progress import Follower
from pbfl_flwr.experiments.execute.runner import INTERRUPTED, simulate
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, edited_line, set_aside, standing
from pbfl_flwr.flower.deploy.processes import Processes, signals_ignored
from pbfl_flwr.flower.engines.placement import Machine, Resources, Slot, slots
from pbfl_flwr.util.atomic_files import make_directory, private_opener
from pbfl_flwr.util.memory import available_memory
from pbfl_flwr.util.user_code import interpreter

Start = Callable[[configuration.RequestedKeys, Path], int]
"""(keys, run directory) -> exit code of the run."""
ENGINE_MB = 900  # Ray, and with Flower's engine its processes; measured in docs/experiments.md
WORKER_MB = 350
PROCESS_MB = 600  # a server process; with --engine processes also each of several workers
COLUMNS = ("run", "method", "state", "seed", "rounds", "directory")  # of a dry run
LOG = "pbfl.log"
POLL_SECONDS = 0.5
CLEARING_SECONDS = 60.0  # for an interrupted run to stop Flower and its processes; then they are killed


def fitting_slots(wanted: int, available: int | None, machine: Machine, requested: Resources) -> list[Slot]:
    """Return the resources of each of the runs that fit in parallel: at least one run, at most as many as wanted.

    Args:
        wanted: number of runs.
        available: free memory in bytes; None if unknown.
        machine: its CPUs and GPUs, which the runs share.
        requested: resources of the workers of each run.

    Raises:
        PbflError: as :func:`pbfl_flwr.flower.engines.placement.places`.
    """
    room_mb = math.inf if available is None else available / 2**20
    shared = [slots(machine, requested, count) for count in range(1, min(wanted, machine.cpus) + 1)]
    fit = [
        fitting
        for fitting in shared
        if fitting and sum(_need_mb(requested, slot.workers) for slot in fitting) <= room_mb
    ]
    return fit[-1] if fit else shared[0]


def _need_mb(requested: Resources, workers: int) -> float:
    """Return the memory that a run needs on this machine."""
    if requested.ray_address:
        return PROCESS_MB
    if requested.engine == "processes":
        return PROCESS_MB * (1 if workers == 1 else 1 + workers)
    return ENGINE_MB + workers * WORKER_MB


def command(run: PlannedRun, app: Path, resources: Resources) -> list[str]:
    """Return the command line that starts or resumes a run in its own process."""
    requested = run.requested.values
    source = ["--app", str(app)] if resources.engine == "flower" else []
    words = [*interpreter(), "-m", "pbfl_flwr.cli", "run", *resources.options, *source]
    words += ["--gpus-per-client", str(resources.gpus_per_client), "--workers", str(resources.workers or 1)]
    words += ["--resume" if (run.directory / "run.json").exists() else "--run-dir", str(run.directory)]
    for key, value in requested.items():
        words += ["--set", f"{key}={written(value)}"]
    return words


def slots_here(wanted: int, requested: Resources, console: Console) -> list[Slot]:
    """Return the resources of each parallel run on this machine, and print a line if fewer than wanted fit.

    Raises:
        PbflError: see :func:`fitting_slots`.
    """
    shared = fitting_slots(wanted, available_memory(), Machine.here(requested), requested)
    if len(shared) < wanted:
        what = "memory, CPUs and GPUs have" if requested.gpus_per_client else "memory and CPUs have"
        say(console, f"--parallel {wanted}: {what} room for {len(shared)}", "yellow")
    return shared


def run_all(
    planned: Sequence[PlannedRun],
    shared: Sequence[Slot],
    app: Path,
    resources: Resources,
    console: Console,
    after: Callable[[PlannedRun], object],
    loaded: LoadedData,
) -> list[str]:
    """Execute the runs that are not finished, in this process or in parallel, and return the failed ones.

    With resources of a single slot the runs are executed in this process; ``loaded`` is data that it has read before.

    Raises:
        KeyboardInterrupt: if this process or one of the runs was interrupted.
    """

    def start(requested: configuration.RequestedKeys, run_dir: Path) -> int:
        say(console, f"{run_dir.name}: {configuration.check(requested).run.method}")
        return simulate(app, run_dir, requested, resources, console, loaded)

    def command_of(run: PlannedRun, slot: Slot) -> list[str]:
        return command(run, app, replace(resources, workers=slot.workers))

    if len(shared) == 1:
        return run_in_turn(planned, start, after)
    return run_in_parallel(planned, shared, command_of, console, after)


def run_in_turn(
    planned: Sequence[PlannedRun], start: Start, after: Callable[[PlannedRun], object] = lambda run: None
) -> list[str]:
    """Execute the runs that are not finished, one after the other, and return the failed ones.

    An interrupted run is resumed; a run that fails or is refused does not stop the others.

    Raises:
        KeyboardInterrupt: if a run was interrupted.
    """
    failed = []
    for run in planned:
        now = standing(run)
        failed += [now.refusal] if now.refusal else []
        if now.keys is None:
            continue
        try:
            if now.state == "to run again":
                set_aside(run)
            code = start(now.keys, run.directory)
        except PbflError as error:
            failed.append(f"{run.name}: {error}")
            continue
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            failed.append(run.name)
        after(run)
    return failed


def run_in_parallel(
    planned: Sequence[PlannedRun],
    shared: Sequence[Slot],
    command_of: Callable[[PlannedRun, Slot], Sequence[str]],
    console: Console,
    after: Callable[[PlannedRun], object] = lambda run: None,
) -> list[str]:
    """Execute the runs that are not finished, several at a time, and return the failed ones.

    Each is a process, whose output goes to ``pbfl.log`` in the run's directory. If this process is interrupted, so are
    all of them, and it waits until they have cleaned up; if it is killed, their watchdogs end them.

    Args:
        planned: runs in the order in which they are started.
        shared: resources of each parallel run.
        command_of: returns the command line of a run in a slot.
        console: to print to, when a run starts and ends and for each of its rounds.
        after: called after every executed run.

    Raises:
        KeyboardInterrupt: if this process or one of the runs was interrupted.
    """
    standings = [(run, standing(run)) for run in planned]
    waiting = [run for run, now in standings if now.keys is not None]
    failed = [now.refusal for _, now in standings if now.refusal]
    running: list[_Running] = []
    free = [*shared]
    names = _prefixes(planned)
    try:
        while waiting or running:
            while waiting and free:
                run, slot = waiting.pop(0), free.pop(0)
                name = names[run.directory]
                rounds = configuration.check(run.requested).run.num_server_rounds
                follower = Follower(run.directory, rounds, console, name)
                try:
                    if standing(run).state == "to run again":
                        set_aside(run)
                    running.append(_start(run, command_of(run, slot), slot, follower))
                except PbflError as error:
                    failed.append(f"{run.name}: {error}")
                    free.append(slot)
                    continue
                say(console, f"{name}: started, see {run.directory / LOG}")
            for one in running[:]:
                code = one.process.poll()
                one.follower.update()
                if code is None:
                    continue
                one.processes.close()
                running.remove(one)
                free.append(one.slot)
                if code == INTERRUPTED:
                    raise KeyboardInterrupt
                outcome = f"failed, see {one.run.directory / LOG}" if code else "finished"
                say(console, f"{names[one.run.directory]}: {outcome}", "red" if code else "")
                failed += [one.run.name] if code else []
                if edited := standing(one.run).edited:  # this process has the code as it was before
                    failed.append(
                        f"{one.run.name}: {', '.join(edited)} was edited meanwhile, so it is in no table until "
                        "the same command is started again"
                    )
                after(one.run)
            time.sleep(POLL_SECONDS)
    finally:
        with signals_ignored():
            _end(running)
    return failed


def _prefixes(planned: Sequence[PlannedRun]) -> dict[Path, str]:
    """Return directory -> prefix of its lines: its path relative to the runs' common parent."""
    if not planned:
        return {}
    common = os.path.commonpath([run.directory.parent for run in planned])
    return {run.directory: str(run.directory.relative_to(common)) for run in planned}


@dataclass(frozen=True, eq=False)
class _Running:
    """A run being executed, in a process with a watchdog of its own, since process ids may be reused later."""

    run: PlannedRun
    slot: Slot
    process: subprocess.Popen[bytes]
    processes: Processes
    follower: Follower


def _start(run: PlannedRun, words: Sequence[str], slot: Slot, follower: Follower) -> _Running:
    cards = {"CUDA_VISIBLE_DEVICES": slot.cards} if slot.cards else {}
    with writing(run.directory):
        make_directory(run.directory)
        log = open(run.directory / LOG, "ab", opener=private_opener)  # noqa: SIM115, closed below
    processes = Processes()
    with log:
        environment = {**os.environ, **cards, "COLUMNS": "160"}
        try:
            process = processes.start(words, Path.cwd(), environment, log)
        except BaseException:
            processes.close()
            raise
        return _Running(run, slot, process, processes, follower)


def _end(running: Sequence[_Running]) -> None:
    """Interrupt all runs, give them time to clean up, and kill what is left."""
    for one in running:
        one.process.terminate()
    end = time.monotonic() + CLEARING_SECONDS
    for one in running:
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, end - time.monotonic()))
    for one in running:
        one.processes.close()


def show_plan(planned: Sequence[PlannedRun], console: Console) -> bool:
    """Print a line per run: its state, and the number of finished and requested rounds.

    Returns:
        Whether all runs can be executed or are finished.
    """
    standings = [standing(run) for run in planned]
    rows = []
    for run, now in zip(planned, standings, strict=True):
        settings = configuration.check(run.requested).run
        # A finished run has fewer than configured if patience ended it.
        wanted = now.rounds if now.state == "finished" else settings.num_server_rounds
        rounds = "-" if now.refusal else f"{now.rounds}/{wanted}"
        rows.append((run.label, settings.method, now.state, str(run.seed), rounds, str(run.directory)))
    print_blocks(console, COLUMNS, rows, words=3)
    if line := edited_line(planned):
        say(console, line, "yellow")
    pending = sum(now.keys is not None for now in standings)
    say(console, f"{pending} of {len(rows)} runs are to be run; nothing was started")
    refusals = [now.refusal for now in standings if now.refusal]
    for line in refusals:
        say(console, line, "red")
    return not refusals
