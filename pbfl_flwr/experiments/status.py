"""The status of runs, from the files in their directories, and lists of runs.

Only files are read, so a run may be one of another ``pbfl run``, a sweep or a deployment.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console

from pbfl_flwr.errors import PbflError, Unreadable, reading
from pbfl_flwr.experiments.console import clock, print_blocks
from pbfl_flwr.experiments.results import new_client_rounds, resume_command, scores
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.runs.directory import ERROR, NEW_CLIENTS, WAITING, RunDirectory
from pbfl_flwr.runs.locks import abandoned
from pbfl_flwr.runs.records import NewClientsRecord, RoundRecord, RunRecord

QUIET_SECONDS = 120.0  # a run is "silent" only after this many seconds without output
QUIET_ROUNDS = 5  # and after this many rounds' time
WRITTEN = ("run.json", "rounds.jsonl", NEW_CLIENTS, WAITING)
DEPTH = 3  # runs/<reproduction>/<block>/<run>
COLUMNS = ("run", "method", "dataset", "seed", "rounds", "primary predictor", "last", "state")
STATES = {
    "silent": "unfinished",
    "waiting": "unfinished",
}  # states of pbfl watch that a list shows under another name
State = Literal["waiting", "running", "silent", "stopped", "finished", "failed"]


@dataclass(frozen=True)
class RunStatus:
    """Snapshot of a run directory.

    Attributes:
        path: the directory.
        about: content of run.json; None before it exists.
        rounds: finished rounds.
        error: why the run ended early; empty if it did not.
        time: when it was taken, in seconds since the epoch.
        quiet: seconds since the last write.
        new_clients: rounds of the new clients, which come after the last of these rounds.
        waiting: text on the clients that the server has been waiting for; it appears after a minute.
        abandoned: whether it is certain that no process works on the run any more.
    """

    path: Path
    about: RunRecord | None
    rounds: Sequence[RoundRecord]
    error: str
    time: float
    quiet: float
    new_clients: Sequence[NewClientsRecord] = ()
    waiting: str = ""
    abandoned: bool = False

    @property
    def wanted(self) -> int:
        """T, the number of rounds; 0 if not known yet."""
        return self.about.last_round if self.about else 0

    @property
    def wanted_new_client_rounds(self) -> int:
        """Number of rounds that the new clients train after the last one; 0 without new clients."""
        return new_client_rounds(self.about) if self.about else 0

    @property
    def pace(self) -> float | None:
        """Seconds per round, median of the last five; None before the first."""
        return median(record.seconds.total for record in self.rounds[-5:]) if self.rounds else None

    @property
    def state(self) -> State:
        """Status of the run; "stopped" if it is certain that no process works on it.

        "silent" if that is not certain, but nothing was written for ``QUIET_SECONDS`` and ``QUIET_ROUNDS`` rounds.
        """
        done = len(self.rounds) >= self.wanted and len(self.new_clients) >= self.wanted_new_client_rounds
        if self.about is not None and done:
            return "finished"
        if self.error:
            return "failed"
        if self.abandoned:
            return "stopped"
        if self.about is None:
            return "waiting"
        return "silent" if self.quiet > max(QUIET_SECONDS, QUIET_ROUNDS * (self.pace or 0.0)) else "running"


def snapshot(path: Path, now: float) -> RunStatus:
    """Return a snapshot of a run directory, which need not exist.

    Args:
        path: the run directory.
        now: current time in seconds since the epoch.

    Raises:
        PbflError: if one of its files is damaged.
    """
    status = _read(path, now)
    if status.state in ("finished", "failed") or not abandoned(path):
        return status
    # Read again: the run may have written more before it ended.
    return replace(_read(path, now), abandoned=True)


def _read(path: Path, now: float) -> RunStatus:
    run = RunDirectory(path)
    about = run.record() if run.taken else None
    error = (path / ERROR).read_text(encoding="utf-8").strip() if (path / ERROR).exists() else ""
    files = [file for name in WRITTEN if (file := path / name).exists()]
    written = max((file.stat().st_mtime for file in files), default=now)
    rounds = run.round_records()
    quiet = max(0.0, now - written)
    return RunStatus(
        path, about, rounds, error, now, quiet, run.new_client_records(len(rounds)), run.waiting()
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
        if wanted := status.wanted_new_client_rounds:
            yield f"new clients: {len(status.new_clients)} of {wanted} own rounds", ""
    if status.waiting and status.state in ("waiting", "running", "silent"):
        yield status.waiting, "yellow"
    if status.about is not None and status.state in ("silent", "stopped"):
        each = f", a round takes {clock(status.pace)}" if status.pace else ""
        silent = f"no output for {clock(status.quiet)}{each}: it may have been stopped or killed; if so, resume with "
        stopped = "no process works on it: it was stopped or killed; resume with "
        hint = silent if status.state == "silent" else stopped
        yield f"{hint}{resume_command(status.path, status.about)}", "red"
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
        seed: of the run; None if the run is damaged.
        done, wanted: number of finished and of configured rounds.
        primary_predictor: the predictor that the method reports.
        last: last sample-weighted primary predictor's accuracy, 0 to 1; None if it was not scored.
        state: running, unfinished, stopped, finished, failed, damaged or unreadable.
    """

    path: Path
    method: str = ""
    dataset: str = ""
    seed: int | None = None
    done: int = 0
    wanted: int = 0
    primary_predictor: str = ""
    last: float | None = None
    state: str = "damaged"

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
    """Whether a directory holds a run (run.json); False if it cannot be read."""
    try:
        return (path / "run.json").exists()
    except OSError:
        return False


def runs_in(directory: Path, depth: int = 1) -> list[Path]:
    """Return the run directories in a directory, by name, and those without access permission, which may be runs.

    Args:
        directory: not itself a run.
        depth: number of directory levels to search.
    """
    try:
        folders = sorted((path for path in directory.iterdir() if path.is_dir()), key=_in_order)
    except OSError:
        return []
    runs = []
    for folder in folders:
        hidden = folder.name.startswith(".")
        if is_run(folder) or not (hidden or os.access(folder, os.X_OK)):
            runs.append(folder)
        elif depth > 1 and not hidden:
            runs += runs_in(folder, depth - 1)
    return runs


def listed(path: Path) -> Listed:
    """Return the status of a run, also if it is damaged or unreadable."""
    try:
        with reading(str(path)):
            return _listed(snapshot(path, time.time()))
    except Unreadable:
        return Listed(path, state="unreadable")
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
        PbflError: if no run remains, or a directory holds runs only at a deeper level.
    """
    runs: list[Path] = []
    others: list[Path] = []
    unfinished: list[Path] = []
    unreadable: list[Path] = []
    places = list(paths)
    for path in places:
        if is_run(path):
            runs.append(path)
        elif inside := runs_in(path):
            for run in inside:
                kinds = {"finished": runs, "unreadable": unreadable}
                kinds.get(listed(run).state, unfinished).append(run)
        elif deeper := list(dict.fromkeys(str(run.parent) for run in runs_in(path, DEPTH))):
            raise PbflError(f"'{path}' holds no run itself; give one of: {', '.join(deeper)}")
        elif len(places) > 1 and path.exists():
            others.append(path)
        else:
            runs.append(path)  # reading it raises an error that names the problem
    lines = [
        f"left out, {why}: {', '.join(map(str, which))}"
        for why, which in (
            ("not finished", unfinished),
            ("cannot be read", unreadable),
            ("not a run", others),
        )
        if which
    ]
    if not runs:
        raise PbflError(f"no finished run to report; {'; '.join(lines)}")
    return runs, lines


def _listed(status: RunStatus) -> Listed:
    if status.about is None:
        return Listed(status.path)
    config, primary_predictor = status.about.configuration, status.about.primary_predictor
    own_data = not any(client.configured_data for client in status.about.clients)
    score = scores(status.rounds).get(primary_predictor)
    return Listed(
        status.path,
        str(config["method"]),
        "own" if own_data else str(config["dataset"]),
        int(config["seed"]),
        len(status.rounds),
        status.wanted,
        primary_predictor,
        None if score is None else score.last[1].weighted,
        STATES.get(status.state, status.state),
    )


def _in_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which seed10 comes after seed2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
