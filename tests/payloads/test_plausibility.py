"""Which uploads are too large to be honest: rows, tensors and counts, with few and with many clients."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbfl_flwr.payloads.contract import Magnitudes
from pbfl_flwr.payloads.plausibility import COMPARABLE, LARGEST, LEAST, Plausibility

LIMITS = Plausibility(100.0)
REPORTED = dict.fromkeys(range(6), 50)


def implausible(*sizes: Magnitudes, limits: Plausibility = LIMITS) -> dict[int, str]:
    return limits.implausible(dict(enumerate(sizes)), REPORTED)


def rows(*values: float) -> Magnitudes:
    """A value for every class; 0 for one that the client does not hold."""
    return Magnitudes({label: value for label, value in enumerate(values) if value})


def test_names_the_row_that_is_far_above_the_median_of_its_class() -> None:
    assert implausible(rows(1, 2), rows(2, 2), rows(3, 201), rows(2, 199)) == {
        2: "its row of class 1 has the size 201, it must be at most 200 (max-size-ratio)"
    }


def test_compares_a_class_of_few_clients_with_the_other_classes() -> None:
    assert list(implausible(rows(2), rows(2), rows(2, 0, 500), rows(0, 30))) == [2]


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_one_of_three_clients_cannot_make_the_others_implausible(size: float) -> None:
    assert set(implausible(rows(1, 5), rows(2, 3), rows(size, size))) <= {2}


def test_vanishing_features_of_most_clients_leave_the_others_plausible() -> None:
    assert implausible(rows(1e-9), rows(1e-9), rows(1e-9), rows(9)) == {}


def test_two_clients_have_an_absolute_bound() -> None:
    assert implausible(rows(1), rows(LARGEST)) == {}
    assert list(implausible(rows(1), rows(LARGEST * 1.1))) == [1]


def test_compares_every_tensor_with_itself() -> None:
    sizes = [Magnitudes(tensors={"body": 1.0, "bias": bias}) for bias in (0.0, 0.2, 0.3, 90.0)]
    assert list(implausible(*sizes)) == [3]


def test_more_samples_than_reported_are_implausible_unless_each_draw_counts() -> None:
    sizes = [Magnitudes(samples=n) for n in (50, 51)]
    assert implausible(*sizes) == {1: "it counts 51 samples, its report 50"}
    assert implausible(*(replace(size, once=False) for size in sizes)) == {}


def test_more_than_a_thousand_times_the_usual_number_of_samples_is_implausible() -> None:
    most, more = ([Magnitudes(samples=n, once=False) for n in (20, 30, 40, n)] for n in (30_000, 30_001))
    assert implausible(*most, limits=Plausibility(100.0)) == {}
    assert list(implausible(*more, limits=Plausibility(100.0))) == [3]


def test_of_rows_scaled_by_counts_only_the_sums_are_compared() -> None:
    scaled = Plausibility(100.0, scaled=True)
    uneven = [rows(500, 1), rows(1, 500), rows(1, 499), rows(2, 400)]
    assert implausible(*uneven, limits=scaled) == {}
    assert list(implausible(*uneven, rows(1, 600_000), limits=scaled)) == [4]


def test_a_client_with_five_times_the_samples_has_a_plausible_sum() -> None:
    strict, usual = Plausibility(2.0, scaled=True), [rows(10)] * 3
    assert implausible(*usual, rows(50), limits=strict) == {}
    assert implausible(*usual, rows(200), limits=strict) == {}
    assert list(implausible(*usual, rows(201), limits=strict)) == [3]


def test_a_ratio_of_zero_accepts_everything() -> None:
    assert Plausibility().implausible({0: rows(1e30), 1: Magnitudes(samples=9)}, {0: 0, 1: 0}) == {}


SIZES = st.floats(0, 1e38, allow_subnormal=True)
ANYTHING = st.builds(
    Magnitudes,
    st.dictionaries(st.integers(0, 3), SIZES, max_size=4),
    st.dictionaries(st.sampled_from(["a", "b"]), SIZES, max_size=2),
    st.integers(0, 2**40),
)
HONEST = st.builds(
    Magnitudes,
    st.dictionaries(st.integers(0, 3), st.floats(0.5, 20), min_size=1, max_size=4),
    st.fixed_dictionaries({"a": st.floats(0.1, 3), "b": st.floats(0, 0.5)}),
    st.integers(1, 50),
)


@given(st.lists(HONEST, min_size=4, max_size=4), ANYTHING, st.booleans())
@settings(max_examples=300)
def test_one_of_five_clients_is_bounded_and_does_not_exclude_the_others(
    honest: list[Magnitudes], anything: Magnitudes, scaled: bool
) -> None:
    limits = Plausibility(100.0, scaled)
    result = implausible(*honest, anything, limits=limits)
    assert set(result) <= {4}
    if not result:
        most = max(max(size.rows.values()) for size in honest)
        assert anything.samples <= 50
        for name, sent in anything.tensors.items():
            others = [size.tensors[name] for size in honest if size.tensors[name]]
            assert sent <= (100 * max(LEAST, *others) if len(others) >= COMPARABLE - 1 else LARGEST)
        largest_sum = max(sum(size.rows.values()) for size in honest)
        bound = 1000 * largest_sum if scaled else 100 * most
        assert max(anything.rows.values(), default=0) <= bound
