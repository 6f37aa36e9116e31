import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pbfl_flwr.prototypes.class_means import MOST_ROWS, ClassSums, class_means, class_sums
from tests.pretend_card import CUDA, OnCard, card

CPU = torch.device("cpu")


@given(st.integers(0, 2**31 - 1), st.integers(1, 40), st.integers(1, 5))
def test_any_batching_equals_the_loop_over_samples(seed, samples, batch):
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, 3, generator=random)
    labels = torch.randint(5, (samples,), generator=random)
    table = ClassSums(5, 3, CPU)
    for first in range(0, samples, batch):
        table.add(features[first : first + batch], labels[first : first + batch])
    values, present, counts = table.means()
    assert values.dtype == torch.float32
    assert int(counts.sum()) == samples
    for label in range(5):
        mine = [features[i].double() for i in range(samples) if int(labels[i]) == label]
        assert bool(present[label]) == bool(mine)
        assert int(counts[label]) == len(mine)
        expected = torch.stack(mine).mean(0) if mine else torch.zeros(3)
        torch.testing.assert_close(values[label], expected.float(), atol=1e-6, rtol=1e-6)


def test_half_precision_features_are_summed_wide():
    features = torch.ones(4096, 1, dtype=torch.float16)  # a float16 sum of ones sticks at 2048
    sums, counts = class_sums(features, torch.zeros(4096, dtype=torch.int64), 2)
    assert sums.dtype == torch.float32
    assert sums[0, 0] == 4096
    assert counts.tolist() == [4096, 0]


def test_many_rows_are_summed_to_the_precision_of_their_mean():
    """In float32 alone the mean of 2 million numbers around 10.5 is 10.40."""
    features = 10.5 + 0.1 * torch.randn(2_000_000, 1, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(len(features)) % 2
    sums, counts = class_sums(features, labels, 3)
    assert (sums.dtype, counts.tolist()) == (torch.float32, [1_000_000, 1_000_000, 0])
    expected = [float(features[j::2].double().mean()) for j in range(2)]
    assert class_means(sums, counts).flatten().tolist() == pytest.approx([*expected, 0.0], rel=1e-6)


def test_the_rows_of_a_batch_are_one_sum():
    """So that runs keep their bits; only more rows are chunked."""
    features = torch.randn(MOST_ROWS, 2, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(MOST_ROWS) % 3
    expected = torch.zeros(3, 2).index_add_(0, labels, features)
    assert torch.equal(class_sums(features, labels, 3)[0], expected)


def test_sums_carry_no_graph():
    features = torch.ones(2, 2, requires_grad=True)
    assert not class_sums(features, torch.tensor([0, 1]), 2)[0].requires_grad


def test_the_returned_counts_are_a_copy():
    table = ClassSums(2, 1, CPU)
    table.add(torch.ones(1, 1), torch.tensor([0]))
    counts = table.means()[2]
    table.add(torch.ones(1, 1), torch.tensor([0]))
    assert counts.tolist() == [1, 0]


def test_batches_on_a_card_are_summed_there():
    """No batch waits for a copy; one table comes back in the end."""
    features, labels = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 0])
    with card():
        table = ClassSums(3, 2, CUDA)
        for _ in range(2):
            table.add(features.to("cuda"), labels.to("cuda"))
        assert isinstance(table.sums, OnCard)
        assert isinstance(table.counts, OnCard)
        means, present, counts = table.means()
    assert not isinstance(means, OnCard)
    assert means.tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
    assert present.tolist() == [True, False, False]
    assert counts.tolist() == [4, 0, 0]
