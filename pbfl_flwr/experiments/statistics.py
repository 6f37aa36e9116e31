"""What can be said about accuracies: over seeds, over clients, and of two methods on the same clients.

Pure functions on numbers; who reads run directories calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
RESAMPLES = 10_000
DRAWN_AT_A_TIME = 2**20  # pairs in memory


@dataclass(frozen=True)
class Spread:
    """Mean and deviation of repetitions.

    Attributes:
        mean: of the values.
        deviation: sample deviation (n - 1 in the denominator), 0 with one value.
        n: how many values.
    """

    mean: float
    deviation: float
    n: int


def spread(values: ArrayLike) -> Spread:
    """Return mean and sample deviation, e.g. over seeds.

    Args:
        values: (n,), n >= 1.
    """
    array = np.asarray(values, dtype=float)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else 0.0, int(array.size))


@dataclass(frozen=True)
class Fairness:
    """How evenly clients are served; in the unit of the accuracies.

    Attributes:
        mean: plain mean over clients.
        deviation: population deviation over clients (0 is perfectly even).
        lowest: the worst client.
        worst_decile: mean of the worst tenth of the clients, at least one.
        best_decile: mean of the best tenth, at least one.
        n: clients.
    """

    mean: float
    deviation: float
    lowest: float
    worst_decile: float
    best_decile: float
    n: int


def fairness(accuracies: ArrayLike) -> Fairness:
    """Return how even the clients' accuracies (M,) are, M >= 1."""
    each = np.sort(np.asarray(accuracies, dtype=float))
    tenth = max(1, each.size // 10)
    return Fairness(
        float(each.mean()),
        float(each.std()),
        float(each[0]),
        float(each[:tenth].mean()),
        float(each[-tenth:].mean()),
        int(each.size),
    )


@dataclass(frozen=True)
class Paired:
    """Two methods on the same units, a client or a seed each.

    Attributes:
        n: pairs.
        difference: mean of first minus second.
        low, high: percentile bootstrap interval of that mean; None with fewer than two pairs.
        p: two-sided Wilcoxon signed-rank; None where no pair differs.
        smallest_p: what p would be if every pair that differs agreed on the sign: no such data can give less.
        better, worse, equal: pairs in which the first is above, below, equal.
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
        """Whether no outcome of the test could have reached p < 1 - CONFIDENCE: then it says nothing."""
        return self.smallest_p >= 1 - CONFIDENCE


def paired(first: ArrayLike, second: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> Paired:
    """Compare two methods pair by pair.

    Args:
        first: (n,) accuracies of one method, n >= 1.
        second: (n,) of the other, on the same clients or seeds in the same order.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Raises:
        ValueError: if the two have not the same length.
    """
    from scipy.stats import wilcoxon

    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != other.shape:
        raise ValueError(f"{one.size} values against {other.size}: pairs are needed")
    # Shares of correct samples that are equal may differ in their last bit.
    differences = np.where(np.isclose(one, other, rtol=0, atol=1e-12), 0.0, one - other)
    differing = int(np.count_nonzero(differences))
    low = high = None
    if differences.size > 1:
        rng, n, tail = np.random.default_rng(seed), differences.size, 50 * (1 - CONFIDENCE)
        at_a_time = max(1, DRAWN_AT_A_TIME // n)
        means = [
            differences[rng.integers(n, size=(min(at_a_time, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, at_a_time)
        ]
        low, high = map(float, np.percentile(np.concatenate(means), [tail, 100 - tail]))
    p = float(wilcoxon(differences).pvalue) if differing else None
    return Paired(
        int(differences.size),
        float(differences.mean()),
        low,
        high,
        p,
        2.0 ** (1 - differing) if differing else 1.0,
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        int((differences == 0).sum()),
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for their number (Holm's step-down); None stays and does not count."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted
