"""Whole rounds of the prototype family against loops written from the papers' equations.

The loops take nothing from the package but the networks, the allocation of the masks and the order of FedTGP's batches.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.prototypes import masks
from tests.methods.conftest import descend, play

K, D, RATE, ROUNDS = 4, 6, 0.05, 3
# A class that one client has a single sample of, a client with a single class, a class that nobody has.
LABELS = {0: (0, 0, 0, 1, 1, 2), 1: (1, 2, 2, 2, 2, 2, 0), 2: (2, 2, 2, 2, 2, 2)}
N = sum(map(len, LABELS.values()))
TRAINING = {"batch_order": "fixed", "drop_last": "never", "learning_rate": RATE, "local_epochs": 2}


def mask(size):
    return masks.allocate_masks(K, D, size, seed=seeds.derive(0, "masks") % 2**32).float()


def regulariser(z, y, targets, beta, form, weighing, m, inside):
    """Equation 6 (12 with β) between class means, or its form per sample; m restricts it to the mask."""
    total = 0.0
    classes = [j for j in set(y.tolist()) if j in targets]
    if form == "l2":
        for j in classes:
            error = (z[y == j].mean(0) - targets[j]) * (m[j] if inside else 1)
            total = total + (beta[j] if weighing else 1) * (error**2).sum().sqrt()
        return total
    for b, j in enumerate(y.tolist()):
        if j in targets:
            error = (z[b] - targets[j]) * (m[j] if inside else 1)
            share = 1 / len(y)
            if weighing == "class":  # mean over the classes of the batch of their samples' means
                share = 1 / (len(set(y.tolist())) * int((y == j).sum()))
            total = total + (beta[j] if weighing else 1) * share * (error**2).sum() / D
    return total


def automatic(rows):
    """μ of every class: 0.9·K/n, but no row longer than K/n times their average length."""
    lengths = {j: float(row.norm()) for j, row in rows.items()}
    average = sum(lengths.values()) / len(rows)
    return {j: len(rows) / N * min(0.9, average / length) for j, length in lengths.items()}


def aggregated(rule, sent, mu):
    """sent: [(n_ij, c̄_ij)] of one class."""
    if rule == "mean":  # CPS equation 4, TinyProto 9, ProtoNorm 7
        return sum(c for _, c in sent) / len(sent)
    if rule == "weighted-shrunk":  # CPS equation 9, TinyProto 4, ProtoNorm 3
        return sum(n / sum(m for m, _ in sent) * c for n, c in sent) / len(sent)
    total = sum(n * c for n, c in sent)
    if rule == "aps-mean":  # TinyProto equation 10, μ of equation 11
        return mu * total / len(sent)
    return (K / N if rule == "ppa" else mu) * total  # CPS equation 11; the released TinyProto


def literal(
    make_client,
    rule="mean",
    lam=10.0,
    form="mse",
    weighing="",
    s=0,
    inside=False,
    mu=0.0,
    gamma=1.0,
    server=None,
):
    networks = {i: make_client(i, "mlp5", LABELS[i]).model for i in LABELS}
    m = mask(s) if s else torch.ones(K, D)
    targets: dict[int, Tensor] = {}
    for _ in range(ROUNDS):
        local = {}
        for i, network in networks.items():
            data = make_client(i, "mlp5", LABELS[i]).data.train
            n = torch.bincount(data.labels, minlength=K)
            for start in 2 * list(range(0, len(data.labels), 4)):
                x, y = data.inputs[start : start + 4], data.labels[start : start + 4]
                z = network.features(x)
                loss = F.cross_entropy(network.head(z), y)
                regularised_to = {j: gamma * c for j, c in targets.items()}
                distance = regulariser(z, y, regularised_to, n / n.max(), form, weighing, m, inside)
                descend(loss + lam * distance, network.parameters(), RATE)
            with torch.no_grad():
                z = network.features(data.inputs)
            local[i] = {j: (int(n[j]), m[j] * z[data.labels == j].mean(0)) for j in range(K) if n[j]}
        held = {j: [of[j] for of in local.values() if j in of] for j in range(K)}
        targets = {j: aggregated(rule, sent, 1.0 if mu == "auto" else mu) for j, sent in held.items() if sent}
        if mu == "auto":
            mus = automatic(targets)
            targets = {j: mus[j] * row for j, row in targets.items()}
        if server is not None:
            targets = {j: m[j] * c for j, c in server(targets, local).items()}
    return networks


def aligned(targets, local):
    """ProtoNorm's Algorithm 1, with the published code's step and stopping rule."""
    c = torch.stack([targets[j] for j in sorted(targets)]).double()
    c /= c.norm(dim=1, keepdim=True)
    v, eta, before, unchanged = torch.zeros_like(c), 0.1, None, 0
    for t in range(500):
        force = torch.zeros_like(c)
        for j in range(len(c)):
            for k in range(len(c)):
                if j != k:
                    force[j] += (c[j] - c[k]) / (((c[j] - c[k]) ** 2).sum() + 1e-10)
        v = 0.9 * v + eta * force
        c = c + v
        c /= c.norm(dim=1, keepdim=True)
        eta *= 0.95 if t % 10 == 0 else 1
        size = round(float(force.norm(dim=1).mean()), 4)
        unchanged = unchanged + 1 if size == before else 0
        before = size if t >= 10 else None
        if unchanged == 10:
            break
    return dict(zip(sorted(targets), c.float(), strict=True))


class Trained:
    """FedTGP's server; a factor brings n-scaled uploads back by factor·|N_j|·n_ij, or without |N_j|."""

    def __init__(self, start, factor=None, summed=True, epochs=3):
        self.p = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        self.factor, self.summed, self.epochs, self.round = factor, summed, epochs, 0

    def prototypes(self):
        p = self.p
        hidden = torch.relu(F.linear(p["embedding.weight"], p["hidden.weight"], p["hidden.bias"]))
        return F.linear(hidden, p["output.weight"], p["output.bias"])

    def __call__(self, targets, local):
        self.round += 1
        holders = {j: sum(j in of for of in local.values()) if self.summed else 1 for j in targets}
        factors = dict.fromkeys(targets, self.factor)
        if self.factor == "auto":
            held = {
                j: [n * c for of in local.values() for k, (n, c) in of.items() if k == j] for j in targets
            }
            factors = automatic(
                {j: sum(rows) / (1 if self.summed else len(rows)) for j, rows in held.items()}
            )
        scale = {j: factors[j] * holders[j] if factors[j] else None for j in targets}
        sent = [
            (j, c * (scale[j] * n if scale[j] else 1)) for of in local.values() for j, (n, c) in of.items()
        ]
        Q = {j: torch.stack([c for k, c in sent if k == j]).mean(0) for j in targets}
        margin = min(max(min(float((Q[j] - Q[k]).norm()) for k in Q if k != j) for j in Q), 100.0)
        order = seeds.generator(0, "fedtgp", self.round)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(sent), generator=order).split(4):
                P, loss = self.prototypes(), torch.zeros(())
                for b in batch.tolist():
                    label, vector = sent[b]
                    distances = [(vector - row).norm() for row in P]
                    own = torch.exp(-(distances[label] + margin))
                    others = sum(torch.exp(-distance) for k, distance in enumerate(distances) if k != label)
                    loss = loss - torch.log(own / (own + others)) / len(batch)
                descend(loss, self.p.values(), RATE)
        P = self.prototypes().detach()
        return {j: P[j] for j in targets}


def same(method, make_client, networks):
    *_, last = play(method, make_client, LABELS, ROUNDS, "mlp5", **TRAINING)
    for i, network in networks.items():
        for name, tensor in network.state_dict().items():
            assert torch.allclose(last.networks[i][name], tensor, rtol=1e-4, atol=1e-5), (i, name)


L2 = {"regularizer_form": "l2", "regularizer_weight": 0.5}
PPA = {"aggregation": "ppa", "cpkd": "sample"}
APS = {"cps_dim": 2, "aps_scale": 0.05}


@pytest.mark.parametrize(
    ("name", "keys", "terms"),
    [
        ("fedproto", {}, {}),
        ("fedproto", {"aggregation": "weighted-shrunk", **L2}, {"rule": "weighted-shrunk", "form": "l2", "lam": 0.5}),
        ("fedproto", {"cpkd": "sample"}, {"weighing": "sample"}),
        ("fedproto", {"cpkd": "class", "cps_dim": 3}, {"weighing": "class", "s": 3}),
        (
            "fedproto",
            {"cps_dim": 2, "cps_regularizer": "masked", "aggregation": "ppa", "cpkd": "class", **L2},
            {"s": 2, "inside": True, "rule": "ppa", "weighing": "class", "form": "l2", "lam": 0.5},
        ),
        ("fedproto", {**PPA, "cps_dim": 1}, {"s": 1, "rule": "ppa", "weighing": "sample"}),
        ("tinyproto", APS, {"s": 2, "rule": "aps-sum", "mu": 0.05}),
        ("tinyproto", {**APS, "aggregation": "aps-mean"}, {"s": 2, "rule": "aps-mean", "mu": 0.05}),
        ("tinyproto", {"cps_dim": 2}, {"s": 2, "rule": "aps-sum", "mu": "auto"}),
        ("tinyproto", {"cps_dim": 2, "aggregation": "aps-mean"}, {"s": 2, "rule": "aps-mean", "mu": "auto"}),
        ("protonorm", {"upscale": 3.0, "regularizer_weight": 1.0}, {"gamma": 3.0, "lam": 1.0, "server": aligned}),
    ],
)  # fmt: skip
def test_rounds_are_those_of_the_equations(make_method, make_client, name, keys, terms):
    method = make_method(name, min_class_count=1, **keys)
    same(method, make_client, literal(make_client, **terms))


@pytest.mark.parametrize(
    ("name", "keys", "factor", "terms"),
    [
        ("fedtgp", {}, None, {}),
        ("fedtgp", {**PPA, "cps_dim": 2}, K / N, {"s": 2, "weighing": "sample"}),
        ("tinyproto", APS, 0.05, {"s": 2}),
        ("tinyproto", {**APS, "aggregation": "aps-mean"}, 0.05, {"s": 2}),
        ("tinyproto", {"cps_dim": 2}, "auto", {"s": 2}),
        ("tinyproto", {"cps_dim": 2, "aggregation": "aps-mean"}, "auto", {"s": 2}),
    ],
)  # fmt: skip
def test_rounds_with_trained_prototypes_are_those_of_the_equations(
    make_method, make_client, task, name, keys, factor, terms
):
    own = {"server_epochs": 3, **({"base": "fedtgp"} if name == "tinyproto" else {})}
    method = make_method(name, own=own, min_class_count=1, learning_rate=RATE, **keys)
    server = Trained(method.init(task, 0).trained, factor, keys.get("aggregation") != "aps-mean")
    same(method, make_client, literal(make_client, server=server, **terms))
