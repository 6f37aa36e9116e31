"""The status of runs, from the files and locks in their directories, and lists of runs.

Only these are used, so a run may be one of another ``pbfl run``, a sweep or a deployment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console

from pbfl_flwr.errors import PbflError, reading
from pbfl_flwr.experiments.console import clock, print_blocks, say
from pbfl_flwr.experiments.results import resume_command, scores
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.locks import in_use, was_used
from pbfl_flwr.runs.records import RoundRecord, RunRecord
from pbfl_flwr.util.csv_text import csv_text

MAX_ENTRIES = 10_000  # of a directory of runs
DEPTH = 3  # runs/<reproduction>/<block>/<run>
COLUMNS = ("run", "method", "dataset", "seed", "rounds", "primary predictor", "last", "state")
State = Literal["waiting", "running", "stopped", "finished", "failed"]


@dataclass(frozen=True)
class RunStatus:
    """Snapshot of a run directory.

    Attributes:
        path: the directory.
        about: content of run.json; None before it exists.
        rounds: finished rounds.
        result: hash of the results; empty while the run is not finished.
        error: why the run ended early; empty if it did not.
        waiting: text on the clients that the server has been waiting for; it appears after a minute.
        active: whether a process works on the run.
    """

    path: Path
    about: RunRecord | None
    rounds: Sequence[RoundRecord]
    result: str
    error: str
    waiting: str
    active: bool

    @property
    def wanted(self) -> int:
        """T, the number of rounds; 0 if not known yet."""
        return self.about.last_round if self.about else 0

    @property
    def pace(self) -> float | None:
        """Seconds per round, see :func:`pace`; None before the first."""
        return pace([record.seconds.total for record in self.rounds]) if self.rounds else None

    @property
    def state(self) -> State:
        """Status of the run: "stopped" if no process works on it; "waiting" before it begins."""
        if self.about is not None and self.result and len(self.rounds) >= self.wanted:
            return "finished"
        if self.error:
            return "failed"
        if self.about is None and (self.active or not was_used(self.path)):
            return "waiting"
        return "running" if self.active else "stopped"


def pace(seconds: Sequence[float]) -> float:
    """Return the seconds that a round takes now: the median of the last five."""
    return median(seconds[-5:])


def snapshot(path: Path) -> RunStatus:
    """Return a snapshot of a run directory, which need not exist.

    Raises:
        PbflError: if one of its files is damaged.
    """
    active = in_use(path)  # before the files are read: what a run writes before it ends is then among them
    run = RunDirectory(path)
    about = run.record() if run.taken else None
    rounds = run.round_records()
    return RunStatus(path, about, rounds, run.result(), run.error(), run.waiting(), active)


def show_status(status: RunStatus, console: Console) -> None:
    """Print how far a run is, whom it waits for, and how it can be resumed if it was stopped."""
    about, state = status.about, status.state
    if about is None and state == "stopped":
        begun = "the run was stopped or killed before it began; start it again with the same command"
        say(console, f"{status.path} has no run.json, and no process works on it: {begun}", "red")
        return
    if about is None:
        missing = "has no run.json yet" if status.path.exists() else "does not exist yet"
        say(console, f"waiting for a run: {status.path} {missing}", "yellow")
    else:
        say(console, _progress_line(status))
    if status.waiting and state in ("waiting", "running"):
        say(console, status.waiting, "yellow")
    if about is not None and state == "stopped":
        command = resume_command(status.path, about)
        say(console, f"no process works on it: it was stopped or killed; resume with {command}", "red")
    if status.error:
        say(console, f"ended with: {status.error}", "red")


def _progress_line(status: RunStatus) -> str:
    done = len(status.rounds)
    if status.state == "finished":
        rest = "finished"
    elif status.pace is None:
        rest = "before the first round"
    elif status.state in ("stopped", "failed"):
        rest = f"{clock(status.pace)} per round"
    else:
        rest = f"{clock(status.pace)} per round, {clock(status.pace * (status.wanted - done))} left"
    return f"{done} of {status.wanted} rounds, {rest}"


def is_run(path: Path) -> bool:
    """Whether a directory holds a run (run.json), or may not be entered, so that it may hold one."""
    try:
        return bool((path / "run.json").stat())
    except OSError as error:
        return isinstance(error, PermissionError)


def runs_in(directory: Path, depth: int = 1) -> list[Path]:
    """Return the run directories in a directory, by name; those whose name begins with a dot are left out.

    Searched are ``depth`` levels of directories; the directory itself is no run. A lower one with too many entries is
    returned as if it were a run, which then cannot be read.

    Raises:
        PbflError: if the directory has more than MAX_ENTRIES entries.
    """
    try:
        entries = list(islice(directory.iterdir(), MAX_ENTRIES + 1))
    except OSError:
        return []
    if len(entries) > MAX_ENTRIES:
        raise PbflError(
            f"'{directory}' has more than {MAX_ENTRIES} entries; name runs, or directories of them"
        )
    folders = [path for path in entries if path.is_dir() and not path.name.startswith(".")]
    runs = []
    for folder in sorted(folders, key=_in_order):
        if is_run(folder):
            runs.append(folder)
        elif depth > 1:
            try:
                runs += runs_in(folder, depth - 1)
            except PbflError:
                runs.append(folder)
    return runs


def listed(path: Path) -> dict[str, Any]:
    """Return what lists say of a run, also if it cannot be read.

    Path, method, dataset ("own" if clients bring their own data), seed, finished and configured rounds, primary
    predictor, its last sample-weighted accuracy (0 to 1, None if not scored), and a state of :class:`RunStatus` or
    "unreadable".
    """
    line: dict[str, Any] = {
        "path": str(path),
        "method": "",
        "dataset": "",
        "seed": None,
        "done": 0,
        "wanted": 0,
    }
    line |= {"primary_predictor": "", "last": None, "state": "unreadable"}
    with suppress(PbflError), reading(str(path)):
        status = snapshot(path)
        if not is_run(path):
            return line
        if about := status.about:
            config, predictor = about.configuration, about.primary_predictor
            score = scores(status.rounds).get(predictor)
            line |= {
                "method": config["method"],
                "dataset": "own" if about.own_data else config["dataset"],
                "seed": config["seed"],
                "done": len(status.rounds),
                "wanted": status.wanted,
                "primary_predictor": predictor,
                "last": None if score is None else score.last[1].weighted,
                "state": status.state,
            }
    return line


def below(directory: Path) -> list[dict[str, Any]]:
    """Return all runs in a directory, up to ``DEPTH`` levels deep.

    Raises:
        PbflError: if the directory does not exist, cannot be read, or holds no run.
    """
    with reading(str(directory)):
        next(directory.iterdir(), None)
    if not (runs := [directory] if is_run(directory) else runs_in(directory, DEPTH)):
        raise PbflError(f"'{directory}' holds no run: no run.json in it or up to {DEPTH} levels below it")
    return [listed(path) for path in runs]


def show_list(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print one line per run."""
    rows = []
    for run in runs:
        last = None if run["last"] is None else f"{100 * run['last']:.2f}"
        rounds = f"{run['done']}/{run['wanted']}"
        names = [run[name] for name in ("path", "method", "dataset", "seed")]
        cells = [*names, rounds, run["primary_predictor"], last, run["state"]]
        rows.append(["-" if cell in ("", None) else str(cell) for cell in cells])
    print_blocks(console, COLUMNS, rows, words=3)


def as_json(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the runs as a JSON list of objects; accuracies are from 0 to 1."""
    return json.dumps(runs, indent=1) + "\n"


def as_csv(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV with one line per run and the fields of :func:`as_json`."""
    return csv_text([[*runs[0]], *([*run.values()] for run in runs)])


def for_a_report(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Return (runs, lines on what was left out) for the paths given by a user.

    A run directory selects that run, a directory of runs the finished ones in it. Files, and directories without a
    run, are left out if there are other paths.

    Raises:
        PbflError: if no run remains.
    """
    runs: list[Path] = []
    left_out: dict[str, list[str]] = {}
    places = list(paths)
    for path in places:
        if not is_run(path) and (inside := runs_in(path)):
            for run in inside:
                if (state := listed(run)["state"]) == "finished":
                    runs.append(run)
                else:
                    left_out.setdefault(state, []).append(str(run))
        elif not is_run(path) and len(places) > 1 and path.exists():
            left_out.setdefault("not a run", []).append(str(path))
        else:
            runs.append(path)  # reading it raises an error that names the problem
    lines = [f"left out, {why}: {', '.join(which)}" for why, which in left_out.items()]
    if not runs:
        raise PbflError(f"no finished run to report; {'; '.join(lines)}")
    return runs, lines


def _in_order(path: Path) -> list[tuple[float, str]]:
    """Return a sort key by which seed10 comes after seed2, and 0.1 after 0.05 and 1e-05."""
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-[0-9]+)?)", path.name)  # text and numbers take turns
    return [(float(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]
