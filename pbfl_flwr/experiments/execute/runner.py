"""Starts a run on the simulation engine or on SuperNodes, prints its progress, and returns its exit code."""

from __future__ import annotations

import math
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import FrameType

from rich.console import Console

from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError, format_exception, pass_on_exit, tells_full_disk, writing
from pbfl_flwr.experiments.console import say
from pbfl_flwr.experiments.execute.progress import Follower
from pbfl_flwr.experiments.plan.configuration import RequestedKeys, check
from pbfl_flwr.experiments.results import resume_words
from pbfl_flwr.flower.deploy.processes import ENDS, HANGUPS, forget_lost_terminal
from pbfl_flwr.flower.deploy.superlink import ENDED, ManagedSuperLink
from pbfl_flwr.flower.engines.flower_simulation import FlowerSimulation
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.runs.directory import ERROR, RunDirectory, RunRefused
from pbfl_flwr.util.atomic_files import make_directory

COMPLETED, FAILED, INTERRUPTED = 0, 1, 130
POLL_SECONDS = 0.3
SAME_SIGNAL = 1.0  # seconds
RAISED = "ServerApp failed with exception: "  # Flower's words before an exception's text
TRACEBACK = 1000  # last lines of Flower's log in which its last line is, also if it names many clients


def simulate(
    app: Path,
    run_dir: Path,
    requested: RequestedKeys,
    resources: Resources,
    console: Console,
    loaded: LoadedData | None = None,
) -> int:
    """Run the federation with these keys and print a line per round; only the engine "flower" uses ``app``.

    ``loaded`` is data that this process has read before.

    Returns:
        0 if the run completed with all rounds, 1 if not, 130 if it was interrupted.

    Raises:
        PbflError: if Flower cannot be started or refuses the run.
    """
    # Recorded as a number, so that a resumed run has as many threads even with other resources.
    run, keys = check(requested).run, {**requested.values, "run-dir": str(run_dir)}
    if keys.get("threads", "auto") == "auto":
        keys["threads"] = resources.cpus_per_client
    resume_with = " ".join(["pbfl run", resume_words(run_dir, keys), *resources.options])
    if resources.engine != "flower":
        from pbfl_flwr.flower.engines.local import run_here

        def federation() -> None:
            run_here(run_dir, keys, run.num_clients, resources, loaded)

        return run_in_this_thread(run_dir, federation, run.num_server_rounds, console, resume_with)
    engine = FlowerSimulation(run_dir)

    def submit() -> str:
        run_id = engine.submit(app, keys, run.num_clients, resources)
        say(console, "starting the workers")
        return run_id

    return follow_run(engine, submit, run.num_server_rounds, console, resume_with)


def run_in_this_thread(
    run_dir: Path, federation: Callable[[], None], num_rounds: int, console: Console, resume_with: str
) -> int:
    """Run a federation in this thread while another thread prints its rounds, and print how it ended.

    ``federation`` runs it, and raises KeyboardInterrupt or PbflError if it ends early; another exception, e.g. of a
    method of one's own, ends this run alone.

    Returns:
        See :func:`simulate`.

    Raises:
        RunRefused: if the directory belongs to another run.
    """
    try:
        with _printing(_following(run_dir, num_rounds, console)):
            _reported(federation)
    except RunRefused:  # the directory belongs to another run, which this one must not offer to resume
        raise
    except KeyboardInterrupt:
        return _interrupted(run_dir, console, resume_with)
    except PbflError as error:
        return _failed(run_dir, str(error), console, resume_with)
    return COMPLETED


def _reported(federation: Callable[[], None]) -> None:
    try:
        federation()
    except PbflError:
        raise
    except (Exception, SystemExit) as error:  # the server's half of a method may call sys.exit()
        pass_on_exit(error)
        if not isinstance(error, OSError):  # which names its file
            traceback.print_exc(file=sys.stderr)
        raise PbflError(format_exception(error)) from error


@contextmanager
def _printing(follower: Follower) -> Iterator[None]:
    """Print a run's rounds in a thread, all of them before the block is left."""
    over = Event()

    def follow() -> None:
        while not over.wait(POLL_SECONDS):
            follower.update()

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        follower.update()


def _following(run_dir: Path, num_rounds: int, console: Console) -> Follower:
    """Create and print the run directory, and return a follower that prints the run's rounds."""
    with writing(run_dir):
        make_directory(run_dir)
    say(console, f"run {run_dir}")
    return Follower(run_dir, num_rounds, console)


def _interrupted(run_dir: Path, console: Console, resume_with: str) -> int:
    begun = RunDirectory(run_dir).taken
    say(console, f"interrupted; resume with: {resume_with}" if begun else "interrupted before the run began")
    return INTERRUPTED


def _failed(run_dir: Path, reason: str, console: Console, resume_with: str) -> int:
    say(console, f"the run failed: {reason}", "red")
    if present := RunDirectory(run_dir).finished_rounds():
        say(console, f"{present} rounds are saved; resume with: {resume_with}")
    return FAILED


def follow_run(
    link: ManagedSuperLink, submit: Callable[[], str], num_rounds: int, console: Console, resume_with: str
) -> int:
    """Start a link to Flower, follow its run to the end and print how it ended; ``submit`` returns its id.

    Returns:
        See :func:`simulate`.

    Raises:
        PbflError: if Flower cannot be started or refuses the run.
    """
    run_dir = link.run_dir
    # The ServerApp writes this file, and leaves it unchanged if the run is refused.
    before = _written(run_dir / ERROR)
    follower = _following(run_dir, num_rounds, console)
    try:
        with link:
            run_id = submit()
            try:
                status, details = _wait(link, run_id, follower)
            except KeyboardInterrupt:
                say(console, "stopping")
                link.stop(run_id)
                raise
            except PbflError as error:  # Flower itself has ended, and the run with it
                follower.update()
                return _failed(run_dir, str(error), console, resume_with)
            follower.update()
            run = RunDirectory(run_dir)
            present = {record.round for record in run.round_records()}
            num_rounds = run.record().last_round if run.taken else num_rounds
            missing = num_rounds - len(present & set(range(1, num_rounds + 1)))
            if status == "finished:completed" and not missing:
                return COMPLETED
            reason = _reason(run_dir, before, link, status, details)
    except KeyboardInterrupt:  # also while Flower starts, the run is submitted, or it stops
        follower.update()
        return _interrupted(run_dir, console, resume_with)
    if status == "finished:completed":
        reason = f"{missing} of {num_rounds} rounds are missing though Flower reports {status}\n{reason}"
    return _failed(run_dir, reason, console, resume_with)


def _wait(link: ManagedSuperLink, run_id: str, follower: Follower) -> tuple[str, str]:
    while True:
        while not link.ended():
            follower.update()
            time.sleep(POLL_SECONDS)
        status, details = link.outcome(run_id)
        if status in ENDED:
            return status, details


def _written(file: Path) -> int | None:
    """Return a file's modification time in ns, None if it does not exist."""
    return file.stat().st_mtime_ns if file.exists() else None


def _reason(run_dir: Path, before: int | None, link: ManagedSuperLink, status: str, details: str) -> str:
    if _written(run_dir / ERROR) not in (None, before):
        return RunDirectory(run_dir).error()
    said = details.removeprefix(RAISED)
    # Refusals, and errors on a full disk, are in no error.txt. What is ours says all; a full disk cuts the log, too.
    raised = re.findall(r"^pbfl_flwr\.[\w.]+: (.+)", link.tail(TRACEBACK), re.MULTILINE)
    if said != details and (any(map(said.startswith, raised)) or tells_full_disk(said)):
        return said
    about = f"{status}, {details}" if details not in ("", "N/A") else status
    return f"{about}; the last lines of {link.log}:\n{link.tail()}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGTERM, and SIGHUP when the terminal is closed, like Ctrl-C, so that everything is cleaned up.

    Commands that run something are inside it as a whole, see :func:`pbfl_flwr.cli.common.running`.
    What is ignored, as SIGHUP is under nohup, stays ignored. Signals within a second after one do not interrupt the
    cleaning up: ``timeout`` sends SIGTERM twice, to the process and to its group.
    """
    latest = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal latest
        if number in HANGUPS:
            forget_lost_terminal()
        last, latest = latest, time.monotonic()
        if latest - last > SAME_SIGNAL:
            raise KeyboardInterrupt

    ends = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
