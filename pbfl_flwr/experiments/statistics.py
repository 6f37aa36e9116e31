"""Statistics of accuracies: over clients, and of two methods' runs.

Pure functions on numbers; they read no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbfl_flwr.util.extras import require

CONFIDENCE = 0.95
DECIMALS = 12  # of differences and their mean: equal accuracies differ by rounding, others by far more


def best_decile(accuracies: Sequence[float]) -> float:
    """Return the mean of the best tenth of the clients' accuracies (M,), M >= 1; at least one client."""
    each = sorted(accuracies)
    return fmean(each[-max(1, len(each) // 10) :])


@dataclass(frozen=True)
class Paired:
    """Comparison of two methods by their runs.

    Attributes:
        n: number of pairs of runs.
        difference: mean of first minus second.
        low, high: confidence interval of that mean, by the t-distribution.
        p: of the two-sided paired t-test. Interval and p are None with one pair, or if all pairs differ by the same.
    """

    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None


def paired(first: ArrayLike, second: ArrayLike) -> Paired:
    """Compare two methods on runs that have the seed and the partition in common.

    Args:
        first: (n,) accuracies of one method, n >= 1: one per run, or per partition the mean of its runs.
        second: (n,) accuracies of the other, in the same order.

    Raises:
        ValueError: if the lengths differ or are 0.
    """
    differences = _differences(first, second)
    mean, low, high, p = round(float(differences.mean()), DECIMALS), None, None, None
    if np.ptp(differences):
        require("a comparison of runs", "scipy")
        from scipy.stats import ttest_1samp  # takes seconds, which commands that only read need not wait for

        found = ttest_1samp(differences, 0.0)
        low, high = map(float, found.confidence_interval(CONFIDENCE))
        p = float(found.pvalue)
    return Paired(int(differences.size), mean, low, high, p)


def signs(first: ArrayLike, second: ArrayLike) -> tuple[int, int, int]:
    """Return in how many of (n,) pairs the first is higher, equal and lower.

    Raises:
        ValueError: if the lengths differ or are 0.
    """
    differences = _differences(first, second)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    return better, int(differences.size) - better - worse, worse


def _differences(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != other.shape or not one.size:
        raise ValueError(f"{one.size} values against {other.size}: pairs are needed")
    differences: NDArray[np.float64] = np.round(one - other, DECIMALS)
    return differences


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for multiple comparisons (Holm's step-down); None stays None and is not counted."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted
