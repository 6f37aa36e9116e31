"""Prototype alignment: the published broadcast form against the Gram form and the closed-form simplex.

    python benchmarks/solvers.py [--large] [--out solvers.json]

One process, one thread, the same ReLU-like start and the same settings for both; each is run several times,
alternating, and the fastest run counts. Times are the process's CPU seconds: on a shared machine wall-clock time
favours the short call, which can finish between two interruptions. Both sides run the same number of times.

The broadcast form runs in float32, as published, and in float64. Both forms stop on a mean force rounded to 4
decimals; float32 rounding errors of the force can shift that by some steps, so that the published form can disagree
with itself in float64. Agreement is therefore judged in float64 (directions 1e-3, energy 1e-4; exit status 1 if
missed), with the differences to float32 beside it. `--large` adds K = 1,000, once, in float32 only and so not judged:
there the broadcast form needs several GB and a minute or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from machine import introduce, write
from torch import Tensor

from pbfl_flwr.prototypes.alignment import Alignment, align, geometry

T = TypeVar("T")
DIRECTION_TOLERANCE, ENERGY_TOLERANCE = 1e-3, 1e-4


def broadcast_alignment(prototypes: Tensor, max_steps: int = 500) -> tuple[Tensor, int]:
    """ProtoNorm's Algorithm 1 as published, with all (K, K, d) differences; returns unit rows and steps."""
    units = prototypes / prototypes.norm(dim=1, keepdim=True)
    velocity, step = torch.zeros_like(units), 0.1
    previous, unchanged = "", 0
    for t in range(max_steps):
        difference = units.unsqueeze(1) - units.unsqueeze(0)
        inverse = 1 / ((difference * difference).sum(-1) + 1e-10)
        inverse.fill_diagonal_(0)
        force = (inverse.unsqueeze(-1) * difference).sum(1)
        velocity = 0.9 * velocity + step * force
        units = units + velocity
        units = units / units.norm(dim=1, keepdim=True)
        if t % 10 == 0:
            step *= 0.95
        mean_force = f"{float(force.norm(dim=1).mean()):.4f}"
        if t > 10:
            unchanged = unchanged + 1 if mean_force == previous else 0
            if unchanged == 10:
                return units, t + 1
        previous = mean_force
    return units, max_steps


def relu_like(num_classes: int, dim: int, seed: int) -> Tensor:
    """Return non-negative rows with a common part, like aggregated features after a ReLU."""
    random = torch.Generator().manual_seed(seed)
    common, spread = torch.rand(dim, generator=random), torch.rand(dim, generator=random)
    return torch.randn(num_classes, dim, generator=random).relu() * spread + 0.5 * common


def timed(times: list[float], call: Callable[[], T]) -> T:
    begin = time.process_time()
    result = call()
    times.append(time.process_time() - begin)
    return result


def measure(
    num_classes: int, dim: int, seed: int, repeats: int, large: bool
) -> dict[str, float | bool | None]:
    start = relu_like(num_classes, dim, seed)
    everybody = torch.ones(num_classes, dtype=torch.bool)
    times: dict[str, list[float]] = {
        "broadcast_float32_s": [],
        "gram_s": [],
        "broadcast_float64_s": [],
        "simplex_s": [],
    }
    for _ in range(repeats):
        single, single_steps = timed(times["broadcast_float32_s"], lambda: broadcast_alignment(start))
        result = timed(times["gram_s"], lambda: align(start, everybody))
        if not large:
            double, double_steps = timed(
                times["broadcast_float64_s"], lambda: broadcast_alignment(start.double())
            )
        if num_classes <= dim + 1:
            timed(times["simplex_s"], lambda: align(start, everybody, "simplex"))
    judged = single if large else double
    direction, energy = difference(result, judged)
    direction_single, energy_single = difference(result, single)
    fastest = {name: min(values) if values else None for name, values in times.items()}
    return {
        "classes": num_classes,
        "dim": dim,
        "steps_broadcast_float32": single_steps,
        "steps_broadcast_float64": None if large else double_steps,
        "steps_gram": result.iterations,
        **fastest,
        "times_faster": min(times["broadcast_float32_s"]) / min(times["gram_s"]),
        "direction_difference": direction,
        "energy_difference": energy,
        "direction_difference_float32": direction_single,
        "energy_difference_float32": energy_single,
        "energy_gram": result.after.energy,
        "agree": None if large else direction <= DIRECTION_TOLERANCE and energy <= ENERGY_TOLERANCE,
    }


def difference(aligned: Alignment, published: Tensor) -> tuple[float, float]:
    """Return the largest distance of corresponding unit rows, and the difference of the energies."""
    return float((aligned.values - published).norm(dim=1).max()), abs(
        aligned.after.energy - geometry(published).energy
    )


def shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", action="store_true", help="also K = 1,000")
    parser.add_argument("--dim", type=int, default=512, help="d (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the start (default 0)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    introduce(1)
    print(
        f"{'K':>5} {'steps f32/f64/gram':>18} {'broadcast f32':>14} {'broadcast f64':>14} {'gram':>10} "
        f"{'simplex':>10} {'faster':>7} {'directions (f32)':>18} {'energy (f32)':>18}"
    )
    rows = []
    for num_classes in (10, 50, 100, 200, *([1000] if arguments.large else [])):
        large = num_classes > 200
        row = measure(num_classes, arguments.dim, arguments.seed, 1 if large else arguments.repeats, large)
        rows.append(row)
        steps = (
            f"{row['steps_broadcast_float32']}/{row['steps_broadcast_float64'] or '-'}/{row['steps_gram']}"
        )
        directions = f"{row['direction_difference']:.0e} ({row['direction_difference_float32']:.0e})"
        energies = f"{row['energy_difference']:.0e} ({row['energy_difference_float32']:.0e})"
        print(
            f"{row['classes']:>5} {steps:>18} {shown(row['broadcast_float32_s']):>14} "
            f"{shown(row['broadcast_float64_s']):>14} {shown(row['gram_s']):>10} {shown(row['simplex_s']):>10} "
            f"{row['times_faster']:>6.0f}x {directions:>18} {energies:>18}",
            flush=True,
        )
    write(arguments.out, 1, rows=rows)
    if disagreeing := [row["classes"] for row in rows if row["agree"] is False]:
        print(f"the two forms disagree at K = {disagreeing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
