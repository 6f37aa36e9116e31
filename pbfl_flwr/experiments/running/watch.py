"""A run as it happens: what its directory says, as one frame for the terminal.

Only files are read, so it does not matter who writes them: another terminal's ``pbfl run``, a sweep, a deployment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pbfl_flwr.experiments.results.accuracies import Scores, few_clients, few_lines, scores
from pbfl_flwr.experiments.running.runner import go_on_with
from pbfl_flwr.experiments.text.numbers import clock, kilobytes
from pbfl_flwr.experiments.text.tables import failure_lines, rounds_of_newcomers, settings_line
from pbfl_flwr.flower.storage.history import ERROR, NEWCOMERS, WAITING, RunDirectory, last_round
from pbfl_flwr.flower.storage.run_locks import abandoned

QUIET_SECONDS = 120.0  # silence below this is never remarkable
QUIET_ROUNDS = 5  # nor is silence below this many rounds' time
WRITTEN = ("run.json", "rounds.jsonl", NEWCOMERS, WAITING)
LAST = 5  # failures and notes that are shown
STOPPED_SECONDS = 60.0  # a run that is being resumed needs some to take its directory again
State = Literal["waiting", "running", "silent", "stopped", "finished", "failed"]


@dataclass(frozen=True)
class View:
    """What a run directory says at a moment.

    Attributes:
        path: the directory.
        about: what run.json holds; None before there is one.
        rounds: what rounds.jsonl holds.
        error: why the run ended early; empty if it did not.
        quiet: seconds since anything was written.
        newcomers: what newcomers.jsonl holds of the clients that come after the last of these rounds.
        waiting: whom the server waits for, after a minute.
        abandoned: whether nobody works in the directory any more, as far as that is certain.
    """

    path: Path
    about: Mapping[str, Any] | None
    rounds: Sequence[Mapping[str, Any]]
    error: str
    quiet: float
    newcomers: Sequence[Mapping[str, Any]] = ()
    waiting: str = ""
    abandoned: bool = False

    @property
    def wanted(self) -> int:
        """T; 0 where it is not known yet."""
        return last_round(self.about) if self.about else 0

    @property
    def wanted_of_newcomers(self) -> int:
        """Rounds that the new clients train after the last one; 0 where there are none."""
        return rounds_of_newcomers(self.about) if self.about else 0

    @property
    def pace(self) -> float | None:
        """Seconds a round, median of the last five; None before the first."""
        return median(entry["seconds"]["total"] for entry in self.rounds[-5:]) if self.rounds else None

    @property
    def state(self) -> State:
        """Where the run stands; "stopped" is one that nobody goes on with, "silent" one from which nothing has come.

        The latter where it is not certain whether anybody goes on with it, and for remarkably long only.
        """
        done = len(self.rounds) >= self.wanted and len(self.newcomers) >= self.wanted_of_newcomers
        if self.about is not None and done:
            return "finished"
        if self.error:
            return "failed"
        if self.abandoned:
            return "stopped"
        if self.about is None:
            return "waiting"
        return "silent" if self.quiet > max(QUIET_SECONDS, QUIET_ROUNDS * (self.pace or 0.0)) else "running"


def look(path: Path, now: float) -> View:
    """Return what a run directory says; it need not exist.

    Args:
        path: of the run.
        now: seconds since the epoch.

    Raises:
        PbflError: if one of its files is damaged.
    """
    view = _read(path, now)
    if view.state in ("finished", "failed") or not abandoned(path):
        return view
    return replace(_read(path, now), abandoned=True)  # again: what is read after the last one has gone is all


def _read(path: Path, now: float) -> View:
    run = RunDirectory(path)
    about = run.read() if (path / "run.json").exists() else None
    error = (path / ERROR).read_text(encoding="utf-8").strip() if (path / ERROR).exists() else ""
    files = [file for name in WRITTEN if (file := path / name).exists()]
    written = max((file.stat().st_mtime for file in files), default=now)
    rounds = run.rounds()
    quiet = max(0.0, now - written)
    return View(path, about, rounds, error, quiet, run.newcomers(len(rounds)), run.waiting())


def frame(view: View) -> RenderableType:
    """Return the picture of a moment."""
    if view.about is None and view.state == "stopped":
        return Text(
            f"{view.path} has no run.json, and nobody works there any more: the run was stopped or killed before it "
            "began; start it again with the same command",
            style="red",
        )
    if view.about is None:
        told = f"waiting for a run: {view.path} " + (
            "has no run.json yet" if view.path.exists() else "is not there yet"
        )
        told += f"\n{view.waiting}" if view.waiting else ""
        return Text(f"{told}\nit ended with: {view.error}" if view.error else told, style="yellow")
    done = len(view.rounds)
    parts: list[RenderableType] = [
        Text(str(view.path), style="bold"),
        Text(settings_line(view.about, done)),
        _progress(view, done),
    ]
    if view.wanted_of_newcomers:
        parts.append(
            Text(f"new clients: {len(view.newcomers)} of {view.wanted_of_newcomers} rounds of their own")
        )
    if view.rounds:
        found = scores(view.rounds)
        parts.append(_accuracies(found, str(view.about["headline"])))
        parts += [Text(line) for line in few_lines([("", few_clients([(view.about, found)]))])]
        parts.append(Text(_traffic(view.rounds)))
        notes = dict.fromkeys(note for entry in view.rounds for note in entry.get("notes", []))
        parts += [Text(f"note: {note}", style="yellow") for note in list(notes)[-LAST:]]
        parts += [
            Text(line, style="yellow")
            for line in list(failure_lines([*view.rounds, *view.newcomers]))[-LAST:]
        ]
    if view.waiting and view.state in ("running", "silent"):
        parts.append(Text(view.waiting))
    if view.state == "silent":
        each = f", a round takes {clock(view.pace)}" if view.pace else ""
        parts.append(
            Text(
                f"nothing new for {clock(view.quiet)}{each}: it may have been stopped or killed; if so, go on with "
                f"{go_on_with(view.path, view.about)}",
                style="red",
            )
        )
    if view.state == "stopped":
        parts.append(
            Text(
                f"nobody goes on with it: it was stopped or killed; go on with {go_on_with(view.path, view.about)}",
                style="red",
            )
        )
    if view.error:
        parts.append(Text(f"it ended with: {view.error}", style="red"))
    return Group(*parts)


def follow(path: Path, console: Console, seconds: float, clock_now: Callable[[], float] = time.time) -> State:
    """Show the run until it has ended, and return how; one that was stopped has a minute to be gone on with.

    Args:
        path: of the run; it need not exist yet.
        console: where it is shown.
        seconds: between two looks.
        clock_now: seconds since the epoch.

    Raises:
        PbflError: if one of its files is damaged.
    """
    view = look(path, now := clock_now())
    alive = now
    with Live(frame(view), console=console, auto_refresh=False) as live:
        while view.state not in ("finished", "failed") and now - alive < STOPPED_SECONDS:
            time.sleep(seconds)
            view = look(path, now := clock_now())
            alive = alive if view.state == "stopped" else now
            live.update(frame(view), refresh=True)
    if not console.is_terminal:
        console.line()  # which rich ends on a terminal only
    return view.state


def _progress(view: View, done: int) -> RenderableType:
    if view.state == "finished":
        rest = "finished"
    elif view.pace is None:
        rest = "before the first round"
    elif view.state == "stopped":
        rest = f"{clock(view.pace)} a round"
    else:
        rest = f"{clock(view.pace)} a round, left {clock(view.pace * (view.wanted - done))}"
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=view.wanted, completed=done, width=40),
        Text(f"{done} of {view.wanted} rounds, {rest}"),
    )
    return row


def _accuracies(found: Mapping[str, Scores], headline: str) -> Table:
    table = Table(
        title="accuracy, %, weighted by samples",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("predictor", overflow="fold")
    for name in ("round", "last", "std", "worst 10%", "best", "in round"):
        table.add_column(name, justify="right", min_width=len("99.99"))
    for name, score in found.items():
        (number, last), (at, best) = score.last, score.best
        figures = [f"{100 * last[key]:.2f}" for key in ("weighted", "std", "worst")]
        label = f"{name} (headline)" if name == headline else name
        table.add_row(
            label,
            str(number),
            *figures,
            f"{100 * best['weighted']:.2f}",
            str(at),
            style="bold" if name == headline else "",
        )
    return table


def _traffic(rounds: Sequence[Mapping[str, Any]]) -> str:
    last = rounds[-1]
    ways = [
        (way, last[f"bytes_{way}"]["total"], sum(r[f"bytes_{way}"]["total"] for r in rounds))
        for way in ("up", "down")
    ]
    return "bytes of all clients: " + ", ".join(
        f"{way} {kilobytes(now)} a round, {kilobytes(total)} so far" for way, now, total in ways
    )
