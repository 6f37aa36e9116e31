"""Statistics against numbers redone by hand."""

from itertools import product

import numpy as np
import pytest

from pbfl_flwr.experiments import statistics
from pbfl_flwr.experiments.statistics import fairness, holm, paired, spread


def test_spread_over_seeds() -> None:
    found = spread([1.0, 2.0, 6.0])  # mean 3, squares 4 + 1 + 9 = 14, over n - 1 = 2
    assert (found.mean, found.n) == (3.0, 3)
    assert found.deviation == pytest.approx(7**0.5)
    assert spread([4.0]).deviation == 0.0


def test_fairness_takes_whole_clients() -> None:
    found = fairness(np.arange(20.0) / 20)  # 0, 0.05, .., 0.95: two clients are a tenth
    assert (found.lowest, found.n) == (0.0, 20)
    assert found.worst_decile == pytest.approx(0.025)
    assert found.best_decile == pytest.approx(0.925)
    assert found.deviation == pytest.approx(0.05 * (399 / 12) ** 0.5)  # of 0..n-1: sqrt((n² - 1)/12)
    alone = fairness([0.25, 0.75])
    assert (alone.worst_decile, alone.best_decile, alone.deviation) == (0.25, 0.75, 0.25)


def test_wilcoxon_against_all_signs() -> None:
    first, second = (
        np.array([0.9, 0.8, 0.85, 0.7, 0.3, 0.6, 0.5]),
        np.array([0.8, 0.6, 0.55, 0.3, 0.35, 0.0, 0.0]),
    )
    ranks = np.array([2, 3, 4, 5, 1, 7, 6])  # of |0.1, 0.2, 0.3, 0.4, -0.05, 0.6, 0.5|
    low = 1  # the rank of the only negative one
    totals = [ranks[np.array(signs) < 0].sum() for signs in product((-1, 1), repeat=7)]
    found = paired(first, second)
    assert found.p == pytest.approx(2 * np.mean(np.array(totals) <= low))
    assert (found.n, found.better, found.worse, found.equal) == (7, 6, 1, 0)
    assert found.smallest_p == 2 / 2**7
    assert not found.too_few


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
    assert paired([0.9], [0.5]).low is None
    alike = paired([0.5, 0.1 + 0.2], [0.5, 0.3])
    assert (alike.p, alike.equal, alike.too_few) == (None, 2, True)
    # Clients that do not differ carry no sign: five of seven differ, so p is at least 2/2⁵.
    assert paired([1, 2, 3, 4, 5, 6, 7], [1, 2, 0, 0, 0, 0, 0]).smallest_p == 0.0625
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
