"""Commands called in this process, and run directories written by hand for them."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from pbfl_flwr.cli import app
from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, plan, selected
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.directory import RESULT, RunDirectory
from pbfl_flwr.runs.records import VERSION, ClientsRecord, RoundRecord

HASH = "0123456789ab"  # of the results of a written run that is finished


def pbfl(*arguments: object) -> Result:
    """Call the command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """Call the command, which must refuse in one line with exit code 2, and return that line."""
    result = pbfl(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def terminal(width: int = 400) -> Console:
    """A terminal without colours that shows nothing, for :func:`printed`."""
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def printed(console: Console) -> list[str]:
    """Return the lines that were printed to a :func:`terminal`."""
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def edit(file: Path, **changes: Any) -> dict[str, Any]:
    """Change fields of the only JSON object in a file, and return what it held before."""
    content: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}) + "\n")
    return content


def write_lines(file: Path, *lines: dict[str, Any]) -> None:
    """Append lines of JSON to a file, which need not exist."""
    with file.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def rows_of(sheet: Sheet) -> list[dict[str, str]]:
    """Return the rows of a table, each as title of the column -> cell."""
    return [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]


def planned_of(
    runs: Mapping[str, Mapping[str, Scalar]],
    assignments: Iterable[str],
    seeds: Sequence[Scalar],
    only: Sequence[str],
    out: Path,
) -> list[PlannedRun]:
    """The checked runs of a comparison with these labels, all if there are none."""
    return selected(plan(runs, assignments, seeds, out), only)


def unread(*arguments: object) -> tuple[int, str]:
    """Call the command with an output that nobody reads, and return its exit code and what it says of errors."""
    reader, output = os.pipe()
    os.close(reader)
    return _printing_to(output, *arguments)


def without_room(*arguments: object) -> tuple[int, str]:
    """Call the command with an output that holds nothing, and return its exit code and what it says of errors."""
    return _printing_to(os.open("/dev/full", os.O_WRONLY), *arguments)


def _printing_to(output: int, *arguments: object) -> tuple[int, str]:
    words = [sys.executable, "-m", "pbfl_flwr.cli", *map(str, arguments)]
    done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(output)
    return done.returncode, done.stderr


def entry(number: int, heads: float, globals_: float | None, **more: Any) -> dict[str, Any]:
    """One line of rounds.jsonl: two clients, 100 bytes up and 300 down each.

    Args:
        number: of the round.
        heads, globals_: weighted accuracies of head and global.
        more: other fields; what they lack (statistics of an accuracy, seconds) is filled in.
    """
    accuracy = {"head": {"weighted": heads}} | (
        {} if globals_ is None else {"global": {"weighted": globals_}}
    )
    line = {
        "round": number,
        "accuracy": accuracy,
        "accuracy_of_round": number,
        "test_loss": 0.25,
        "client_metrics": {},
        "server_metrics": {},
        "trained": [0, 1],
        "warnings": [],
        "failures": [],
        "bytes_up": {"payload": 200, "application": 220, "total": 400},
        "bytes_down": {"payload": 600, "application": 620, "total": 800},
        "scalars": {"up": 12, "down": 20},
        "peak_mb": 512.0,
        **more,
    }
    seconds = {"open": 0.1, "fit": 1.0, "evaluate": 0.2, "save": 0.1}
    line["seconds"] = {"total": 2.0, "aggregate": 0.1, "clients": seconds, **more.get("seconds", {})}
    for name in {"accuracy", "validation"} & set(line):
        line[name] = _with_statistics(line[name])
    if final := more.get("final"):
        scores = {name: _with_statistics(final[name]) for name in ("accuracy", "validation") if name in final}
        line["final"] = {"failures": [], **final, **scores}
    return line


def _with_statistics(accuracy: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fill in the statistics of each predictor's accuracy."""
    return {
        name: {
            "mean": share["weighted"],
            "std": 0.125,
            "worst": share["weighted"] - 0.125,
            "clients": 2,
            **share,
        }
        for name, share in accuracy.items()
    }


def columns(number: int, correct: list[dict[str, int]], tests: int = 4, **more: Any) -> dict[str, Any]:
    """One line of clients.jsonl: a client for each entry of correct, with so many test samples each."""
    many = len(correct)
    return {
        "round": number,
        "client": list(range(many)),
        "num_train": [6] * many,
        "num_test": [tests] * many,
        "participations": [number] * many,
        "correct": correct,
        "test_loss": [0.25] * many,
        "metrics": [{}] * many,
        "seconds": {step: [0.0] * many for step in ("data", "open", "fit", "evaluate", "save")},
        **more,
    }


def rounds_of(*lines: dict[str, Any]) -> list[RoundRecord]:
    """The records of lines of rounds.jsonl."""
    return [RoundRecord.from_json(line, "a line") for line in lines]


def records(number: int) -> tuple[RoundRecord, ClientsRecord]:
    """The records of a round of two clients."""
    clients = ClientsRecord.from_json(columns(number, [{}, {}]), "a line")
    return RoundRecord.from_json(entry(number, 0.5, 0.5), "a line"), clients


def over(clients: int, line: dict[str, Any], predictor: str = "global") -> dict[str, Any]:
    """A line of rounds.jsonl whose accuracy is over so many clients."""
    accuracy = {**line["accuracy"], predictor: {**line["accuracy"][predictor], "clients": clients}}
    return {**line, "accuracy": accuracy}


def end_early(run: Path, done: int) -> None:
    """Let a written run be one that patience ended after so many rounds."""
    RunDirectory(run).update(ended_after=done)
    RunDirectory(run).write_line(RESULT, HASH)


def write_run(path: Path, rounds: list[dict[str, Any]], **changes: Any) -> Path:
    """Write a run of two clients and three classes that ended after these rounds, finished if they are all."""
    config = parse(
        {"num-clients": 2, "num-server-rounds": len(rounds), "feature-dim": 4, **changes}, SECTIONS
    ).as_dict()
    member = {
        "node": "1",
        "simulated": True,
        "task": {"num_classes": 3, "feature_dim": 4, "input_shape": [1, 16, 16]},
        "labels": ["a", "b", "c"],
        "architecture": "cnn4",
        "configured_data": True,
        "parameters": [50, 15],
        "device": "cpu",
        "num_train": 6,
        "num_test": 2,
    }
    about = {
        "version": VERSION,
        "configuration": config,
        "versions": {},
        "experiment": "x",
        "primary_predictor": "global",
        "moment": "after",
        "clients": [{"client": 0, **member}, {"client": 1, **member}],
    }
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(about))
    (path / "rounds.jsonl").touch()
    write_lines(path / "rounds.jsonl", *rounds)
    if len(rounds) >= int(config["num-server-rounds"]):
        RunDirectory(path).write_line(RESULT, HASH)
    # By FedProto's paper (K_1 + K)·d + (K_2 + K)·d = (2 + 3)·4 + (1 + 3)·4 scalars travel in a round.
    (path / "partition.json").write_text(
        json.dumps(
            {"counts": [[5, 3, 0], [0, 0, 8]], "warnings": [], "majority": 0.7512, "paper_scalars": 36.0}
        )
    )
    return path
