"""The status of runs, from the files and locks in their directories, and lists of runs.

Only these are used, so a run may be one of another ``pbfl run``, a sweep or a deployment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console

from pbfl_flwr.errors import PbflError, reading
from pbfl_flwr.experiments.console import clock, print_blocks
from pbfl_flwr.experiments.results import resume_command, scores
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.locks import in_use, was_used
from pbfl_flwr.runs.records import NewClientsRecord, RoundRecord, RunRecord

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
        error: why the run ended early; empty if it did not.
        new_clients: rounds of the new clients, which come after the last of these rounds.
        waiting: text on the clients that the server has been waiting for; it appears after a minute.
        active: whether a process works on the run.
    """

    path: Path
    about: RunRecord | None
    rounds: Sequence[RoundRecord]
    error: str
    new_clients: Sequence[NewClientsRecord]
    waiting: str
    active: bool

    @property
    def wanted(self) -> int:
        """T, the number of rounds; 0 if not known yet."""
        return self.about.last_round if self.about else 0

    @property
    def pace(self) -> float | None:
        """Seconds per round, median of the last five; None before the first."""
        return median(record.seconds.total for record in self.rounds[-5:]) if self.rounds else None

    @property
    def state(self) -> State:
        """Status of the run: "stopped" if no process works on it; "waiting" before it begins."""
        if (
            self.about is not None
            and len(self.rounds) >= self.wanted
            and len(self.new_clients) >= self.about.new_client_rounds
        ):
            return "finished"
        if self.error:
            return "failed"
        if self.about is None and (self.active or not was_used(self.path)):
            return "waiting"
        return "running" if self.active else "stopped"


def snapshot(path: Path) -> RunStatus:
    """Return a snapshot of a run directory, which need not exist.

    Raises:
        PbflError: if one of its files is damaged.
    """
    active = in_use(path)  # before the files are read: what a run writes before it ends is then among them
    run = RunDirectory(path)
    about = run.record() if run.taken else None
    rounds = run.round_records()
    return RunStatus(
        path, about, rounds, run.error(), run.new_client_records(len(rounds)), run.waiting(), active
    )


def status_lines(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield (line, style) on how far a run is, whom it waits for, and how it can be resumed if it was stopped."""
    if status.about is None and status.state == "stopped":
        yield (
            (
                f"{status.path} has no run.json, and no process works on it: the run was stopped or killed before it "
                "began; start it again with the same command"
            ),
            "red",
        )
        return
    if status.about is None:
        missing = "has no run.json yet" if status.path.exists() else "does not exist yet"
        yield f"waiting for a run: {status.path} {missing}", "yellow"
    else:
        yield _progress_line(status), ""
        if wanted := status.about.new_client_rounds:
            yield f"new clients: {len(status.new_clients)} of {wanted} own rounds", ""
    if status.waiting and status.state in ("waiting", "running"):
        yield status.waiting, "yellow"
    if status.about is not None and status.state == "stopped":
        command = resume_command(status.path, status.about)
        yield f"no process works on it: it was stopped or killed; resume with {command}", "red"
    if status.error:
        yield f"ended with: {status.error}", "red"


def _progress_line(status: RunStatus) -> str:
    done = len(status.rounds)
    if status.state == "finished":
        rest = "finished"
    elif status.pace is None:
        rest = "before the first round"
    elif status.state == "stopped":
        rest = f"{clock(status.pace)} per round"
    else:
        rest = f"{clock(status.pace)} per round, {clock(status.pace * (status.wanted - done))} left"
    return f"{done} of {status.wanted} rounds, {rest}"


@dataclass(frozen=True)
class Listed:
    """A run in a list.

    Attributes:
        path: the run directory.
        method, dataset: from its configuration; the dataset is "own" if clients bring their own data.
        seed: of the run; None if it cannot be read.
        done, wanted: number of finished and of configured rounds.
        primary_predictor: the predictor that the method reports.
        last: last sample-weighted primary predictor's accuracy, 0 to 1; None if it was not scored.
        state: a state of :class:`RunStatus`, or unreadable.
    """

    path: Path
    method: str = ""
    dataset: str = ""
    seed: int | None = None
    done: int = 0
    wanted: int = 0
    primary_predictor: str = ""
    last: float | None = None
    state: str = "unreadable"

    def row(self) -> tuple[str, ...]:
        """Return the formatted cells in the order of :data:`COLUMNS`."""
        seed = "-" if self.seed is None else str(self.seed)
        last = "-" if self.last is None else f"{100 * self.last:.2f}"
        rounds = f"{self.done}/{self.wanted}"
        cells = (
            str(self.path),
            self.method,
            self.dataset,
            seed,
            rounds,
            self.primary_predictor,
            last,
            self.state,
        )
        return tuple(cell or "-" for cell in cells)

    def plain(self) -> dict[str, object]:
        """Return the values for JSON and CSV."""
        return {**asdict(self), "path": str(self.path)}


def is_run(path: Path) -> bool:
    """Whether a directory holds a run (run.json), or may not be entered, so that it may hold one."""
    try:
        return bool((path / "run.json").stat())
    except OSError as error:
        return isinstance(error, PermissionError)


def runs_in(directory: Path, depth: int = 1) -> list[Path]:
    """Return the run directories in a directory, by name; those whose name begins with a dot are left out.

    Args:
        directory: not itself a run.
        depth: number of directory levels to search.
    """
    try:
        folders = [path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []
    runs = []
    for folder in sorted(folders, key=_in_order):
        if is_run(folder):
            runs.append(folder)
        elif depth > 1:
            runs += runs_in(folder, depth - 1)
    return runs


def listed(path: Path) -> Listed:
    """Return the status of a run, also if it cannot be read."""
    try:
        with reading(str(path)):
            return _listed(snapshot(path))
    except PbflError:
        return Listed(path)


def below(directory: Path) -> list[Listed]:
    """Return all runs in a directory, up to ``DEPTH`` levels deep.

    Raises:
        PbflError: if the directory does not exist, cannot be read, or holds no run.
    """
    try:
        next(directory.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        raise PbflError(f"'{directory}' is not a directory that holds runs") from None
    except OSError as error:
        raise PbflError(f"'{directory}' cannot be read ({error.strerror})") from None
    if not (runs := [directory] if is_run(directory) else runs_in(directory, DEPTH)):
        raise PbflError(f"'{directory}' holds no run: no run.json in it or up to {DEPTH} levels below it")
    return [listed(path) for path in runs]


def show_list(runs: Sequence[Listed], console: Console) -> None:
    """Print one line per run."""
    print_blocks(console, COLUMNS, [run.row() for run in runs], words=3)


def as_json(runs: Sequence[Listed]) -> str:
    """Return the runs as a JSON list of objects; accuracies are from 0 to 1."""
    return json.dumps([run.plain() for run in runs], indent=1) + "\n"


def as_csv(runs: Sequence[Listed]) -> str:
    """Return CSV with one line per run and the fields of :func:`as_json`."""
    lines = [run.plain() for run in runs]
    rows = tuple(tuple("" if cell is None else str(cell) for cell in line.values()) for line in lines)
    return Sheet("", tuple(lines[0]), rows).csv()


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
                if (state := listed(run).state) == "finished":
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


def _listed(status: RunStatus) -> Listed:
    if status.about is None:
        return Listed(status.path)
    config, primary_predictor = status.about.configuration, status.about.primary_predictor
    score = scores(status.rounds).get(primary_predictor)
    return Listed(
        status.path,
        str(config["method"]),
        "own" if status.about.own_data else str(config["dataset"]),
        int(config["seed"]),
        len(status.rounds),
        status.wanted,
        primary_predictor,
        None if score is None else score.last[1].weighted,
        status.state,
    )


def _in_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which seed10 comes after seed2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
