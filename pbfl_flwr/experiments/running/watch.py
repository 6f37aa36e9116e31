"""Live view of a run in the terminal, from the files in its directory.

Only files are read, so the run may be one of another ``pbfl run``, a sweep or a deployment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pbfl_flwr.experiments.console import clock, kilobytes
from pbfl_flwr.experiments.results import (
    Scores,
    coverage_lines,
    new_client_rounds,
    partial_coverage,
    resume_command,
    scores,
)
from pbfl_flwr.experiments.show import failure_lines, settings_line
from pbfl_flwr.runs.directory import ERROR, NEW_CLIENTS, WAITING, RunDirectory
from pbfl_flwr.runs.locks import abandoned
from pbfl_flwr.runs.records import NewClientsRecord, RoundRecord, RunRecord

QUIET_SECONDS = 120.0  # a run is "silent" only after this many seconds without output
QUIET_ROUNDS = 5  # and after this many rounds' time
WRITTEN = ("run.json", "rounds.jsonl", NEW_CLIENTS, WAITING)
LAST = 5  # number of latest failures and warnings shown
STOPPED_SECONDS = 60.0  # how long a stopped run may take to be resumed before watching ends
State = Literal["waiting", "running", "silent", "stopped", "finished", "failed"]


@dataclass(frozen=True)
class View:
    """Snapshot of a run directory.

    Attributes:
        path: the directory.
        about: content of run.json; None before it exists.
        rounds: finished rounds.
        error: why the run ended early; empty if it did not.
        quiet: seconds since the last write.
        new_clients: rounds of the new clients, which come after the last of these rounds.
        waiting: text on the clients that the server has been waiting for; it appears after a minute.
        abandoned: whether it is certain that no process works on the run any more.
    """

    path: Path
    about: RunRecord | None
    rounds: Sequence[RoundRecord]
    error: str
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


def snapshot(path: Path, now: float) -> View:
    """Return a snapshot of a run directory, which need not exist.

    Args:
        path: the run directory.
        now: current time in seconds since the epoch.

    Raises:
        PbflError: if one of its files is damaged.
    """
    view = _read(path, now)
    if view.state in ("finished", "failed") or not abandoned(path):
        return view
    # Read again: the run may have written more before it ended.
    return replace(_read(path, now), abandoned=True)


def _read(path: Path, now: float) -> View:
    run = RunDirectory(path)
    about = run.record() if run.taken else None
    error = (path / ERROR).read_text(encoding="utf-8").strip() if (path / ERROR).exists() else ""
    files = [file for name in WRITTEN if (file := path / name).exists()]
    written = max((file.stat().st_mtime for file in files), default=now)
    rounds = run.round_records()
    quiet = max(0.0, now - written)
    return View(path, about, rounds, error, quiet, run.new_client_records(len(rounds)), run.waiting())


def frame(view: View) -> RenderableType:
    """Return the terminal output for a snapshot."""
    if view.about is None and view.state == "stopped":
        return Text(
            f"{view.path} has no run.json, and no process works on it: the run was stopped or killed before it "
            "began; start it again with the same command",
            style="red",
        )
    if view.about is None:
        text = f"waiting for a run: {view.path} " + (
            "has no run.json yet" if view.path.exists() else "does not exist yet"
        )
        text += f"\n{view.waiting}" if view.waiting else ""
        return Text(f"{text}\nended with: {view.error}" if view.error else text, style="yellow")
    done = len(view.rounds)
    parts: list[RenderableType] = [
        Text(str(view.path), style="bold"),
        Text(settings_line(view.about, done)),
        _progress(view, done),
    ]
    if view.wanted_new_client_rounds:
        parts.append(
            Text(f"new clients: {len(view.new_clients)} of {view.wanted_new_client_rounds} own rounds")
        )
    if view.rounds:
        scored = scores(view.rounds)
        parts.append(_accuracies(scored, view.about.primary_predictor))
        parts += [Text(line) for line in coverage_lines([("", partial_coverage([(view.about, scored)]))])]
        parts.append(Text(_traffic(view.rounds)))
        warnings = dict.fromkeys(warning for record in view.rounds for warning in record.warnings)
        parts += [Text(f"warning: {warning}", style="yellow") for warning in list(warnings)[-LAST:]]
        parts += [
            Text(line, style="yellow")
            for line in list(failure_lines([*view.rounds, *view.new_clients]))[-LAST:]
        ]
    if view.waiting and view.state in ("running", "silent"):
        parts.append(Text(view.waiting))
    if view.state == "silent":
        each = f", a round takes {clock(view.pace)}" if view.pace else ""
        parts.append(
            Text(
                f"no output for {clock(view.quiet)}{each}: it may have been stopped or killed; if so, resume with "
                f"{resume_command(view.path, view.about)}",
                style="red",
            )
        )
    if view.state == "stopped":
        parts.append(
            Text(
                "no process works on it: it was stopped or killed; resume with "
                f"{resume_command(view.path, view.about)}",
                style="red",
            )
        )
    if view.error:
        parts.append(Text(f"ended with: {view.error}", style="red"))
    return Group(*parts)


def follow(path: Path, console: Console, seconds: float, clock_now: Callable[[], float] = time.time) -> State:
    """Show the run until it ends, and return its last state; a stopped run has a minute to be resumed.

    Args:
        path: the run directory; it need not exist yet.
        console: to print to.
        seconds: between updates.
        clock_now: returns the current time in seconds since the epoch.

    Raises:
        PbflError: if one of its files is damaged.
    """
    view = snapshot(path, now := clock_now())
    alive = now
    with Live(frame(view), console=console, auto_refresh=False) as live:
        while view.state not in ("finished", "failed") and now - alive < STOPPED_SECONDS:
            time.sleep(seconds)
            view = snapshot(path, now := clock_now())
            alive = alive if view.state == "stopped" else now
            live.update(frame(view), refresh=True)
    if not console.is_terminal:
        console.line()  # rich ends the last line only on a terminal
    return view.state


def _progress(view: View, done: int) -> RenderableType:
    if view.state == "finished":
        rest = "finished"
    elif view.pace is None:
        rest = "before the first round"
    elif view.state == "stopped":
        rest = f"{clock(view.pace)} per round"
    else:
        rest = f"{clock(view.pace)} per round, {clock(view.pace * (view.wanted - done))} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=view.wanted, completed=done, width=40),
        Text(f"{done} of {view.wanted} rounds, {rest}"),
    )
    return row


def _accuracies(scored: Mapping[str, Scores], primary_predictor: str) -> Table:
    table = Table(
        title="sample-weighted accuracy, %",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("predictor", overflow="fold")
    for name in ("round", "last", "std", "worst 10%", "best", "in round"):
        table.add_column(name, justify="right", min_width=len("99.99"))
    for name, score in scored.items():
        (number, last), (best_round, best) = score.last, score.best
        cells = [f"{100 * value:.2f}" for value in (last.weighted, last.std, last.worst)]
        label = f"{name} (primary)" if name == primary_predictor else name
        table.add_row(
            label,
            str(number),
            *cells,
            f"{100 * best.weighted:.2f}",
            str(best_round),
            style="bold" if name == primary_predictor else "",
        )
    return table


def _traffic(rounds: Sequence[RoundRecord]) -> str:
    ways = {
        "up": [record.bytes_up.total for record in rounds],
        "down": [record.bytes_down.total for record in rounds],
    }
    return "bytes of all clients: " + ", ".join(
        f"{way} {kilobytes(totals[-1])} in the last round, {kilobytes(sum(totals))} so far"
        for way, totals in ways.items()
    )
