"""Statistics against numbers redone by hand."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import rankdata, wilcoxon

from pbfl_flwr.experiments import statistics
from pbfl_flwr.experiments.statistics import EXACT_PAIRS, best_decile, holm, paired, signed_rank


def test_best_decile_takes_whole_clients() -> None:
    assert best_decile(list(np.arange(20) / 20)) == pytest.approx(
        0.925
    )  # two clients are a tenth: 0.9 and 0.95
    assert best_decile([0.25, 0.75, 0.2]) == 0.75


def counted(differences: NDArray[np.int64]) -> float:
    """p by every assignment of signs to the ranks of whole numbers that are not 0."""
    ranks = rankdata(np.abs(differences))
    signs = np.array(list(product((0, 1), repeat=differences.size)))
    totals, found = signs @ ranks, ranks[differences > 0].sum()
    return min(1.0, 2 * min(float(np.mean(totals <= found)), float(np.mean(totals >= found))))


@pytest.mark.parametrize("seed", range(40))
def test_wilcoxon_with_ties_and_zeros_against_all_signs(seed: int) -> None:
    """Clients with 20 test samples: differences are few numbers, which their shares hold with rounding noise."""
    rng = np.random.default_rng(seed)
    correct = rng.integers(0, 21, size=(2, rng.integers(2, 14)))
    if seed % 4 == 0:
        correct[1] = np.minimum(20, correct[0] + rng.integers(0, 4, size=correct.shape[1]))
    shares, differences = correct / 20, correct[0] - correct[1]
    differing = differences[differences != 0]
    found = paired(*shares, resamples=1)
    signs = [int((np.sign(differences) == sign).sum()) for sign in (1, 0, -1)]
    assert (found.n, [found.better, found.equal, found.worse]) == (differences.size, signs)
    if differing.size:
        assert found.p == pytest.approx(counted(differing))
        assert found.smallest_p == counted(np.abs(differing))
        assert found.p is not None
        assert found.p >= found.smallest_p
    else:
        assert (found.p, found.smallest_p) == (None, 1.0)


def test_rounding_breaks_no_ties() -> None:
    first = np.array([12, 14, 11, 17, 11, 12, 18, 15, 8, 11, 8, 17]) / 20
    second = np.array([9, 13, 11, 20, 12, 15, 20, 18, 9, 13, 11, 18]) / 20
    # The ranks of 1, 2 and 3 twentieths are 2.5, 5.5 and 9. Told apart by noise they had p = 0.027.
    assert paired(first, second).p == 0.0625
    thirds = np.array([1 / 3, 2 / 3, 1.0, 0.1 + 0.2, 0.7, 0.6])  # means over seeds
    assert paired(thirds + 0.1, thirds).p == 2 / 2**6
    assert paired(thirds + 0.1, thirds).p == signed_rank(np.ones(6))


def test_equal_pairs_bring_no_p_below_the_smallest() -> None:
    differences = np.r_[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, np.zeros(10)]
    found = paired(differences, np.zeros(16))
    assert (found.p, found.smallest_p) == (2 / 2**6, 2 / 2**6)  # the normal distribution would have 0.028


@pytest.mark.parametrize("count", [1, 2, 30, EXACT_PAIRS, EXACT_PAIRS + 1, 300])
def test_wilcoxon_against_scipy_where_it_counts_the_same(count: int) -> None:
    rng = np.random.default_rng(count)
    method: Any = "exact" if count <= EXACT_PAIRS else "asymptotic"
    untied = rng.normal(0.2, 1, size=count)
    assert signed_rank(untied) == pytest.approx(wilcoxon(untied, method=method).pvalue, rel=1e-9)
    if count > EXACT_PAIRS:
        tied = rng.integers(1, 5, size=count) * rng.choice([-1.0, 1.0], size=count)
        assert signed_rank(tied) == pytest.approx(wilcoxon(tied, method=method).pvalue, rel=1e-9)
        found = paired(np.abs(tied), np.zeros(count), resamples=1)
        assert found.p == found.smallest_p > 0


def test_the_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.random(200) + 0.1, rng.random(200)
    found, again = paired(first, second), paired(first, second)
    assert found == again
    assert found.low is not None
    assert found.high is not None
    error = (first - second).std() / 200**0.5  # of the mean: the interval is near ±1.96 of it
    assert found.low == pytest.approx(found.difference - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.difference + 1.96 * error, abs=0.15 * error)


def test_few_pairs_say_that_they_say_nothing() -> None:
    three = paired([0.9, 0.8, 0.7], [0.5, 0.4, 0.2])
    assert (three.smallest_p, three.too_few) == (0.25, True)
    assert [paired(np.arange(1, n), np.zeros(n - 1)).too_few for n in (6, 7)] == [True, False]  # 2/2⁵, 2/2⁶
    assert paired([0.9], [0.5]).low is None
    alike = paired([0.5, 0.1 + 0.2], [0.5, 0.3])
    assert (alike.p, alike.equal, alike.too_few) == (None, 2, True)
    # Clients that do not differ carry no sign: five of seven differ, so p is at least 2/2⁵.
    assert paired([1, 2, 3, 4, 5, 6, 7], [1, 2, 0, 0, 0, 0, 0]).smallest_p == 0.0625
    with pytest.raises(ValueError, match="0 values against 0: pairs are needed"):
        paired([], [])
    with pytest.raises(ValueError, match="3 values against 2"):
        paired([1, 2, 3], [1, 2])


def test_holm() -> None:
    # 3·0.01, then 2·0.02, then 0.03 which must not be below what came before
    assert holm([0.03, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_bootstrap_draws_the_same_however_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    first, second = rng.random(31), rng.random(31)
    found = paired(first, second)
    drawn = np.random.default_rng(0).integers(31, size=(10_000, 31))
    means = (first - second)[drawn].mean(axis=1)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    monkeypatch.setattr(statistics, "DRAWN_AT_A_TIME", 100)  # three resamples
    assert paired(first, second) == found
