import math

import pytest
import torch

from pbfl_flwr.methods.feduv import uniformity, variance
from tests.methods.conftest import dealt, descend, same_weights


def test_outputs_that_vary_more_than_the_identity_are_not_drawn_back():
    # K = 4, two sure samples of classes 0 and 1: deviations 1/√2, 1/√2, 0, 0 against 1/2; V = (0 + 0 + 1/2 + 1/2)/4
    assert float(variance(1e4 * torch.eye(4)[:2])) == pytest.approx(0.25, abs=1e-6)


def test_the_median_leaves_out_distances_of_zero():
    # Points 0, 0, 0, 2: squared distances 0, 0, 0, 4, 4, 4; median of the others 4. U = (3·1 + 3·e^-1)/6
    z = torch.tensor([[0.0], [0.0], [0.0], [2.0]])
    assert float(uniformity(z)) == pytest.approx((1 + math.exp(-1)) / 2, rel=1e-6)


def test_equal_features_have_no_uniformity_and_no_nan():
    z = torch.ones(3, 2, requires_grad=True)
    spread = uniformity(z)
    spread.backward()
    assert spread.item() == 0
    assert z.grad is not None
    assert z.grad.tolist() == [[0.0, 0.0]] * 3
    some = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]], requires_grad=True)
    uniformity(some).backward()
    assert some.grad is not None
    assert bool(torch.isfinite(some.grad).all())


def test_a_round_follows_the_equations(make_method, make_client, task):
    """8 samples in batches of 3, 3 and 2, with the terms of the page written out over samples, classes and pairs."""
    own = {"variance_weight": 0.7, "uniformity_weight": 1.3}
    keys = {"batch_size": 3, "drop_last": "never", "learning_rate": 0.1}
    method = make_method("feduv", models="cnn4", own=own)
    client, oracle = (make_client(architecture="cnn4", **keys) for _ in range(2))
    state = method.init(task, 0)
    w = oracle.model
    method.install(oracle, state)
    for x, y in dealt(oracle):
        z = w.features(x)
        o = w.head(z)
        p, B = o.softmax(1), len(y)
        V = 0.0
        for k in range(4):
            deviation = ((p[:, k] - p[:, k].mean()).square().sum() / (B - 1)).sqrt()
            V = V + max(0.5 - deviation, torch.zeros(())) / 4  # 1/√4
        squared = [(z[a] - z[b]).square().sum() for a in range(B) for b in range(a + 1, B)]
        sigma = sorted(squared)[(len(squared) - 1) // 2]
        U = sum(torch.exp(-s / sigma) for s in squared) / len(squared)
        loss = torch.nn.functional.cross_entropy(o, y) + 0.7 * V + 1.3 * U
        descend(loss, w.parameters(), 0.1)
    same_weights(w, method.local_update(client, state).payload.tensors)


def test_one_sample_and_one_class(make_method, make_client, task):
    method = make_method("feduv", models="cnn4")
    state = method.init(task, 0)
    assert set(method.local_update(make_client(0, "cnn4", (1,)), state).metrics) == {"loss.ce"}
    update = method.local_update(make_client(0, "cnn4", (1, 1, 1, 1)), state)
    assert set(update.metrics) == {"loss.ce", "loss.variance", "loss.uniformity"}
    assert all(bool(torch.isfinite(t).all()) for t in update.payload.tensors.values())
