import pytest
import torch

from pbfl_flwr.methods.gfpl.etf import dot_regression, equiangular_frame, frame_scores, projection_layer


@pytest.mark.parametrize(("K", "d"), [(2, 2), (2, 7), (10, 10), (10, 50), (62, 80)])
def test_inner_products_are_those_of_a_simplex(K, d):
    Z = equiangular_frame(K, d, seed=1)
    # Eq. 3: K/(K-1)·[i = j] - 1/(K-1)
    expected = K / (K - 1) * torch.eye(K) - 1 / (K - 1)
    assert Z.shape == (d, K)
    torch.testing.assert_close(Z.T @ Z, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(Z.sum(1), torch.zeros(d), atol=1e-5, rtol=0)


def test_loss_is_the_batch_mean_and_zero_at_the_frame():
    Z = equiangular_frame(4, 6, 0)
    labels = torch.tensor([0, 3, 3])
    assert dot_regression(7 * Z.T[labels], labels, Z).item() == pytest.approx(0, abs=1e-12)
    # Projections on the vector of another class: ½·(-1/3 - 1)² = 8/9; half of the batch.
    wrong = torch.stack([Z[:, 0], Z[:, 1]])
    assert dot_regression(wrong, torch.tensor([0, 2]), Z).item() == pytest.approx(4 / 9, rel=1e-5)


def test_scores_are_cosines_and_zero_vectors_have_finite_gradients():
    Z = equiangular_frame(3, 4, 0)
    scores = frame_scores(torch.stack([5 * Z[:, 1], torch.zeros(4)]), Z)
    torch.testing.assert_close(scores, torch.tensor([[-0.5, 1.0, -0.5], [0, 0, 0]]), atol=1e-6, rtol=0)
    zero = torch.zeros(1, 4, requires_grad=True)
    dot_regression(zero, torch.tensor([0]), Z).backward()
    assert zero.grad is not None
    assert bool(torch.isfinite(zero.grad).all())


def test_projection_starts_from_its_seed_or_its_stored_weights():
    state = torch.get_rng_state()
    first = projection_layer(5, 3, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(projection_layer(5, 3, {}).weight, first.weight)
    assert not torch.equal(projection_layer(5, 4, {}).weight, first.weight)
    kept = {"weight": torch.eye(5), "bias": torch.ones(5)}
    assert torch.equal(projection_layer(5, 3, kept)(torch.zeros(1, 5)), torch.ones(1, 5))
