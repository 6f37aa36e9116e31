"""Statistics against numbers redone by hand."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import ttest_rel

from pbfl_flwr.experiments.statistics import best_decile, holm, paired, signs


def test_best_decile_takes_whole_clients() -> None:
    assert best_decile(list(np.arange(20) / 20)) == pytest.approx(
        0.925
    )  # two clients are a tenth: 0.9 and 0.95
    assert best_decile([0.25, 0.75, 0.2]) == 0.75


def test_runs_are_compared_by_a_paired_t_test_with_its_interval() -> None:
    first, second = [0.9, 0.8, 0.85], [0.8, 0.75, 0.83]
    found = paired(first, second)
    assert found.n == 3
    assert found.difference == pytest.approx(0.17 / 3)
    differences = np.subtract(first, second)
    error = differences.std(ddof=1) / 3**0.5
    reach = 4.302652729911275 * error  # 97.5 % of the t-distribution with two degrees of freedom
    assert (found.low, found.high) == pytest.approx((found.difference - reach, found.difference + reach))
    assert found.p == pytest.approx(ttest_rel(first, second).pvalue)
    t = found.difference / error
    assert found.p == pytest.approx(1 - t / (t**2 + 2) ** 0.5)  # that distribution in closed form


@pytest.mark.parametrize("first", [[0.9], [0.9, 0.7], [0.5, 0.1 + 0.2]])
def test_one_run_a_side_or_the_same_difference_everywhere_has_no_p(first: list[float]) -> None:
    """Also where differences are equal but for rounding."""
    found = paired(first, [0.5, 0.3][: len(first)])
    assert (found.n, found.low, found.high, found.p) == (len(first), None, None, None)
    assert found.difference == pytest.approx(first[0] - 0.5)


def test_differences_that_cancel_have_no_sign() -> None:
    assert paired([0.5, 0.6, 0.58], [0.56, 0.56, 0.56]).difference == 0.0


def test_signs_are_counted_without_rounding() -> None:
    assert signs([0.5, 0.1 + 0.2, 0.9, 0.1], [0.4, 0.3, 0.7, 0.2]) == (2, 1, 1)


@pytest.mark.parametrize("function", [paired, signs])
def test_values_without_a_partner_are_refused(function: Callable[[list[float], list[float]], object]) -> None:
    with pytest.raises(ValueError, match="0 values against 0: pairs are needed"):
        function([], [])
    with pytest.raises(ValueError, match="3 values against 2"):
        function([1, 2, 3], [1, 2])


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_a_method_differs_from_itself_in_five_percent(runs: int) -> None:
    """Accuracies of runs with few distinct values and some outliers; benchmarks/false_positives.py has real ones."""
    rng = np.random.default_rng(runs)
    drawn = 0.9 + rng.standard_t(4, size=(2000, 2, runs)).round(1) / 100
    found = [paired(*both).p for both in drawn]
    assert sum(p is not None and p < 0.05 for p in found) <= 0.06 * len(found)


def test_holm() -> None:
    # 3·0.01, then 2·0.02, then 0.03 which must not be below what came before
    assert holm([0.03, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
