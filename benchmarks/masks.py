"""Allocation of CPS masks: time, total pairwise Hamming distance against its maximum, smallest distance.

    python benchmarks/masks.py [--seed 0] [--out masks.json]

One thread; times are CPU seconds, the fastest of three. Exits with 1 if a total misses its maximum.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Literal

import torch
from machine import introduce, write

from pbfl_flwr.prototypes.masks import allocate_masks

Scheme = Literal["dimension", "block"]
CASES: tuple[tuple[int, int, int, Scheme], ...] = (
    (43, 500, 50, "dimension"),
    (100, 500, 50, "dimension"),
    (200, 500, 50, "dimension"),
    (1000, 512, 50, "dimension"),
    (43, 500, 50, "block"),
    (100, 500, 50, "block"),
    (200, 500, 50, "block"),
)


def maximal_total_hamming(num_classes: int, feature_dim: int, size: int) -> int:
    """Return T*, the largest total distance of K masks of s ones: r columns of load q + 1 and d - r of load q.

    q = ⌊Ks/d⌋ and r = Ks - qd; see ``allocate_masks`` for the argument.
    """
    q, r = divmod(num_classes * size, feature_dim)
    return (feature_dim - r) * q * (num_classes - q) + r * (q + 1) * (num_classes - q - 1)


def measure(num_classes: int, dim: int, size: int, scheme: Scheme, seed: int) -> dict[str, float | int | str]:
    times = []
    for _ in range(3):
        begin = time.process_time()
        masks = allocate_masks(num_classes, dim, size, scheme=scheme, seed=seed)
        times.append(time.process_time() - begin)
    if scheme == "block":  # distances in blocks of l dimensions
        unit = dim // num_classes
        maximum = unit * maximal_total_hamming(num_classes, num_classes, num_classes * size // dim)
    else:
        unit, maximum = 1, maximal_total_hamming(num_classes, dim, size)
    distances = torch.pdist(masks.double(), p=0)  # Hamming, of every pair
    return {
        "classes": num_classes,
        "dim": dim,
        "size": int(masks[0].sum()),
        "scheme": scheme,
        "seconds": min(times),
        "total": int(distances.sum()),
        "maximum": maximum,
        "smallest": int(distances.min()),
        "smallest_in_blocks": int(distances.min()) // unit,
        "mean": maximum / len(distances),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the masks (default 0)")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    introduce(1)
    print(
        f"{'scheme':>9} {'K':>5} {'d':>4} {'s':>4} {'CPU time':>9} {'total':>11} {'maximum':>11} "
        f"{'smallest':>8} {'in blocks':>9} {'mean':>6}"
    )
    rows = [measure(*case, arguments.seed) for case in CASES]
    for row in rows:
        print(
            f"{row['scheme']:>9} {row['classes']:>5} {row['dim']:>4} {row['size']:>4} {row['seconds']:>7.3f} s "
            f"{row['total']:>11,} {row['maximum']:>11,} {row['smallest']:>8} {row['smallest_in_blocks']:>9} "
            f"{row['mean']:>6.1f}"
        )
    write(arguments.out, 1, rows=rows)
    if any(row["total"] != row["maximum"] for row in rows):
        print("a total misses its maximum", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
