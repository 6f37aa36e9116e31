"""Prototype alignment: the published broadcast form against the Gram form and the closed-form simplex.

    python benchmarks/solvers.py [--large] [--out solvers.json]

One process, one thread, the same ReLU-like start and the same settings for both; each is run several times,
alternating, and the fastest run counts. The broadcast form runs in float32 as published, and once more in
float64. Exits with 1 if the two forms disagree (directions 1e-3, energy 1e-4). `--large` adds K = 1,000, where
the broadcast form needs several GB and about a minute a run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pbfl_flwr.prototypes.alignment import Alignment, align, geometry

DIRECTION_TOLERANCE, ENERGY_TOLERANCE = 1e-3, 1e-4


def broadcast_alignment(prototypes: Tensor, max_steps: int = 500) -> tuple[Tensor, int]:
    """ProtoNorm's Algorithm 1 as it stands, with all (K, K, d) differences; returns unit rows and steps."""
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
    """Non-negative rows with a common part, like aggregated features behind a ReLU."""
    random = torch.Generator().manual_seed(seed)
    common, spread = torch.rand(dim, generator=random), torch.rand(dim, generator=random)
    return torch.randn(num_classes, dim, generator=random).relu() * spread + 0.5 * common


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(num_classes: int, dim: int, seed: int, repeats: int) -> dict[str, float | int | bool]:
    start = relu_like(num_classes, dim, seed)
    everybody = torch.ones(num_classes, dtype=torch.bool)

    def ours() -> Alignment:
        return align(start, everybody)

    expected, steps = broadcast_alignment(start)
    result, simplex = ours(), align(start, everybody, "simplex")
    broadcast, broadcast64, gram, closed = [], [], [], []
    for _ in range(repeats):
        broadcast.append(seconds(lambda: broadcast_alignment(start)))
        gram += [seconds(ours) for _ in range(5)]
        closed += [seconds(lambda: align(start, everybody, "simplex")) for _ in range(5)]
    broadcast64.append(seconds(lambda: broadcast_alignment(start.double())))
    direction = float((result.values - expected).norm(dim=1).max())
    energy = abs(result.report.after.energy - geometry(expected).energy)
    return {
        "classes": num_classes,
        "dim": dim,
        "steps_broadcast": steps,
        "steps_gram": result.report.iterations,
        "broadcast_float32_s": min(broadcast),
        "broadcast_float64_s": min(broadcast64),
        "gram_s": min(gram),
        "simplex_s": min(closed),
        "times_faster": min(broadcast) / min(gram),
        "direction_difference": direction,
        "energy_difference": energy,
        "energy_gram": result.report.after.energy,
        "energy_simplex": simplex.report.after.energy,
        "agree": direction <= DIRECTION_TOLERANCE and energy <= ENERGY_TOLERANCE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", action="store_true", help="also K = 1,000")
    parser.add_argument("--dim", type=int, default=512, help="d (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the start (default 0)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the broadcast form (default 3)")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'K':>5} {'steps':>5} {'broadcast f32':>14} {'broadcast f64':>14} {'gram':>10} {'simplex':>10} "
        f"{'faster':>7} {'directions':>10} {'energy':>9}"
    )
    rows = []
    for num_classes in (10, 50, 100, 200, *([1000] if arguments.large else [])):
        row = measure(
            num_classes, arguments.dim, arguments.seed, 1 if num_classes > 200 else arguments.repeats
        )
        rows.append(row)
        print(
            f"{row['classes']:>5} {row['steps_gram']:>5} {row['broadcast_float32_s']:>12.4f} s "
            f"{row['broadcast_float64_s']:>12.4f} s {row['gram_s']:>8.4f} s {row['simplex_s']:>8.4f} s "
            f"{row['times_faster']:>6.0f}x {row['direction_difference']:>10.1e} {row['energy_difference']:>9.1e}",
            flush=True,
        )
    if arguments.out:
        machine = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        arguments.out.write_text(json.dumps({**machine, "rows": rows}, indent=2) + "\n")
    if disagreeing := [row["classes"] for row in rows if not row["agree"]]:
        print(f"the two forms disagree at K = {disagreeing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
