"""Many runs: what run directories there are, how each of them stands, and which of them a report takes."""

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
from pbfl_flwr.experiments.results.accuracies import scores
from pbfl_flwr.experiments.running import watch
from pbfl_flwr.experiments.text.narrow import print_blocks
from pbfl_flwr.experiments.text.table_formats import Sheet

DEPTH = 3  # runs/<reproduction>/<block>/<run>
COLUMNS = ("run", "method", "dataset", "seed", "rounds", "headline", "last", "state")
STATES = {
    "silent": "unfinished",
    "waiting": "unfinished",
}  # a list says it in other words than somebody who watches


@dataclass(frozen=True)
class Listed:
    """A run in a list.

    Attributes:
        path: its directory.
        method, dataset: of its configuration; the dataset is "own" where clients bring theirs.
        seed: of the run; None where it is damaged.
        done, wanted: rounds.
        headline: the predictor that it reports.
        last: headline accuracy, sample-weighted, a share; None where it was not scored.
        state: running, unfinished, stopped, finished, failed, damaged or unreadable.
    """

    path: Path
    method: str = ""
    dataset: str = ""
    seed: int | None = None
    done: int = 0
    wanted: int = 0
    headline: str = ""
    last: float | None = None
    state: str = "damaged"

    def row(self) -> tuple[str, ...]:
        """Return it as people read it, in the order of :data:`COLUMNS`."""
        seed = "-" if self.seed is None else str(self.seed)
        last = "-" if self.last is None else f"{100 * self.last:.2f}"
        rounds = f"{self.done}/{self.wanted}"
        cells = (str(self.path), self.method, self.dataset, seed, rounds, self.headline, last, self.state)
        return tuple(cell or "-" for cell in cells)

    def plain(self) -> dict[str, object]:
        """Return it as other programs read it."""
        return {**asdict(self), "path": str(self.path)}


def is_run(path: Path) -> bool:
    """Whether a run has begun in a directory; not in one that may not be read."""
    try:
        return (path / "run.json").exists()
    except OSError:
        return False


def runs_in(directory: Path, depth: int = 1) -> list[Path]:
    """Return the run directories in a directory, by name, and those that may not be entered and could be some.

    Args:
        directory: no run itself.
        depth: how many directories deep.
    """
    try:
        folders = sorted((path for path in directory.iterdir() if path.is_dir()), key=_in_order)
    except OSError:
        return []
    found = []
    for folder in folders:
        hidden = folder.name.startswith(".")
        if is_run(folder) or not (hidden or os.access(folder, os.X_OK)):
            found.append(folder)
        elif depth > 1 and not hidden:
            found += runs_in(folder, depth - 1)
    return found


def listed(path: Path) -> Listed:
    """Return how a run stands, also of one that is damaged or may not be read."""
    try:
        with reading(str(path)):
            return _listed(watch.look(path, time.time()))
    except Unreadable:
        return Listed(path, state="unreadable")
    except PbflError:
        return Listed(path)


def below(directory: Path) -> list[Listed]:
    """Return all runs in a directory and below it.

    Raises:
        PbflError: if there is no such directory, it may not be read, or it holds no run.
    """
    try:
        next(directory.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        raise PbflError(f"'{directory}' is no directory; allowed is one that holds runs") from None
    except OSError as error:
        raise PbflError(f"'{directory}' cannot be read ({error.strerror})") from None
    if not (found := [directory] if is_run(directory) else runs_in(directory, DEPTH)):
        raise PbflError(
            f"'{directory}' holds no run: no run.json in it or up to {DEPTH} directories below it"
        )
    return [listed(path) for path in found]


def show(found: Sequence[Listed], console: Console) -> None:
    """Print a line a run."""
    print_blocks(console, COLUMNS, [run.row() for run in found], words=3)


def as_json(found: Sequence[Listed]) -> str:
    """Return the runs as a list of objects; accuracies are shares from 0 to 1."""
    return json.dumps([run.plain() for run in found], indent=1) + "\n"


def as_csv(found: Sequence[Listed]) -> str:
    """Return a line a run, with what :func:`as_json` says of it."""
    lines = [run.plain() for run in found]
    rows = tuple(tuple("" if cell is None else str(cell) for cell in line.values()) for line in lines)
    return Sheet("", tuple(lines[0]), rows).csv()


def for_a_report(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Return (runs, lines on what was left out) of what somebody named.

    A run stands for itself, a directory of runs for the finished ones in it; files, and directories without a run,
    are left out where others remain.

    Raises:
        PbflError: if no run remains, or runs lie deeper.
    """
    runs: list[Path] = []
    others: list[Path] = []
    unfinished: list[Path] = []
    unreadable: list[Path] = []
    given = list(paths)
    for path in given:
        if is_run(path):
            runs.append(path)
        elif inside := runs_in(path):
            for run in inside:
                kinds = {"finished": runs, "unreadable": unreadable}
                kinds.get(listed(run).state, unfinished).append(run)
        elif deeper := list(dict.fromkeys(str(run.parent) for run in runs_in(path, DEPTH))):
            raise PbflError(f"'{path}' holds no run itself; name one of these: {', '.join(deeper)}")
        elif len(given) > 1 and path.exists():
            others.append(path)
        else:
            runs.append(path)  # who reads it says what is wrong
    lines = [
        f"left out, {why}: {', '.join(map(str, which))}"
        for why, which in (("not finished", unfinished), ("cannot be read", unreadable), ("no run", others))
        if which
    ]
    if not runs:
        raise PbflError(f"no finished run to report; {'; '.join(lines)}")
    return runs, lines


def _listed(view: watch.View) -> Listed:
    if view.about is None:
        return Listed(view.path)
    config, headline = view.about["configuration"], str(view.about["headline"])
    own = not any(member["configured_data"] for member in view.about["clients"])
    score = scores(view.rounds).get(headline)
    return Listed(
        view.path,
        str(config["method"]),
        "own" if own else str(config["dataset"]),
        int(config["seed"]),
        len(view.rounds),
        view.wanted,
        headline,
        None if score is None else float(score.last[1]["weighted"]),
        STATES.get(view.state, view.state),
    )


def _in_order(path: Path) -> list[tuple[int, str]]:
    """Return a key by which seed10 comes after seed2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
