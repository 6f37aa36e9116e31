"""Whole rounds of GFPL with one component a class against loops written from the paper's equations.

With one component EM is a mean and a deviation. The loops take nothing from the package but the networks, the random
matrix of the frame, the first projection and the draw of the pseudo-features.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.methods.gfpl.etf import projection_layer
from pbfl_flwr.methods.gfpl.mixture import sample
from pbfl_flwr.methods.gfpl.payload import Mixtures
from tests.methods.conftest import play

K, D, RATE, MOMENTUM, SAMPLES, ROUNDS = 4, 6, 0.05, 0.5, 7, 5
LABELS = {0: (0, 0, 0, 1, 1, 2), 1: (1, 2, 2, 2, 2, 2, 0), 2: (2, 2, 2, 2)}
TRAINING = {"batch_order": "fixed", "drop_last": "never", "learning_rate": RATE, "momentum": MOMENTUM}


def frame():
    """Equations 9 and 10, by Gram and Schmidt."""
    A = torch.randn(D, K, generator=seeds.generator(0, "etf"), dtype=torch.float64)
    Q: list[Tensor] = []
    for column in A.T:
        for q in Q:
            column = column - (q @ column) * q
        Q.append(column / column.norm())
    return torch.stack([math.sqrt(K / (K - 1)) * (q - sum(Q) / K) for q in Q]).float()  # a row a class


def loss_of(network, projection, Z, z, y):
    """Equations 11 to 14, λ = 2."""
    loss = F.cross_entropy(network.head(z), y)
    for h, label in zip(projection(z), y.tolist(), strict=True):
        loss = loss + 2 * 0.5 * (h @ Z[label] / h.norm() - 1) ** 2 / len(y)
    return loss


def train(network, projection, Z, features, inputs, labels, parameters):
    """One pass of batches of 4."""
    velocity = [torch.zeros_like(p) for p in parameters]
    for start in range(0, len(labels), 4):
        z = features(inputs[start : start + 4])
        loss = loss_of(network, projection, Z, z, labels[start : start + 4])
        slopes = torch.autograd.grad(loss, parameters)
        for p, v, slope in zip(parameters, velocity, slopes, strict=True):
            v.mul_(MOMENTUM).add_(slope)
            p.data -= RATE * v


def components(z, y, weight):
    """Equation 6 for one component, (label, w, μ, σ²) a class; a single sample has the pooled deviation."""
    actual, residuals = [], []
    for j in sorted(set(y.tolist())):
        own = z[y == j].double()
        residuals.append(own - own.mean(0))
        variance = (residuals[-1] ** 2).mean(0) + 1e-6 if len(own) > 1 else None
        actual.append((j, float(len(own)) if weight == "count" else 1.0, own.mean(0), variance))
    freedom = max(1, len(y) - len(actual))
    pooled = ((torch.cat(residuals) ** 2).sum(0) / freedom).clamp_min(1e-6)
    return [(j, w, mean, pooled if variance is None else variance) for j, w, mean, variance in actual]


def distance(p, q):
    """Equation 8 with whole matrices."""
    a, b = torch.diag(p[3]), torch.diag(q[3])
    s, shift = (a + b) / 2, p[2] - q[2]
    logarithm = s.logdet() - (a.logdet() + b.logdet()) / 2
    return float(shift @ torch.linalg.inv(s) @ shift / 8 + logarithm / 2)


def fused(uploads, threshold):
    """Algorithm 1, the heaviest first (ties by means); the diagonal of line 15."""
    result = []
    for label in range(K):
        left = [p for upload in uploads for p in upload if p[0] == label]
        left.sort(key=lambda p: (-p[1], p[2].float().tolist()))
        while left:
            cluster = [left.pop(0)]
            while near := [p for p in left if all(distance(p, q) < threshold for q in cluster)]:
                cluster += near
                left = [p for p in left if all(p is not q for q in near)]
            w = sum(p[1] for p in cluster)
            mean = sum(p[1] * p[2] for p in cluster) / w
            outer = [p[1] * (torch.diag(p[3]) + torch.outer(p[2] - mean, p[2] - mean)) for p in cluster]
            result.append((label, w, mean, (sum(outer) / w).diagonal()))
    labels, w, means, variances = zip(*result, strict=True)
    return Mixtures(
        torch.tensor(labels),
        torch.tensor(w),
        torch.stack(means).float(),
        torch.stack(variances).sqrt().float(),
    )


@pytest.mark.parametrize(
    ("threshold", "weight", "sent"), [(1.0, "count", 7), (15.0, "count", 4), (1e9, "pi", 3), (0.0, "pi", 7)]
)
def test_rounds_are_those_of_the_equations(make_method, make_client, threshold, weight, sent):
    own = {
        "components": 1,
        "samples": SAMPLES,
        "start": 2,
        "interval": 2,
        "threshold": threshold,
        "weight": weight,
    }
    method, Z = make_method("gfpl", own=own), frame()
    # all clients start from the same l
    literal = {i: (make_client(i, "mlp5", LABELS[i]).model, projection_layer(D, 0, {})) for i in LABELS}
    received, counts = None, []
    for number in range(1, ROUNDS + 1):
        sendings = []
        for i, labels in LABELS.items():
            client = make_client(i, "mlp5", labels, number, **TRAINING)
            network, projection = literal[i]
            x, y = client.data.train.inputs, client.data.train.labels
            pair = (network, projection, Z)
            if received is not None:
                z, drawn = sample(received, SAMPLES, client.generator("pseudo-features"))
                train(*pair, torch.clone, z, drawn, [*network.head.parameters(), *projection.parameters()])
            train(*pair, network.features, x, y, [*network.parameters(), *projection.parameters()])
            if number in (2, 4):
                sendings.append(components(network.features(x).detach(), y, weight))
        received = fused(sendings, threshold) if sendings else None
        if received is not None:
            counts.append(received.num_components)
    *_, last = play(method, make_client, LABELS, ROUNDS, "mlp5", **TRAINING)
    assert counts[0] == sent  # what the threshold decides
    for i, (network, projection) in literal.items():
        for name, tensor in network.state_dict().items():
            assert torch.allclose(last.networks[i][name], tensor, rtol=1e-4, atol=1e-5), (i, name)
        assert torch.allclose(last.memories[i]["projection.weight"], projection.weight, rtol=1e-4, atol=1e-5)
