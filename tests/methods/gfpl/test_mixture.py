import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.mixture import GaussianMixture

from pbfl_flwr.methods.gfpl import mixture
from pbfl_flwr.methods.gfpl.mixture import (
    STD_FLOOR,
    MixtureState,
    bhattacharyya,
    clusters,
    fit_mixtures,
    fuse,
    sample,
)
from pbfl_flwr.methods.gfpl.payload import Mixtures
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.task import Task

TASK = Task(num_classes=4, feature_dim=2, input_shape=(1,))


def components(*rows):
    """Mixtures of rows (label, weight, means, stds)."""
    labels, weights, means, stds = zip(*rows, strict=True)
    return Mixtures(
        torch.tensor(labels),
        torch.tensor(weights, dtype=torch.float32),
        torch.tensor(means, dtype=torch.float32),
        torch.tensor(stds, dtype=torch.float32),
    )


def drawn(count, width, seed, classes=1):
    random = torch.Generator().manual_seed(seed)
    return Mixtures(
        torch.randint(0, classes, (count,), generator=random),
        torch.rand(count, generator=random) * 9 + 1,
        torch.randn(count, width, generator=random),
        torch.rand(count, width, generator=random) + 0.1,
    )


def moments(mixtures):
    """(weight, mean, diagonal second moment) of all components together, in float64."""
    w, mean, std = (t.double() for t in (mixtures.weights, mixtures.means, mixtures.stds))
    return w.sum(), w @ mean / w.sum(), w @ (std**2 + mean**2) / w.sum()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


# Distance ---------------------------------------------------------------------------------------------------


def full_matrix_distance(mean_a, std_a, mean_b, std_b):
    """Eq. 8 as printed, with full covariance matrices."""
    A, B = np.diag(std_a**2), np.diag(std_b**2)
    S = (A + B) / 2
    shift = mean_a - mean_b
    quadratic = shift @ np.linalg.inv(S) @ shift / 8
    return quadratic + 0.5 * np.log(np.linalg.det(S) / np.sqrt(np.linalg.det(A) * np.linalg.det(B)))


def test_distance_equals_the_printed_formula_on_full_matrices():
    random = np.random.default_rng(0)
    means, stds = random.normal(size=(7, 2)), random.uniform(0.2, 2, (7, 2))
    others, spreads = random.normal(size=(5, 2)), random.uniform(0.2, 2, (5, 2))
    result = bhattacharyya(means, stds, others, spreads)
    assert result.shape == (7, 5)
    assert result.dtype == np.float64
    for i, j in itertools.product(range(7), range(5)):
        expected = full_matrix_distance(means[i], stds[i], others[j], spreads[j])
        assert result[i, j] == pytest.approx(expected, rel=1e-12)


def test_distance_of_points_is_that_of_floored_deviations():
    point = np.zeros((1, 3))
    assert bhattacharyya(point, point, point, point) == pytest.approx(0)
    # ‖shift‖² / (8·floor²) = 3·10⁻⁶ / (8·10⁻⁶)
    assert bhattacharyya(point, point, point + STD_FLOOR, point).item() == pytest.approx(3 / 8)


# Clusters ---------------------------------------------------------------------------------------------------


def literal_clusters(close):
    """Algorithm 1, lines 2 to 11, line by line; the seed is the first of U."""
    U, result = list(range(len(close))), []
    while U:
        current = [U.pop(0)]
        while True:
            N = [p for p in U if all(close[p, q] for q in current)]
            if not N:
                break
            current += N
            U = [p for p in U if p not in N]
        result.append(current)
    return result


@given(st.integers(0, 100_000), st.integers(0, 9), st.floats(0, 3))
def test_clusters_are_those_of_the_literal_algorithm(seed, count, threshold):
    m = drawn(count, 2, seed)
    means, stds = m.means.double().numpy(), m.stds.double().numpy()
    close = bhattacharyya(means, stds, means, stds) < threshold
    result = [sorted(c.tolist()) for c in clusters(means, stds, threshold)]
    assert result == [sorted(c) for c in literal_clusters(close)]
    assert sorted(itertools.chain(*result)) == list(range(count))


# Fusion -----------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 100_000), st.integers(1, 12), st.floats(0, 4), st.sampled_from(["sum", "per-dimension"])
)
def test_fusion_keeps_weight_mean_and_second_moment_of_every_class(seed, count, threshold, distance):
    parts = drawn(count, 3, seed, classes=3)
    result = fuse([parts], 3, threshold=threshold, distance=distance)
    assert set(result.labels.tolist()) == set(parts.labels.tolist())
    for label in parts.labels.unique():
        before, after = (m.subset(m.labels == label) for m in (parts, result))
        assert after.num_components <= before.num_components
        for x, y in zip(moments(before), moments(after), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_threshold_decides_and_may_count_per_dimension():
    # D_B = 2·0.5 = 1 in two dimensions, 0.5 a dimension.
    parts = components((0, 1, [0.0, 0.0], [1.0, 1.0]), (0, 1, [2.0, 2.0], [1.0, 1.0]))
    assert fuse([parts], 2, threshold=0.99).num_components == 2
    assert fuse([parts], 2, threshold=1.0).num_components == 2  # strictly below
    assert fuse([parts], 2, threshold=1.01).num_components == 1
    assert fuse([parts], 2, threshold=0.51, distance="per-dimension").num_components == 1
    assert fuse([parts, parts], 2, threshold=0).num_components == 4


def test_with_the_papers_threshold_and_width_one_distribution_stays_in_pieces():
    # two clients' 100 samples of N(0, I) in d = 50, four components each, S_C = 1
    draw = torch.Generator().manual_seed(0)
    sent = []
    for seed in range(2):
        batch = (torch.randn(100, 50, generator=draw), torch.zeros(100, dtype=torch.int64))
        sent.append(fit_mixtures([batch], 50, 4, seed)[0])
    assert fuse(sent, 50, threshold=1).num_components == 8
    assert fuse(sent, 50, threshold=1, distance="per-dimension").num_components == 1


def test_the_heaviest_component_is_the_first_seed_and_the_lowest_of_equal_ones():
    # In one dimension and with deviations of 1, D_B = shift²/8: neighbours 0.125, the outer two 0.5 apart.
    def fused(*weights):
        return fuse([components(*((0, w, [x], [1.0]) for x, w in enumerate(weights)))], 1, threshold=0.2)

    heavy = fused(1, 6, 1)  # the middle one takes both
    assert (heavy.weights.tolist(), heavy.means.flatten().tolist()) == ([8], [1])
    heavy = fused(1, 1, 6)  # the last one takes the middle one
    assert (heavy.weights.tolist(), heavy.means.flatten().tolist()) == ([7, 1], [pytest.approx(13 / 7), 0])
    equal = fused(1, 1, 1)  # the first one takes the middle one
    assert (equal.weights.tolist(), equal.means.flatten().tolist()) == ([2, 1], [0.5, 2])


def test_classes_never_fuse_and_nothing_fuses_to_nothing():
    parts = components((1, 1, [0.0, 0.0], [1.0, 1.0]), (3, 1, [0.0, 0.0], [1.0, 1.0]))
    assert fuse([parts], 2, threshold=9).labels.tolist() == [1, 3]
    assert fuse([], 2, threshold=9).num_components == 0
    assert fuse([Mixtures.empty(2)], 2, threshold=9).means.shape == (0, 2)


@given(st.permutations(range(5)), st.integers(0, 1000))
def test_the_order_of_clients_changes_no_bit(order, seed):
    uploads = [drawn(3, 2, seed * 5 + i, classes=2) for i in range(5)]
    uploads[3] = uploads[1]  # a tie in everything
    expected = fuse(uploads, 2, threshold=0.5)
    assert same(fuse([uploads[i] for i in order], 2, threshold=0.5), expected)


# EM ---------------------------------------------------------------------------------------------------------


def literal_em(X, pi, mu, var, steps):
    """Eq. 5 and 6, sample by sample."""
    for _ in range(steps):
        gamma = np.zeros((len(X), len(pi)))
        for j, x in enumerate(X):
            for i in range(len(pi)):
                density = np.exp(-((x - mu[i]) ** 2) / (2 * var[i])) / np.sqrt(2 * np.pi * var[i])
                gamma[j, i] = pi[i] * np.prod(density)
            gamma[j] /= gamma[j].sum()
        N_i = gamma.sum(0)
        pi, mu = N_i / len(X), gamma.T @ X / N_i[:, None]
        var = np.stack([gamma[:, i] @ (X - mu[i]) ** 2 / N_i[i] for i in range(len(pi))])
    return pi, mu, np.sqrt(var)


def test_em_is_the_papers_from_the_same_start(monkeypatch):
    random = np.random.default_rng(3)
    X = np.concatenate([random.normal(0, 1, (40, 2)), random.normal(3, 0.5, (20, 2))])
    start = np.array([0.5, 0.5]), X[[0, -1]], np.ones((2, 2))
    pi, mu, std = literal_em(X, *start, steps=200)

    def from_this_start(n, **options):
        options |= {"reg_covar": 0.0, "tol": 1e-12, "max_iter": 500}
        return GaussianMixture(
            n, weights_init=start[0], means_init=start[1] - X.mean(0), precisions_init=1 / start[2], **options
        )

    monkeypatch.setattr("sklearn.mixture.GaussianMixture", from_this_start)
    result, _ = fit_mixtures([(torch.from_numpy(X), torch.zeros(60, dtype=torch.int64))], 2, 2, seed=0)
    np.testing.assert_allclose(result.weights, 60 * pi, rtol=1e-4)
    np.testing.assert_allclose(result.means, mu, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.stds, std, rtol=1e-4)


REDUCED, NOT_CONVERGED = "mixture-classes-reduced", "mixture-classes-not-converged"


def blobs(count=200, seed=0):
    """One class in two equal blobs at (0, 0) and (10, 10), deviation 1 and 2."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 2, generator=random)
    first = torch.arange(count) % 2 == 0
    features = torch.where(first[:, None], noise, 10 + 2 * noise)
    return features, torch.full((count,), 1)


def test_one_fit_keeps_mean_and_second_moment():
    features, labels = blobs(100)
    result, _ = fit_mixtures([(features, labels)], 2, 4, seed=0)
    weight, mean, second = moments(result)
    assert weight.item() == pytest.approx(100)
    torch.testing.assert_close(mean, features.double().mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, features.double().square().mean(0), rtol=1e-3, atol=1e-3)


def test_fewer_samples_than_components():
    features = torch.tensor([[0.0, 1], [5, 1], [9, 1], [0, 0], [2, 0], [4, 0], [6, 0], [8, 0]])
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    result, metrics = fit_mixtures([(features, labels)], 2, 4, seed=0)
    few = result.subset(result.labels == 0)
    assert metrics[REDUCED] == 1
    assert sorted(few.means[:, 0].tolist()) == pytest.approx([0, 5, 9], abs=1e-5)
    # Each rests on one sample and takes the pooled deviation. Class 0 about its mean 14/3: 122/3; class 1 about 4:
    # 16 + 4 + 0 + 4 + 16 = 40; together √((122/3 + 40)/(2 + 4)). The second feature is constant: the floor.
    pooled = math.sqrt((122 / 3 + 40) / 6)
    torch.testing.assert_close(few.stds, torch.tensor([[pooled, STD_FLOOR]]).expand(3, 2))


def test_a_single_sample_takes_the_spread_of_the_other_classes():
    # Class 1: 0 and 4, Σ(x - 2)² = 8 with one degree of freedom.
    features, labels = torch.tensor([[7.0], [0.0], [4.0]]), torch.tensor([0, 1, 1])
    result, _ = fit_mixtures([(features, labels)], 1, 1, seed=0)
    assert result.means[0].item() == 7
    assert result.stds[0].item() == pytest.approx(math.sqrt(8))
    assert result.weights[0].item() == 1
    alone, metrics = fit_mixtures([(features[:1], labels[:1])], 1, 4, seed=0)
    assert alone.stds.item() == pytest.approx(STD_FLOOR)
    assert (metrics[REDUCED], alone.num_components) == (1, 1)


def test_constant_features_and_repeated_samples():
    features = torch.zeros(10, 3)
    features[:, 1] = torch.arange(10) % 2  # two different samples
    result, metrics = fit_mixtures([(features, torch.zeros(10, dtype=torch.int64))], 3, 4, seed=0)
    assert (result.num_components, metrics[REDUCED], metrics[NOT_CONVERGED]) == (2, 1, 0)
    assert all(bool(torch.isfinite(t).all()) for t in vars(result).values())
    torch.testing.assert_close(result.stds, torch.full((2, 3), STD_FLOOR))
    constant, _ = fit_mixtures([(torch.ones(6, 3), torch.zeros(6, dtype=torch.int64))], 3, 4, seed=0)
    torch.testing.assert_close(constant.means, torch.ones(1, 3))


def test_features_far_from_zero_keep_their_spread():
    features, labels = blobs(400)
    near, _ = fit_mixtures([(features.double(), labels)], 2, 2, seed=0)
    far, _ = fit_mixtures([(features.double() + 1e7, labels)], 2, 2, seed=0)
    torch.testing.assert_close(far.stds, near.stds, rtol=1e-3, atol=0)


def test_no_samples_no_components_and_a_slow_fit_is_reported(monkeypatch):
    empty, metrics = fit_mixtures([], 5, 4, seed=0)
    assert empty.means.shape == (0, 5)
    assert metrics["mixture-components"] == 0
    monkeypatch.setattr(mixture, "MAX_ITERATIONS", 1)
    assert fit_mixtures([blobs(50)], 2, 4, seed=0)[1][NOT_CONVERGED] == 1


# Pseudo-features --------------------------------------------------------------------------------------------


def test_samples_have_the_moments_of_the_mixture():
    parts = components((1, 3, [0.0, 2.0], [1.0, 0.0]), (1, 1, [4.0, 2.0], [2.0, 0.0]))
    features, labels = sample(parts, 100_000, torch.Generator().manual_seed(0))
    assert labels.unique().tolist() == [1]
    # Mean (3·0 + 1·4)/4 = 1; variance (3·(1 + 1) + 1·(4 + 9))/4 = 4.75.
    assert features[:, 0].mean().item() == pytest.approx(1, abs=0.03)
    assert features[:, 0].var().item() == pytest.approx(4.75, abs=0.1)
    assert features[:, 1].unique().tolist() == [2]


def test_every_class_present_gets_the_same_number_shuffled():
    parts = components((0, 9, [0.0], [1.0]), (3, 1, [0.0], [1.0]), (3, 1, [5.0], [1.0]))
    features, labels = sample(parts, 16, torch.Generator().manual_seed(0))
    assert features.shape == (32, 1)
    assert torch.bincount(labels).tolist() == [16, 0, 0, 16]
    assert labels.tolist() != sorted(labels.tolist())
    again = sample(parts, 16, torch.Generator().manual_seed(0))[0]
    assert torch.equal(features, again)
    none, nobody = sample(Mixtures.empty(1), 16, torch.Generator())
    assert (none.shape, nobody.shape) == ((0, 1), (0,))


# Payload and state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("labels", torch.tensor([0, 4]), "class id 4 is outside 0..3"),
        ("labels", torch.tensor([0]), "2 weights for 1 components"),
        ("labels", torch.tensor([0.0, 1.0]), "whole numbers"),
        ("weights", torch.tensor([1.0, 0.0]), "must be positive"),
        ("weights", torch.tensor([1.0, math.nan]), "NaN or infinity"),
        ("weights", torch.tensor([1.0, 1e9]), "must be at most"),
        ("means", torch.zeros(2, 3), "expected \\(2, 2\\)"),
        ("means", torch.full((2, 2), math.inf), "NaN or infinity"),
        ("stds", torch.tensor([[1.0, 1], [1, -0.1]]), "must not be negative"),
        ("stds", torch.zeros(2), "1 dimensions"),
        ("extra", torch.zeros(2), "unexpected"),
        ("stds", None, "'stds' is missing"),
    ],
)
def test_bad_mixtures_are_rejected(name, value, complaint):
    good = components((0, 1, [0.0, 0.0], [1.0, 1.0]), (1, 1, [0.0, 0.0], [1.0, 0.0])).to_tensors()
    assert Mixtures.from_tensors(good, TASK).num_components == 2
    with pytest.raises(RejectedPayload, match=complaint):
        Mixtures.from_tensors({key: t for key, t in {**good, name: value}.items() if t is not None}, TASK)


def test_too_many_components_are_rejected(monkeypatch):
    monkeypatch.setattr(Mixtures, "max_components", 2)
    with pytest.raises(RejectedPayload, match=r"3 components, must be 1..2"):
        Mixtures.from_tensors(drawn(3, 2, 0).to_tensors(), TASK)


def test_state_keeps_what_silent_clients_sent_last():
    first, second, third = (drawn(n, 2, n) for n in (1, 2, 3))
    state = MixtureState.empty(2).received({0: first, 4: second}, "keep")
    assert state.owners.tolist() == [0, 4, 4]
    later = state.received({4: third}, "keep")
    assert later.owners.tolist() == [0, 4, 4, 4]
    assert same(later.latest.subset(later.owners == 4), third)
    assert state.received({4: third}, "drop").owners.tolist() == [4, 4, 4]
    assert state.owners.tolist() == [0, 4, 4]
