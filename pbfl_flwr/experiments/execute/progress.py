"""The progress of a running run on the console: a line per round, read from its growing files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.console import clients_named, clock, kilobytes, percent, say
from pbfl_flwr.experiments.status import State, pace, show_status, snapshot
from pbfl_flwr.runs.directory import ROUNDS, RunDirectory
from pbfl_flwr.runs.records import RoundRecord, RunRecord

STOPPED_SECONDS = 60.0  # how long a run that has ended early may take to be resumed before following ends


class Follower:
    """Prints new rounds of a run directory.

    Args:
        run_dir: the run directory.
        num_rounds: T, 0 if only the run's record has it.
        console: to print to.
        name: prefix of every line, for several runs on one console; empty for none.
        from_start: whether to print the rounds that are finished already.
    """

    def __init__(
        self, run_dir: Path, num_rounds: int, console: Console, name: str = "", *, from_start: bool = False
    ) -> None:
        self._run = RunDirectory(run_dir)
        self._num_rounds = num_rounds
        self._console = console
        self._begin = f"{name}: " if name else ""
        self._file = run_dir / ROUNDS
        self._about_file = run_dir / "run.json"
        # modification times and sizes of the files when they were last read
        self._version, self._about_version = (0, 0), (0, 0)
        # By content: a resumed run first removes rounds after its checkpoint, then writes them again.
        self._seen: set[bytes] = set()
        self._told = 0  # warnings of run.json
        if not from_start:
            self._new_lines()
            with suppress(PbflError):  # whoever goes on with a damaged run says so
                self._new_warnings()
        self._predictor, self._num_clients = "", 0
        self._seconds: list[float] = []
        self._warnings: set[str] = set()
        self._waiting = self._run.waiting()  # may be left by a process that was killed

    def update(self) -> None:
        """Print the rounds written since the last call."""
        if not self._predictor and self._run.taken:
            about = self._run.record()
            self._predictor, self._num_clients = about.primary_predictor, len(about.clients)
            self._say(introduction(about))
        if lines := self._new_lines():
            # Read anew: when a run is resumed for more rounds, the record has their old number until the server begins.
            rounds = self._num_rounds or self._run.record().last_round
            for line in lines:
                self._round(RoundRecord.from_json(line, self._file), rounds)
        self._warn(self._new_warnings())
        if (waiting := self._run.waiting()) != self._waiting:
            self._waiting = waiting
            if waiting:
                self._say(f"  {waiting}", "dim")

    def _new_lines(self) -> list[bytes]:
        """Return the complete lines of the file, which need not exist yet, that were not returned before."""
        try:
            if (version := _version(self._file)) == self._version:
                return []
            content = self._run.read(self._file.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        self._version = version
        complete = content[: content.rfind(b"\n") + 1].splitlines()
        lines = [line for line in complete if line not in self._seen]
        self._seen.update(lines)
        return lines

    def _new_warnings(self) -> list[str]:
        """Return the warnings in run.json, which need not exist yet, that were not returned before."""
        try:
            if (version := _version(self._about_file)) == self._about_version:
                return []
        except (FileNotFoundError, NotADirectoryError):
            return []
        self._about_version = version
        warnings = self._run.record().warnings
        told, self._told = self._told, len(warnings)
        return warnings[told:]

    def _round(self, record: RoundRecord, rounds: int) -> None:
        self._seconds.append(record.seconds.total)
        if record.joined:
            self._num_clients = len(self._run.record().clients)
        left = pace(self._seconds) * (rounds - record.round)
        self._say(
            f"{round_line(record, rounds, self._predictor, self._num_clients)}  left {clock(left)}",
        )
        self._warn(record.warnings)
        self._failures(record)

    def _warn(self, warnings: list[str]) -> None:
        for warning in warnings:
            if warning not in self._warnings:  # each once per run; the history has those of every round
                self._warnings.add(warning)
                self._say(f"  warning: {warning}", "yellow")

    def _failures(self, record: RoundRecord) -> None:
        by_reason: dict[str, list[str]] = {}
        for failure in record.all_failures:
            by_reason.setdefault(failure.reason, []).append(failure.label)
        for reason, who in by_reason.items():
            self._say(f"  {clients_named(who)} failed: {reason}", "yellow")

    def _say(self, text: str, style: str = "") -> None:
        say(self._console, f"{self._begin}{text}", style)


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


def follow(path: Path, console: Console, seconds: float, now: Callable[[], float] = time.monotonic) -> State:
    """Print a run's rounds until it ends, and return its last state; a stopped run has a minute to be resumed.

    So has one that had failed before: whoever starts it again and then follows it may be faster than the server. The
    directory need not exist yet. ``seconds`` are between updates; ``now`` returns the time in seconds.

    Raises:
        PbflError: if one of its files is damaged.
    """
    follower = Follower(path, 0, console, from_start=True)
    status, alive = snapshot(path), now()
    failed_before = status.state == "failed"
    if status.about is None or failed_before:
        show_status(status, console)
    if failed_before:
        say(console, f"followed for {STOPPED_SECONDS:.0f} s, in case it is being started again", "dim")
    while True:
        follower.update()
        failed_before = failed_before and status.state == "failed"
        over = status.state == "finished" or (status.state == "failed" and not failed_before)
        waits = not status.active and (status.state == "stopped" or failed_before)
        alive = alive if waits else now()
        if over or now() - alive >= STOPPED_SECONDS:
            show_status(status, console)
            return status.state
        time.sleep(seconds)
        status = snapshot(path)


def introduction(about: RunRecord) -> str:
    """Return one line on the clients: their number, architectures, devices, data."""
    task = about.task
    networks = Counter(client.architecture for client in about.clients)
    devices = Counter(client.device for client in about.clients)
    return (
        f"{len(about.clients)} clients ({', '.join(f'{name} x{count}' for name, count in networks.items())}) "
        f"on {', '.join(f'{name}' if len(devices) == 1 else f'{name} x{count}' for name, count in devices.items())}; "
        f"inputs {'x'.join(map(str, task.input_shape))}, K = {task.num_classes}, d = {task.feature_dim}"
    )


def round_line(record: RoundRecord, num_rounds: int, primary_predictor: str, num_clients: int) -> str:
    """Return a round's log line: accuracy, loss, bytes of all messages up and down, seconds.

    Args:
        record: of the round.
        num_rounds: T.
        primary_predictor: the one that is reported; if it was not scored, e.g. before there are prototypes,
            another one is shown.
        num_clients: number of participating clients; an accuracy over fewer says so.
    """
    loss = "-" if record.test_loss is None else f"{record.test_loss:.3f}"
    width = len(str(num_rounds))
    accuracy = accuracy_part(record, primary_predictor, num_clients)
    text = (
        f"round {record.round:>{width}}/{num_rounds}  {accuracy}  loss {loss}  "
        f"up {kilobytes(record.bytes_up.total)}  down {kilobytes(record.bytes_down.total)}  "
        f"{record.seconds.total:.1f} s"
    )
    return f"{text}{final_part(record, primary_predictor)}"


def final_part(record: RoundRecord, primary_predictor: str) -> str:
    """Return the accuracy of the scoring after the last round, appended to its line; empty for other rounds."""
    predictor = _scored_by(record, primary_predictor)
    if record.final is None or predictor not in record.final.accuracy:
        return ""
    return f"  final {percent(record.final.accuracy[predictor].weighted)}"


def accuracy_part(record: RoundRecord, primary_predictor: str, num_clients: int) -> str:
    """Return the accuracy part of a round's line, by the primary predictor or, if not scored, another one."""
    predictor = _scored_by(record, primary_predictor)
    if predictor is None:
        return "accuracy not scored"
    accuracy = record.accuracy[predictor]
    over = f", over {accuracy.clients} of {num_clients}" if accuracy.clients < num_clients else ""
    text = f"accuracy {percent(accuracy.weighted)} ({predictor}, weighted{over})"
    return text if record.accuracy_of_round == record.round else f"{text} before training"


def _scored_by(record: RoundRecord, primary_predictor: str) -> str | None:
    return primary_predictor if primary_predictor in record.accuracy else next(iter(record.accuracy), None)
