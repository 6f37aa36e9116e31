"""How often the paired test of pbfl compare finds a difference between a method and itself (an A/A test).

    python benchmarks/false_positives.py --runs runs/a-a [--dataset har --data-dir har.npz] [--first-seed 0]

FedProto is run with several seeds on one partition, and with two seeds on each of several partitions. Then, many times,
k runs are drawn against k others (or k partitions, one run of each against the other), and compared as two methods
would be. A share of 5 % below p = 0.05 is nominal. Finished runs in --runs are used again; one process, one thread.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from machine import introduce, write

from pbfl_flwr.config import Scalar
from pbfl_flwr.experiments.results import FinishedRun
from pbfl_flwr.experiments.statistics import CONFIDENCE, paired
from pbfl_flwr.flower.api import Resources, RunDirectory, federate

KEYS: dict[str, dict[str, Scalar]] = {
    "digits": {  # as the preset fedproto-digits
        "num-clients": 20,
        "num-server-rounds": 20,
        "batch-size": 8,
        "learning-rate": 0.05,
    },
    "har": {  # as the comparison har-people, with fewer windows and rounds
        "dataset": "har",
        "max-samples": 1000,
        "num-clients": 25,
        "num-server-rounds": 6,
        "partition": "dirichlet",
        "models": "sensor-4",
        "feature-dim": 128,
        "batch-size": 10,
        "optimizer": "adam",
        "optimizer-state": "kept",
        "learning-rate": 0.003,
    },
}
RUNS_A_SIDE = (1, 2, 3, 5, 8)
DRAWS = 4000


def made(place: Path, keys: dict[str, Scalar]) -> FinishedRun:
    """Return a run in this directory, made if it is not there."""
    if not RunDirectory(place).result():
        federate(
            place,
            {**keys, "resume": (place / "run.json").exists()},
            int(keys["num-clients"]),
            Resources(workers=1),
        )
    return FinishedRun.load(place)


def accuracy(run: FinishedRun, predictor: str) -> float:
    return run.scores[predictor].last[1].weighted


def shares(first: list[float], second: list[float], *, anew: bool) -> dict[int, float]:
    """Return runs a side -> share of draws in which the test finds a difference.

    Args:
        first, second: accuracies; entry i of both is from one partition.
        anew: whether all are from the same partition, so that each may be drawn on either side.
    """
    rng, found = np.random.default_rng(0), {}
    one, other = np.array(first), np.array(second)
    for k in RUNS_A_SIDE:
        if k > (len(one) // 2 if anew else len(one)):
            continue
        below = 0
        for _ in range(DRAWS):
            if anew:
                drawn = rng.permutation(one)[: 2 * k]
                result = paired(drawn[:k], drawn[k:])
            else:
                at, swapped = rng.permutation(len(one))[:k], rng.random(k) < 0.5
                result = paired(np.where(swapped, one[at], other[at]), np.where(swapped, other[at], one[at]))
            below += result.p is not None and result.p < 1 - CONFIDENCE
        found[k] = below / DRAWS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--dataset", choices=[*KEYS], default="digits")
    parser.add_argument("--data-dir", default="", help="the dataset's file, for har")
    parser.add_argument("--seeds", type=int, default=18, help="runs on one partition (default 18)")
    parser.add_argument("--partitions", type=int, default=6, help="each with two runs (default 6)")
    parser.add_argument("--first-seed", type=int, default=0, help="other seeds are other runs (default 0)")
    parser.add_argument("--out", type=Path, help="write the shares as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    introduce(1)
    keys, place = KEYS[given.dataset], given.runs.absolute() / given.dataset
    if given.data_dir:
        keys["data-dir"] = str(Path(given.data_dir).absolute())
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    runs = [made(place / f"seed{seed}", {**keys, "seed": seed}) for seed in seeds]
    on_others = [
        [
            made(place / f"partition{at}-seed{seed}", {**keys, "seed": seed, "partition-seed": at})
            for at in range(100 + given.first_seed, 100 + given.first_seed + given.partitions)
        ]
        for seed in (given.first_seed, given.first_seed + 1)
    ]
    figures: dict[str, dict[int, float]] = {}
    for predictor in ("head", "global"):
        one = [accuracy(run, predictor) for run in runs]
        figures[f"{predictor}, seeds of one partition"] = shares(one, one, anew=True)
        first, second = ([accuracy(run, predictor) for run in side] for side in on_others)
        if first:
            figures[f"{predictor}, partitions"] = shares(first, second, anew=False)
        print(f"{predictor}: {100 * np.mean(one):.2f} ± {100 * np.std(one, ddof=1):.2f} % over seeds")
    for name, found in figures.items():
        text = ", ".join(f"{k} a side {100 * share:.1f} %" for k, share in found.items())
        print(f"p < 0.05 by {name}: {text}")
    write(given.out, 1, dataset=given.dataset, runs=len(runs), shares=figures)


if __name__ == "__main__":
    main()
