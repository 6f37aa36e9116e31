import hashlib
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pbfl_flwr.errors import PbflError
from pbfl_flwr.prototypes.masks import allocate_masks, compress, expand


def pairwise(masks):
    """The Hamming distance of every pair."""
    return torch.pdist(masks.double(), p=0).tolist()


def largest_total(num_classes, feature_dim, size):
    """The largest total distance of K masks of s ones: r columns of load q + 1 and d - r of load q, q = ⌊Ks/d⌋."""
    q, r = divmod(num_classes * size, feature_dim)
    return (feature_dim - r) * q * (num_classes - q) + r * (q + 1) * (num_classes - q - 1)


@pytest.mark.parametrize(
    ("num_classes", "feature_dim", "size", "total"),
    [
        (10, 500, 50, 4_500),  # disjoint masks: 45 pairs · 100
        (10, 500, 250, 12_500),
        (43, 500, 50, 83_100),  # loads 4 and 5: 350·4·39 + 150·5·38
        (100, 500, 50, 450_000),
        (102, 500, 50, 468_100),
        (200, 500, 50, 1_800_000),
        (200, 500, 250, 5_000_000),
        (6, 2, 1, 18),  # 3 masks each way: 3·3 pairs · 2
    ],
)
def test_totals_are_the_maximum(num_classes, feature_dim, size, total):
    masks = allocate_masks(num_classes, feature_dim, size, seed=0, swaps=100)
    assert largest_total(num_classes, feature_dim, size) == total
    assert sum(pairwise(masks)) == total


@pytest.mark.parametrize(
    ("num_classes", "dealt_and_published"),
    [(43, 0), (100, 74), (200, 72)],  # 74 and 72: a balanced deal without orbits and swaps
)
def test_smallest_distance_beats_a_plain_deal(num_classes, dealt_and_published):
    masks = allocate_masks(num_classes, 500, 50, seed=1)
    assert min(pairwise(masks)) >= max(dealt_and_published + 10, 84)


def test_block_codes_beat_the_greedy_search():
    # K = 200, d = 500: blocks of 2, p = 20 of 200 blocks; the published greedy search ended at 26 blocks
    masks = allocate_masks(200, 500, 50, scheme="block", seed=0)
    assert min(pairwise(masks)) >= 32 * 2


@settings(max_examples=60)
@given(st.integers(2, 24), st.integers(1, 24), st.data())
def test_every_allocation_is_balanced_and_maximal(num_classes, feature_dim, data):
    size = data.draw(st.integers(1, feature_dim))
    masks = allocate_masks(num_classes, feature_dim, size, seed=data.draw(st.integers(0, 99)), swaps=30)
    assert masks.shape == (num_classes, feature_dim)
    assert masks.dtype == torch.bool
    assert masks.sum(1).tolist() == [size] * num_classes
    loads = masks.sum(0)
    assert int(loads.max() - loads.min()) <= 1
    distances = pairwise(masks)
    assert sum(distances) == largest_total(num_classes, feature_dim, size)
    if math.comb(feature_dim, size) >= num_classes:
        assert min(distances) > 0


@pytest.mark.parametrize(
    ("num_classes", "feature_dim", "size"),
    [(10, 5, 2), (20, 6, 3), (35, 7, 3), (34, 7, 3), (70, 8, 4), (69, 8, 4), (6, 6, 5), (5, 6, 1)],
)
def test_distinct_masks_even_when_every_subset_is_needed(num_classes, feature_dim, size):
    for seed in range(2):
        masks = allocate_masks(num_classes, feature_dim, size, seed=seed)
        assert len(masks.unique(dim=0)) == num_classes
        assert sum(pairwise(masks)) == largest_total(num_classes, feature_dim, size)


def test_swaps_never_lower_the_smallest_distance():
    for num_classes, feature_dim, size in [(60, 40, 8), (30, 50, 9), (128, 128, 13)]:
        plain = allocate_masks(num_classes, feature_dim, size, seed=0, swaps=0)
        spread = allocate_masks(num_classes, feature_dim, size, seed=0, swaps=1000)
        assert min(pairwise(spread)) >= min(pairwise(plain))
        assert sum(pairwise(spread)) == sum(pairwise(plain))


def test_the_seed_alone_decides():
    torch.manual_seed(1)
    first = allocate_masks(43, 100, 10, seed=7)
    torch.manual_seed(2)
    assert torch.equal(first, allocate_masks(43, 100, 10, seed=7))
    assert not torch.equal(first, allocate_masks(43, 100, 10, seed=8))


@pytest.mark.parametrize(
    ("num_classes", "feature_dim", "size", "scheme", "digest"),
    [
        (
            10,
            64,
            23,
            "dimension",
            "29b5d2a293ef",
        ),  # orbits of 4 and 3 rows, one fewer than fit; 14 columns dealt
        (24, 60, 9, "dimension", "4164972113ca"),  # as many orbits as fit
        (5, 7, 3, "dimension", "fb0c2dd31131"),
        (30, 12, 4, "dimension", "ffa031b61ebd"),  # more classes than dimensions: all dealt, then swaps
        (20, 6, 3, "dimension", "60c1926c6a9a"),  # every subset is needed: the unused ones are listed
        (60, 24, 2, "dimension", "42168de98dff"),  # 276 subsets are more than 4·60: the unused ones are drawn
        (30, 16, 2, "dimension", "8e5fe53ce1c8"),  # 120 subsets are 4·30: listed
        (20, 64, 16, "block", "ff515ec8f24c"),
    ],
)
def test_masks_of_a_seed_never_change(num_classes, feature_dim, size, scheme, digest):
    masks = allocate_masks(num_classes, feature_dim, size, scheme=scheme, seed=5)
    bits = "".join(str(int(bit)) for bit in masks.flatten())
    assert hashlib.sha256(bits.encode()).hexdigest()[:12] == digest


@pytest.mark.parametrize(
    ("num_classes", "size", "expected", "unused"),
    [(43, 50, 44, 27), (102, 50, 40, 92), (200, 50, 40, 100), (200, 250, 200, 100), (10, 50, 50, 0)],
)
def test_block_scheme_has_the_effective_size_of_the_published_code(num_classes, size, expected, unused):
    masks = allocate_masks(num_classes, 500, size, scheme="block", seed=0, swaps=50)
    assert set(masks.sum(1).tolist()) == {expected}
    width = 500 // num_classes
    used = num_classes * width
    assert 500 - used == unused
    assert not masks[:, used:].any()
    blocks = masks[:, :used].reshape(num_classes, num_classes, width)
    assert torch.equal(blocks.all(2), blocks.any(2))  # a block is used as a whole
    assert set(blocks.any(2).sum(0).tolist()) == {expected // width}  # every block by p classes


def test_bad_sizes_are_named():
    with pytest.raises(PbflError, match=r"cps-dim is 0; must be 1\.\.8"):
        allocate_masks(4, 8, 0, seed=0)
    with pytest.raises(PbflError, match=r"cps-dim is 9; must be 1\.\.8"):
        allocate_masks(4, 8, 9, seed=0)
    with pytest.raises(PbflError, match="9 classes and feature-dim is 8"):
        allocate_masks(9, 8, 4, scheme="block", seed=0)
    with pytest.raises(PbflError, match=r"cps-dim is 1, smaller than one of the 4 blocks .* 2\.\.8"):
        allocate_masks(4, 8, 1, scheme="block", seed=0)
    assert int(allocate_masks(4, 8, 2, scheme="block", seed=0).sum()) == 4 * 2


def test_masks_of_unequal_sizes_are_not_compressed():
    """4 entries would otherwise be taken for 2 rows of 2."""
    masks = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    with pytest.raises(ValueError, match="masks have 1 to 3 ones a row; must have equally many"):
        compress(torch.arange(8.0).reshape(2, 4), masks)


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 99), st.data())
@example(3, 5, 0, None)
def test_compress_and_expand_are_inverses_on_the_support(num_classes, feature_dim, seed, data):
    size = data.draw(st.integers(1, feature_dim)) if data else 2
    masks = allocate_masks(num_classes, feature_dim, size, seed=seed)
    values = torch.randn(num_classes, feature_dim, generator=torch.Generator().manual_seed(seed))
    rows = compress(values, masks)
    assert rows.shape == (num_classes, size)
    for j in range(num_classes):
        assert torch.equal(rows[j], values[j][masks[j]])
    assert torch.equal(expand(rows, masks), values * masks)
    assert torch.equal(compress(expand(rows, masks), masks), rows)
