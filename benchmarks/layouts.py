"""Find the best layout, precision and number of threads for models on this machine; write them as a preset.

    python benchmarks/layouts.py --models heterogeneous-4 --input 3,32,32 --batch 32 [--preset fast.toml]
    python benchmarks/layouts.py --models cnn4 --input 1,28,28 --batch 10 --reduced [--out layouts.json]

Measures a client's round of FedProto (see local_training.py) in as many concurrent processes, each with the given
number of threads, as fill the cores, in samples per second of the whole machine. An architecture's candidates
alternate. The preset differs from the default where that is at least 5 % faster. bfloat16 is tried with ``--reduced``
only: it changes results beyond rounding.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import get_args

from local_training import SAMPLES, our_round, start_worker  # first: it sets OMP_WAIT_POLICY

import torch  # isort: skip
from machine import introduce, write

from pbfl_flwr.config.keys import Layout, Precision
from pbfl_flwr.models.registry import architectures

Candidate = tuple[str, str]
"""(layout, precision); the first candidate is the default."""
WORTH = 1.05


def measured(
    pool: ProcessPoolExecutor,
    workers: int,
    architecture: str,
    shape: tuple[int, int, int],
    batch: int,
    how: Candidate,
) -> float:
    """Return samples per second of all workers, each training one client."""
    begin = time.perf_counter()
    jobs = [
        pool.submit(our_round, architecture, shape, batch, client, "cpu", *how) for client in range(workers)
    ]
    for job in jobs:
        job.result()
    return workers * SAMPLES / (time.perf_counter() - begin)


def speeds(
    threads: int,
    names: list[str],
    shape: tuple[int, int, int],
    batch: int,
    candidates: list[Candidate],
    rounds: int,
) -> dict[str, dict[Candidate, float]]:
    """Return architecture -> candidate -> samples per second, with workers of this many threads."""
    workers = max(1, (os.cpu_count() or 1) // threads)
    found: dict[str, dict[Candidate, float]] = {}
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (threads,)) as pool:
        for name in names:
            for how in candidates:
                measured(pool, workers, name, shape, batch, how)
            turns = [
                {how: measured(pool, workers, name, shape, batch, how) for how in candidates}
                for _ in range(rounds)
            ]
            found[name] = {how: median(turn[how] for turn in turns) for how in candidates}
            for how, speed in found[name].items():
                print(
                    f"{name:<18}{threads:>8}{workers:>9}  {how[0]:<15}{how[1]:<10}{speed:>12.0f}", flush=True
                )
    return found


def total(found: dict[str, dict[Candidate, float]], how: Candidate) -> float:
    """Return the seconds for one sample of each architecture: a federation trains all of them."""
    return sum(1 / speed[how] for speed in found.values())


def best(found: dict[str, dict[Candidate, float]]) -> Candidate:
    """Return the fastest candidate over all architectures if it beats the default by WORTH, else the default."""
    default, *others = next(iter(found.values()))
    fastest = min((default, *others), key=lambda how: total(found, how))
    return fastest if WORTH * total(found, fastest) < total(found, default) else default


def preset(chosen: Candidate, threads: int) -> str:
    """Return the TOML text of a preset with this choice."""
    lines = [f"# Measured on {platform.processor() or platform.machine()} with torch {torch.__version__}."]
    if threads > 1:
        lines.append(f"# Workers of {threads} threads were the fastest: pbfl run --cpus-per-client {threads}")
    lines += [f'{key} = "{value}"' for key, value in zip(("layout", "precision"), chosen, strict=True)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = os.cpu_count() or 1
    parser.add_argument("--models", default="heterogeneous-4")
    parser.add_argument("--input", default="3,32,32", help="channels, height, width")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default=f"1,{cores}" if cores > 1 else "1")
    parser.add_argument("--reduced", action="store_true", help="try bfloat16 as well")
    parser.add_argument("--preset", type=Path, help="write the choices as a preset for pbfl run")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    names = list(dict.fromkeys(architectures(arguments.models)))
    channels, height, width = (int(side) for side in arguments.input.split(","))
    precisions = get_args(Precision)
    candidates = list(product(get_args(Layout), precisions if arguments.reduced else precisions[:1]))
    introduce(arguments.threads)
    print(
        f"{'architecture':<18}{'threads':>8}{'workers':>9}  {'layout':<15}{'precision':<10}{'samples/s':>12}"
    )
    found = {
        threads: speeds(
            threads, names, (channels, height, width), arguments.batch, candidates, arguments.rounds
        )
        for threads in map(int, arguments.threads.split(","))
    }
    choices = {threads: best(of) for threads, of in found.items()}
    threads = min(choices, key=lambda threads: total(found[threads], choices[threads]))
    text = preset(choices[threads], threads)
    print(f"\n{text}", end="")
    if arguments.preset:
        arguments.preset.write_text(text)
    rows = [
        {"architecture": name, "threads": threads, "layout": how[0], "precision": how[1], "samples/s": speed}
        for threads, by_name in found.items()
        for name, of in by_name.items()
        for how, speed in of.items()
    ]
    write(arguments.out, arguments.threads, batch=arguments.batch, input=arguments.input, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
