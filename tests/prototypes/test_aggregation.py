from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Nearest
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.prototypes.stages import scale_by_counts
from tests.prototypes.tables import upload

# Class 0: both clients, class 1: the first, class 2: the second, class 3: nobody.
FIRST = upload({0: [1.0, 2.0], 1: [5.0, 5.0]}, [1, 7, 0, 0])
SECOND = upload({0: [4.0, 8.0], 2: [-1.0, 0.0]}, [2, 0, 3, 0])
UPLOADS = [FIRST, SECOND]


def scaled(one):
    return Prototypes(scale_by_counts(one.values, one.counts), one.present)


RULES = {
    "mean": aggregation.mean,
    "weighted": aggregation.weighted,
    "weighted-shrunk": aggregation.weighted_shrunk,
    "ppa": lambda uploads: aggregation.ppa(uploads, 4, 13),
    "aps-sum": lambda uploads: aggregation.aps(uploads, 0.5),
    "aps-mean": lambda uploads: aggregation.aps(uploads, 0.5, "mean"),
    "median": aggregation.coordinate_median,
    "trimmed-mean": lambda uploads: aggregation.trimmed_mean(uploads, 0.2),
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("mean", [[2.5, 5.0], [5, 5], [-1, 0], [0, 0]]),
        ("weighted", [[3, 6], [5, 5], [-1, 0], [0, 0]]),  # (1·1 + 2·4)/3, (1·2 + 2·8)/3
        ("weighted-shrunk", [[1.5, 3], [5, 5], [-1, 0], [0, 0]]),  # once more by the number of holders
        # of rows times counts, class 0: 1·(1, 2) + 2·(4, 8) = (9, 18); K/n = 4/13, and μ = 1/2
        ("ppa", [[36 / 13, 72 / 13], [140 / 13, 140 / 13], [-12 / 13, 0], [0, 0]]),
        ("aps-sum", [[4.5, 9], [17.5, 17.5], [-1.5, 0], [0, 0]]),
        ("aps-mean", [[2.25, 4.5], [17.5, 17.5], [-1.5, 0], [0, 0]]),
    ],
)
def test_rules_by_hand(name, rows):
    sent = [scaled(one) for one in UPLOADS] if name in ("ppa", "aps-sum", "aps-mean") else UPLOADS
    result = RULES[name](sent)
    torch.testing.assert_close(result.values, torch.tensor(rows).float())
    assert result.present.tolist() == [True, True, True, False]
    assert aggregation.mean_and_holders(UPLOADS)[1].tolist() == [2, 1, 1, 0]


def test_ppa_of_a_single_sample_or_of_none():
    alone = upload({2: [3.0, -1.0]})
    assert aggregation.ppa([alone], 4, 1).values[2].tolist() == [12, -4]  # K/n = 4/1
    assert aggregation.ppa([alone], 4).values[2].tolist() == [12, -4]  # no n_i came: n counts as 1
    two = replace(alone, num_examples=2)
    assert aggregation.ppa([two, two], 4).values[2].tolist() == [6, -2]  # 2·4·(3, -1)/4


def random_uploads(seed, clients, share=0.6, classes=4, width=3):
    random = torch.Generator().manual_seed(seed)
    uploads = []
    for _ in range(clients):
        present = torch.rand(classes, generator=random) < share
        values = torch.randn(classes, width, generator=random) * present[:, None]
        counts = torch.randint(1, 50, (classes,), generator=random) * present
        uploads.append(Prototypes(values, present, counts))
    return uploads


@pytest.mark.parametrize(
    ("rows", "median", "trimmed"),
    [
        ([1.0], 1.0, 1.0),
        ([1.0, 3.0], 2.0, 2.0),
        ([1.0, 2.0, 90.0], 2.0, 31.0),  # ⌊0.25·3⌋ = 0: nothing is trimmed
        ([1.0, 2.0, 4.0, 90.0], 3.0, 3.0),  # one off each side
        ([-70.0, 1.0, 2.0, 4.0, 90.0], 2.0, 7 / 3),
    ],
)
def test_robust_rules_by_hand(rows, median, trimmed):
    # an extra client that lacks class 0 must not vote with its zero row
    uploads = [upload({0: [value, -value]}) for value in rows] + [upload({1: [7.0, 7.0]})]
    for result, expected in (
        (aggregation.coordinate_median(uploads), median),
        (aggregation.trimmed_mean(uploads, 0.25), trimmed),
    ):
        torch.testing.assert_close(result.values[0], torch.tensor([expected, -expected]))
        assert result.values[1].tolist() == [7, 7]
        assert result.present.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
def test_robust_rules_withstand_a_scaled_upload(name):
    """Five clients around (1, 0) and (-1, 0); one sends -10 times its rows."""
    shifts = (-0.2, -0.1, 0.0, 0.1, 0.2)
    sent = [upload({0: [1.0, shift], 1: [-1.0, shift]}) for shift in shifts]
    scaled = [
        replace(one, values=-10 * one.values) if client == 2 else one for client, one in enumerate(sent)
    ]

    def predicts(rule, uploads):
        nearest = Nearest(RULES[rule](uploads).values, torch.tensor([True, True, False, False]))
        return nearest(torch.tensor([[1.0, 0], [-1, 0]]), torch.zeros(2, 4)).argmax(1).tolist()

    assert predicts("mean", sent) == [0, 1]
    assert predicts("mean", scaled) == [1, 0]  # (4 - 10)/5 = -1.2
    assert predicts(name, scaled) == [0, 1]


def test_trimming_counts_decimal_shares_exactly():
    # 0.29·100 is 28.999999999999996 in floating point, 29 are meant: the 42 ones remain
    uploads = [upload({0: [value, 0.0]}) for value in [0.0] * 29 + [1.0] * 42 + [900.0] * 29]
    assert aggregation.trimmed_mean(uploads, 0.29).values[0, 0] == 1


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=15)
@given(st.integers(0, 2**31 - 1), st.integers(1, 6), st.randoms(use_true_random=False))
def test_order_of_clients_does_not_matter(name, seed, clients, shuffler):
    uploads = random_uploads(seed, clients)
    first = RULES[name](uploads)
    assert torch.equal(first.values, RULES[name](list(uploads)).values)  # the same order: the same bits
    shuffler.shuffle(uploads)
    second = RULES[name](uploads)
    torch.testing.assert_close(first.values, second.values, atol=1e-6, rtol=1e-6)
    assert torch.equal(first.present, second.present)


@pytest.mark.parametrize("name", RULES)
def test_absent_classes_are_zero_rows_and_inputs_stay(name):
    before = [one.values.clone() for one in UPLOADS]
    result = RULES[name](iter(UPLOADS))  # a generator will do
    assert result.values.dtype == torch.float32
    assert torch.isfinite(result.values).all()
    assert result.present.tolist() == [True, True, True, False]
    assert result.values[3].tolist() == [0, 0]
    assert all(torch.equal(old, one.values) for old, one in zip(before, UPLOADS, strict=True))
    nobody = RULES[name]([replace(FIRST, values=torch.zeros(4, 2), present=torch.zeros(4, dtype=torch.bool))])
    assert not nobody.present.any()
    assert torch.equal(nobody.values, torch.zeros(4, 2))


@pytest.mark.parametrize("name", RULES)
def test_rows_of_absent_classes_are_never_read(name):
    dirty = replace(FIRST, values=FIRST.values.clone())
    dirty.values[3] = float("nan")
    assert torch.equal(RULES[name]([dirty, SECOND]).values, RULES[name](UPLOADS).values)


@pytest.mark.parametrize("name", RULES)
def test_no_upload_and_different_shapes_are_refused(name):
    with pytest.raises(ValueError, match="no uploads"):
        RULES[name]([])
    with pytest.raises(ValueError, match=r"shape \(4, 3\), others have \(4, 2\)"):
        RULES[name]([FIRST, replace(SECOND, values=torch.zeros(4, 3))])


@pytest.mark.parametrize("rule", [aggregation.weighted, aggregation.weighted_shrunk])
def test_weighting_needs_counts(rule):
    with pytest.raises(ValueError, match="upload 1 has no counts"):
        rule([FIRST, replace(SECOND, counts=None)])
    with pytest.raises(ValueError, match="upload 0 has a prototype with a count below 1"):
        rule([replace(FIRST, counts=torch.zeros(4, dtype=torch.int64))])


def test_bad_settings_are_named():
    with pytest.raises(PbflError, match="number of examples, which is 0"):
        aggregation.ppa(UPLOADS, 4, 0)
    with pytest.raises(ValueError, match="the uploads have 4 rows; must be num_classes = 30"):
        aggregation.ppa(UPLOADS, 30)
    with pytest.raises(PbflError, match="aps-scale is 0"):
        aggregation.aps(UPLOADS, 0)
    with pytest.raises(PbflError, match=r"trim-share is 0\.5"):
        aggregation.trimmed_mean(UPLOADS, 0.5)


def test_keep_stale_overwrites_only_what_was_sent():
    table, ages = aggregation.keep_stale(None, FIRST)
    assert ages.tolist() == [0, 0, -1, -1]
    table, ages = aggregation.keep_stale(table, SECOND, ages)
    assert table.values.tolist() == [[4, 8], [5, 5], [-1, 0], [0, 0]]
    assert table.present.tolist() == [True, True, True, False]
    assert ages.tolist() == [0, 1, 0, -1]
    table, ages = aggregation.keep_stale(table, SECOND, ages)
    assert ages.tolist() == [0, 2, 0, -1]
    table, ages = aggregation.keep_stale(table, FIRST, ages)
    assert ages.tolist() == [0, 0, 1, -1]
    assert FIRST.values.tolist() == [[1, 2], [5, 5], [0, 0], [0, 0]]
    table, ages = aggregation.keep_stale(FIRST, SECOND, torch.tensor([0, 0, -1, -1]), "drop")
    assert torch.equal(table.values, SECOND.values)
    assert torch.equal(table.present, SECOND.present)
    assert ages.tolist() == [0, -1, 0, -1]
