"""Lists of runs: finding run directories, the status of each run, and selecting runs for a report."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from pbfl_flwr.errors import PbflError, Unreadable, reading
from pbfl_flwr.experiments.console import print_blocks
from pbfl_flwr.experiments.results import scores
from pbfl_flwr.experiments.running import watch
from pbfl_flwr.experiments.tables import Sheet

DEPTH = 3  # runs/<reproduction>/<block>/<run>
COLUMNS = ("run", "method", "dataset", "seed", "rounds", "primary predictor", "last", "state")
STATES = {
    "silent": "unfinished",
    "waiting": "unfinished",
}  # states of pbfl watch that a list shows under another name


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
            return _listed(watch.snapshot(path, time.time()))
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


def show(runs: Sequence[Listed], console: Console) -> None:
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
            raise PbflError(f"'{path}' holds no run itself; allowed are: {', '.join(deeper)}")
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


def _listed(view: watch.View) -> Listed:
    if view.about is None:
        return Listed(view.path)
    config, primary_predictor = view.about.configuration, view.about.primary_predictor
    own_data = not any(client.configured_data for client in view.about.clients)
    score = scores(view.rounds).get(primary_predictor)
    return Listed(
        view.path,
        str(config["method"]),
        "own" if own_data else str(config["dataset"]),
        int(config["seed"]),
        len(view.rounds),
        view.wanted,
        primary_predictor,
        None if score is None else score.last[1].weighted,
        STATES.get(view.state, view.state),
    )


def _in_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which seed10 comes after seed2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
