"""Statistics of accuracies: over seeds, over clients, and paired between two methods.

Pure functions on numbers; they read no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
DRAWN_AT_A_TIME = 2**20  # bootstrap draws in memory at a time
DECIMALS = 12  # of differences: equal accuracies may differ by rounding, different ones differ by far more
EXACT_PAIRS = 50  # largest n of the exact test; 2⁵⁰ is exact in float64


def best_decile(accuracies: Sequence[float]) -> float:
    """Return the mean of the best tenth of the clients' accuracies (M,), M >= 1; at least one client."""
    each = sorted(accuracies)
    return fmean(each[-max(1, len(each) // 10) :])


@dataclass(frozen=True)
class Paired:
    """Comparison of two methods on paired units (clients or seeds).

    Attributes:
        n: number of pairs.
        difference: mean of first minus second.
        low, high: percentile bootstrap interval of that mean; None with fewer than two pairs.
        p: two-sided Wilcoxon signed-rank test on the pairs that differ, see :func:`signed_rank`; None if none does.
        smallest_p: p if all pairs that differ had the same sign, the lowest value possible with these sizes.
        better, worse, equal: number of pairs in which the first is higher, lower, equal.
    """

    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    smallest_p: float
    better: int
    worse: int
    equal: int

    @property
    def too_few(self) -> bool:
        """Whether the test cannot reach p < 1 - CONFIDENCE with so few pairs, so that it is not informative."""
        return self.smallest_p >= 1 - CONFIDENCE


def paired(first: ArrayLike, second: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> Paired:
    """Compare two methods on paired values.

    Args:
        first: (n,) accuracies of one method, n >= 1.
        second: (n,) accuracies of the other, on the same clients or seeds in the same order.
        seed: of the bootstrap.
        resamples: number of bootstrap resamples.

    Raises:
        ValueError: if the lengths differ or are 0.
    """
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != other.shape or not one.size:
        raise ValueError(f"{one.size} values against {other.size}: pairs are needed")
    differences = np.round(one - other, DECIMALS)
    differing = differences[differences != 0]
    low = high = None
    if differences.size > 1:
        rng, n, tail = np.random.default_rng(seed), differences.size, 50 * (1 - CONFIDENCE)
        at_a_time = max(1, DRAWN_AT_A_TIME // n)
        means = [
            differences[rng.integers(n, size=(min(at_a_time, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, at_a_time)
        ]
        low, high = map(float, np.percentile(np.concatenate(means), [tail, 100 - tail]))
    return Paired(
        int(differences.size),
        float(differences.mean()),
        low,
        high,
        signed_rank(differing) if differing.size else None,
        signed_rank(np.abs(differing)),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        int((differences == 0).sum()),
    )


def signed_rank(differences: NDArray[np.float64]) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test, 1 for no differences.

    Ties get their mean rank. Up to EXACT_PAIRS differences, p is exact: it enumerates all sign assignments to these
    ranks. Beyond, it is the normal approximation with the variance of these ranks and no continuity correction.

    Args:
        differences: (n,), none of them 0.
    """
    if not differences.size:
        return 1.0
    from scipy.stats import rankdata  # takes seconds, which commands that only read need not wait for

    ranks = (2 * rankdata(np.abs(differences.round(DECIMALS)))).astype(int)  # whole numbers, also of ties
    positive, total = int(ranks[differences > 0].sum()), int(ranks.sum())
    smaller = min(positive, total - positive)
    if differences.size > EXACT_PAIRS:
        return math.erfc((total / 2 - smaller) / math.sqrt(float((ranks**2).sum()) / 2))
    ways = np.zeros(total + 1)  # number of sign assignments per sum of doubled ranks
    ways[0] = 1
    for rank in ranks:
        ways[rank:] = ways[rank:] + ways[:-rank]
    return min(1.0, 2 * float(ways[: smaller + 1].sum()) / 2.0**differences.size)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for multiple comparisons (Holm's step-down); None stays None and is not counted."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted
