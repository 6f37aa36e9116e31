import math

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from torch.nn import functional as F

from pbfl_flwr.data.partition.procedures import dirichlet_indices
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.prototypes.trainable import (
    PrototypeGenerator,
    ServerTraining,
    adaptive_margin,
    initial_state,
    margin_logits,
    stack_uploads,
    train_prototypes,
)
from pbfl_flwr.testing.contract import same_tensors


def vectors_of_three_classes():
    random = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    return torch.eye(3, 6)[labels] * 4 + 0.1 * torch.randn(7, 6, generator=random), labels


def train(state, vectors, labels, seed=0, **changes):
    options = {"epochs": 5, "batch_size": 3, "learning_rate": 0.05, **changes}
    generator = torch.Generator().manual_seed(seed)
    return train_prototypes(state, vectors, labels, ServerTraining(**options), generator)


def test_generator_has_the_published_size():
    network = PrototypeGenerator(10, 6)
    assert sum(p.numel() for p in network.parameters()) == 10 * 6 + 2 * (6 * 6 + 6)
    assert network().shape == (10, 6)


def test_adaptive_margin_is_the_largest_nearest_neighbour_gap():
    # on a line at 0, 1, 4: gaps 1, 1, 3; the largest distance of all, 4, is not the margin
    means = torch.tensor([[0.0], [1.0], [4.0], [99.0]])
    present = torch.tensor([True, True, True, False])
    assert adaptive_margin(means, present, 100) == 3
    assert adaptive_margin(means, present, 2.5) == 2.5
    assert adaptive_margin(means, torch.tensor([True, False, True, False]), 100) == 4
    assert adaptive_margin(means, torch.tensor([True, False, False, False]), 100) == 100
    assert adaptive_margin(means, torch.zeros(4, dtype=torch.bool), 100) == 100
    # equation 9 of the paper as printed, the largest distance of any two classes, gives |4 - 0|
    assert adaptive_margin(means, present, 100, "farthest") == 4
    assert (
        train(initial_state(3, 1, 0), means[:3], torch.arange(3), margin="farthest")[2]["server-margin"] == 4
    )


def test_the_true_logit_is_lowered_by_exactly_the_margin():
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    prototypes = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, -2.0]])
    plain = margin_logits(vectors, prototypes, torch.tensor([0, 2]), 0.0)
    shifted = margin_logits(vectors, prototypes, torch.tensor([0, 2]), 2.0)
    # distances: 5, 1, 2 and 0, √18, √45
    torch.testing.assert_close(
        -plain, torch.tensor([[5.0, 1, 2], [0, math.sqrt(18), math.sqrt(45)]]), atol=2e-6, rtol=1e-6
    )
    torch.testing.assert_close(plain - shifted, torch.tensor([[2.0, 0, 0], [0, 0, 2]]))


def test_a_vector_on_its_prototype_has_a_finite_gradient():
    prototypes = torch.ones(2, 3, requires_grad=True)  # the squared distance 3 + 3 - 6 is exactly 0
    logits = margin_logits(torch.ones(1, 3), prototypes, torch.tensor([0]), 1.0)
    torch.autograd.backward(logits.sum())
    assert prototypes.grad is not None
    assert torch.isfinite(prototypes.grad).all()


def test_training_is_pure_and_reproducible():
    vectors, labels = vectors_of_three_classes()
    state = initial_state(4, 6, seed=1)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    torch.manual_seed(0)
    first = train(state, vectors, labels)
    torch.manual_seed(1)  # global randomness plays no part
    second = train(state, vectors, labels)
    assert same_tensors(state, copy)
    assert same_tensors(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]
    assert not torch.equal(first[1], train(state, vectors, labels, seed=2)[1])  # another order of the vectors


def test_training_separates_the_classes_and_says_when_it_has_not_converged():
    vectors, labels = vectors_of_three_classes()
    state = initial_state(3, 6, seed=0)
    short = train(state, vectors, labels, epochs=1)[2]
    assert (short["server-converged"], short["server-epochs"]) == (0, 1)
    # the margin never exceeds a nearest-neighbour gap, so the loss can fall below 1e-3 only far out
    state, prototypes, long = train(
        state, vectors * 20, labels, epochs=100, margin_cap=5.0, learning_rate=0.2
    )
    assert long["server-loss"] < 1e-3
    assert torch.equal(torch.cdist(vectors * 20, prototypes).argmin(1), labels)
    assert long == {
        "server-loss": long["server-loss"],
        "server-margin": 5.0,
        "server-converged": 1.0,
        "server-epochs": 100.0,
    }


def test_the_servers_loss_is_the_mean_over_all_vectors_also_of_an_incomplete_batch():
    # batches of 3, 3 and 1; at a learning rate of 0 the order does not matter
    vectors, labels = vectors_of_three_classes()
    _, prototypes, metrics = train(initial_state(3, 6, 0), vectors, labels, learning_rate=0.0)
    logits = margin_logits(vectors, prototypes, labels, metrics["server-margin"])
    assert metrics["server-loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_training_without_uploads_changes_nothing():
    state = initial_state(3, 6, seed=0)
    after, prototypes, metrics = train(state, torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    assert same_tensors(after, state)
    assert torch.isfinite(prototypes).all()
    assert (metrics["server-converged"], metrics["server-epochs"]) == (0, 0)


def test_both_readings_of_tinyproto_ft_on_the_published_cifar10_partition():
    # what a class's mean is multiplied by: μ·n_j for μ·|N_j| with -FP's μ, μ·n_j/|N_j| for -FT's own
    labels = np.repeat(np.arange(10), 6000)
    deal = dirichlet_indices(labels, 20, 0.1, 1, RandomState(1), 10)
    counts = [torch.from_numpy(np.bincount(labels[rows], minlength=10)) for rows in deal.rows]
    uploads = [Prototypes(n[:, None].float(), n > 0) for n in counts]  # every mean is 1
    for scale, summed, expected in ((0.00015, True, [0.9, 0.9, 0.9]), (0.001, False, [0.43, 0.63, 1.0])):
        vectors, of = stack_uploads(uploads, torch.full((10,), scale), summed)
        factors = torch.stack([vectors[of == label].mean() for label in range(10)])
        figures = torch.stack([factors.min(), factors.mean(), factors.max()])
        torch.testing.assert_close(figures, torch.tensor(expected), atol=0.005, rtol=0)


def test_rescaled_uploads_have_the_ppa_prototype_as_their_mean():
    # CPS paper, appendix: the factor (K/n)·|N_j|
    random = torch.Generator().manual_seed(3)
    uploads = []
    for _ in range(4):
        present = torch.tensor([True, False, True, True]) & (torch.rand(4, generator=random) < 0.9)
        values = torch.randn(4, 5, generator=random) * present[:, None] * 30
        uploads.append(Prototypes(values, present))
    vectors, labels = stack_uploads(uploads, torch.full((4,), 4 / 90))
    ppa = aggregation.ppa(uploads, 4, 90)
    for label in range(4):
        if ppa.present[label]:
            torch.testing.assert_close(vectors[labels == label].mean(0), ppa.values[label])
    averaged, _ = stack_uploads(uploads, torch.full((4,), 0.5), summed=False)
    aps = aggregation.aps(uploads, 0.5, "mean")
    for label in labels.unique():
        torch.testing.assert_close(averaged[labels == label].mean(0), aps.values[label])
    plain, same_labels = stack_uploads(uploads)
    assert torch.equal(labels, same_labels)
    assert torch.equal(plain[0], uploads[0].values[labels[0]])
    with pytest.raises(ValueError, match="no uploads"):
        stack_uploads([])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_training_on_a_card_is_the_cpus_within_rounding_and_gives_the_same_bits_again():
    vectors, labels = vectors_of_three_classes()
    state = initial_state(3, 6, 0)
    on_cpu, here, metrics = train(state, vectors, labels)
    on_card, there, shown = train(state, vectors, labels, device="cuda")
    assert there.device.type == "cpu"
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)
    assert shown == pytest.approx(metrics, rel=1e-3)
    again, _, _ = train(state, vectors, labels, device="cuda")
    assert same_tensors(on_card, again)
    assert not same_tensors(on_card, on_cpu)
