"""Console log of a running run: a line per round, read from its growing files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from pbfl_flwr.config import AttackSettings
from pbfl_flwr.experiments.console import clients_named, clock, kilobytes, percent, say
from pbfl_flwr.experiments.results import honest
from pbfl_flwr.runs.directory import NEW_CLIENTS, RunDirectory


class Follower:
    """Prints new rounds of a run directory.

    Args:
        run_dir: the run directory.
        num_rounds: T.
        console: to print to.
        name: prefix of every line, for several runs on one console; empty for none.
    """

    def __init__(self, run_dir: Path, num_rounds: int, console: Console, name: str = "") -> None:
        self._run = RunDirectory(run_dir)
        self._num_rounds = num_rounds
        self._console = console
        self._begin = f"{name}: " if name else ""
        self._tail = Tail(run_dir / "rounds.jsonl")
        self._new_client_lines = Tail(run_dir / NEW_CLIENTS)
        self._new_client_lines.read()  # skip those of before the run was resumed
        # By content: a resumed run first removes rounds after its checkpoint, then writes them again.
        self._seen = set(self._tail.read())
        self._headline, self._num_honest = "", 0
        self._seconds: list[float] = []
        self._notes: set[str] = set()
        self._waiting = self._run.waiting()  # may be left by a process that was killed

    def update(self) -> None:
        """Print the rounds written since the last call."""
        if not self._headline and (self._run.path / "run.json").exists():
            about = self._run.read()
            self._headline, self._num_honest = about["primary_predictor"], len(honest(about))
            self._say(introduction(about))
            if malicious := about.get("malicious"):
                attack = AttackSettings.from_flat(about["configuration"])
                self._say(attack.notice(malicious), "yellow")
        for line in self._tail.read():
            if line not in self._seen:
                self._seen.add(line)
                self._round(json.loads(line))
        for line in self._new_client_lines.read():
            self._newcomer(json.loads(line))
        if (waiting := self._run.waiting()) != self._waiting:
            self._waiting = waiting
            if waiting:
                self._say(f"  {waiting}", "dim")

    def _newcomer(self, line: Mapping[str, Any]) -> None:
        text = f"new clients, own round {line['round'] - line['after']}"
        seconds = f"{line['seconds']['total']:.1f} s{final_part(line, self._headline)}"
        self._say(f"{text}  {accuracy_part(line, self._headline)}  {seconds}")
        self._failures(line)

    def _round(self, line: Mapping[str, Any]) -> None:
        self._seconds.append(line["seconds"]["total"])
        if line.get("joined"):
            self._num_honest = len(honest(self._run.read()))
        left = median(self._seconds[-5:]) * (self._num_rounds - line["round"])
        self._say(
            f"{round_line(line, self._num_rounds, self._headline, self._num_honest)}  left {clock(left)}",
        )
        for note in line.get("notes", []):
            if note not in self._notes:  # each once per run; the history has those of every round
                self._notes.add(note)
                self._say(f"  note: {note}", "yellow")
        self._failures(line)

    def _failures(self, line: Mapping[str, Any]) -> None:
        by_reason: dict[str, list[str]] = {}
        for failure in [*line["failures"], *line.get("final", {}).get("failures", [])]:
            by_reason.setdefault(failure["reason"], []).append(str(failure.get("name", failure["client"])))
        for reason, who in by_reason.items():
            self._say(f"  {clients_named(who)} failed: {reason}", "yellow")

    def _say(self, text: str, style: str = "") -> None:
        say(self._console, f"{self._begin}{text}", style)


class Tail:
    """Reads the lines appended to a file; a rewritten file is read from its beginning.

    Args:
        file: need not exist yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._end = 0
        self._last = b""

    def read(self) -> list[bytes]:
        """Return the complete lines since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(start := self._end - len(self._last))
            found = file.read()
            if not found.startswith(self._last):
                file.seek(start := 0)
                found, self._last = file.read(), b""
        complete = found[: found.rfind(b"\n") + 1]
        lines = complete[len(self._last) :].splitlines()
        self._end = start + len(complete)
        self._last = complete[complete.rfind(b"\n", 0, -1) + 1 :]
        return lines


def introduction(about: Mapping[str, Any]) -> str:
    """Return one line on the participants: clients, architectures, devices, data.

    Args:
        about: content of run.json.
    """
    members = about["clients"]
    task = members[0]["task"]
    networks = Counter(member["architecture"] for member in members)
    devices = Counter(member["device"] for member in members)
    return (
        f"{len(members)} clients ({', '.join(f'{name} x{count}' for name, count in networks.items())}) "
        f"on {', '.join(f'{name}' if len(devices) == 1 else f'{name} x{count}' for name, count in devices.items())}; "
        f"inputs {'x'.join(map(str, task['input_shape']))}, K = {task['num_classes']}, d = {task['feature_dim']}"
    )


def round_line(line: Mapping[str, Any], num_rounds: int, primary_predictor: str, num_honest: int = 0) -> str:
    """Return a round's log line: accuracy, loss, bytes of all messages up and down, seconds.

    Args:
        line: an entry of rounds.jsonl.
        num_rounds: T.
        primary_predictor: the one that is reported; if it was not scored, e.g. before there are prototypes,
            another one is shown.
        num_honest: number of participating clients that are not malicious; an accuracy over fewer says so.
    """
    loss = "-" if line["test_loss"] is None else f"{line['test_loss']:.3f}"
    width = len(str(num_rounds))
    accuracy = accuracy_part(line, primary_predictor, num_honest)
    text = (
        f"round {line['round']:>{width}}/{num_rounds}  {accuracy}  loss {loss}  "
        f"up {kilobytes(line['bytes_up']['total'])}  down {kilobytes(line['bytes_down']['total'])}  "
        f"{line['seconds']['total']:.1f} s"
    )
    return f"{text}{final_part(line, primary_predictor)}"


def final_part(line: Mapping[str, Any], primary_predictor: str) -> str:
    """Return the accuracy of the scoring after the last round, appended to its line; empty for other rounds."""
    final = line.get("final", {}).get("accuracy", {}).get(_scored_by(line, primary_predictor))
    return "" if final is None else f"  final {percent(final['weighted'])}"


def accuracy_part(line: Mapping[str, Any], primary_predictor: str, num_honest: int = 0) -> str:
    """Return the accuracy part of a round's line, by the primary predictor or, if not scored, another one."""
    predictor = _scored_by(line, primary_predictor)
    if predictor is None:
        return "accuracy not scored"
    found = line["accuracy"][predictor]
    over = (
        f", over {found['clients']} of {num_honest}" if found.get("clients", num_honest) < num_honest else ""
    )
    said = f"accuracy {percent(found['weighted'])} ({predictor}, weighted{over})"
    return said if line["accuracy_of_round"] == line["round"] else f"{said} before training"


def _scored_by(line: Mapping[str, Any], primary_predictor: str) -> str | None:
    accuracy: Mapping[str, Any] = line["accuracy"]
    return primary_predictor if primary_predictor in accuracy else next(iter(accuracy), None)
