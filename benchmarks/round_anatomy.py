"""Break down the time of a round: training, data, our own bookkeeping, Flower.

    python benchmarks/round_anatomy.py --set dataset=fashion-mnist --set models=heterogeneous-4 \\
        --set num-server-rounds=3 [--gpus-per-client 0.25 --workers 4]

Runs the configuration through ``pbfl run`` and reads the history. The workers' seconds are divided by their number; the
rest of the wall-clock time is Flower, Ray, waiting for the slowest worker and other load on the machine. The first
round (caches, first access to the data) is excluded if there are several.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from machine import NO_CARD, card_options, introduce, write


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--gpus-per-client", type=float, default=0.0, help="train on the card, this share a worker"
    )
    parser.add_argument("--engine", choices=("flower", "processes"), default="flower")
    parser.add_argument("--run", type=Path, help="read this finished run instead of making one")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if (options := card_options(arguments.gpus_per_client)) is None:
        print(NO_CARD)
        return 0
    introduce(f"{arguments.workers} workers, 1 each unless said otherwise")
    if arguments.run:
        figures = anatomy(arguments.run, arguments.workers)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = [sys.executable, "-m", "pbfl_flwr.cli", "run", "--run-dir", str(run)]
            command += ["--workers", str(arguments.workers), "--engine", arguments.engine, *options]
            for assignment in arguments.assignments:
                command += ["--set", assignment]
            if code := subprocess.run(command, check=False).returncode:
                return code
            figures = anatomy(run, arguments.workers)
    table(figures)
    write(arguments.out, 1, **figures)
    return 0


def anatomy(run: Path, workers: int) -> dict[str, float | str | int]:
    """Return medians over rounds, in seconds of wall-clock time."""
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    rounds = rounds[1:] or rounds
    config = json.loads((run / "run.json").read_text())["configuration"]

    def middle(pick: Callable[[dict[str, Any]], float]) -> float:
        return median(pick(entry["seconds"]) for entry in rounds)

    total = middle(lambda s: s["total"])
    training = middle(lambda s: (s["clients"]["fit"] + s["clients"]["evaluate"]) / workers)
    data = middle(lambda s: s["clients"]["data"] / workers)
    ours = middle(lambda s: (s["clients"]["open"] + s["clients"]["save"]) / workers + s["aggregate"])
    return {
        "method": config["method"],
        "dataset": config["dataset"],
        "models": config["models"],
        "rounds": len(rounds),
        "workers": workers,
        "total": total,
        "training and evaluation": training,
        "data": data,
        "our bookkeeping": ours,
        "Flower, Ray and waiting": total - training - data - ours,
        "peak memory of a worker, MB": max(entry["peak_mb"] for entry in rounds),
    }


def table(figures: dict[str, float | str | int]) -> None:
    about = ", ".join(f"{key} {figures[key]}" for key in ("method", "dataset", "models", "rounds", "workers"))
    print(f"\n{about}\n")
    total = float(figures["total"])
    for key in ("training and evaluation", "data", "our bookkeeping", "Flower, Ray and waiting", "total"):
        seconds = float(figures[key])
        print(f"{key:<28}{seconds:9.3f} s{100 * seconds / total:8.1f} %")
    print(f"{'peak memory of a worker':<28}{float(figures['peak memory of a worker, MB']):9.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
