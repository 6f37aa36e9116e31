"""Commands called in this process, and run directories written by hand for them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from pbfl_flwr.cli import app
from pbfl_flwr.config import parse
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.records import VERSION, Bytes, ClientsRecord, RoundRecord


def pbfl(*arguments: object) -> Result:
    """Call the command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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
    """One line of rounds.jsonl: two clients, 100 bytes up and 300 down each."""

    def statistics(weighted: float) -> dict[str, float]:
        return {"weighted": weighted, "mean": weighted, "std": 0.125, "worst": weighted - 0.125, "clients": 2}

    accuracy = {"head": statistics(heads)} | ({} if globals_ is None else {"global": statistics(globals_)})
    return {
        "round": number,
        "accuracy": accuracy,
        "accuracy_of_round": number,
        "test_loss": 0.25,
        "clients": {},
        "server": {},
        "trained": [0, 1],
        "notes": [],
        "failures": [],
        "bytes_up": {"payload": 200, "ours": 220, "total": 400},
        "bytes_down": {"payload": 600, "ours": 620, "total": 800},
        "scalars": {"up": 12, "down": 20},
        "seconds": {
            "total": 2.0,
            "aggregate": 0.1,
            "clients": {"open": 0.1, "fit": 1.0, "evaluate": 0.2, "save": 0.1},
        },
        "peak_mb": 512.0,
        **more,
    }


def records(number: int) -> tuple[RoundRecord, ClientsRecord]:
    """The records of a round of two clients."""
    columns: dict[str, Any] = {
        **{name: [4, 4] for name in ("num_train", "num_test", "participations", "num_validation")},
        **{name: [{}, {}] for name in ("correct", "correct_validation", "metrics")},
        **{name: [Bytes(payload=1, application=2, total=3)] * 2 for name in ("bytes_up", "bytes_down")},
    }
    clients = ClientsRecord(
        round=number, client=[0, 1], test_loss=[0.5, 0.5], seconds=[[0.0] * 5] * 2, **columns
    )
    return RoundRecord.from_json(entry(number, 0.5, 0.5), "a line"), clients


def over(clients: int, line: dict[str, Any], predictor: str = "global") -> dict[str, Any]:
    """A line of rounds.jsonl whose accuracy is over so many clients."""
    accuracy = {**line["accuracy"], predictor: {**line["accuracy"][predictor], "clients": clients}}
    return {**line, "accuracy": accuracy}


def write_run(path: Path, rounds: list[dict[str, Any]], **changes: Any) -> Path:
    """Write a run of two clients and three classes that ended after these rounds."""
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
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    # By FedProto's paper (K_1 + K)·d + (K_2 + K)·d = (2 + 3)·4 + (1 + 3)·4 scalars travel in a round.
    (path / "partition.json").write_text(
        json.dumps({"counts": [[5, 3, 0], [0, 0, 8]], "notes": [], "majority": 0.7512, "paper_scalars": 36.0})
    )
    return path
