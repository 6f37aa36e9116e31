"""Whole rounds of FedCPD against loops written from the paper's equations, sample by sample.

The loops take nothing from the package but the network and the first weights of attention and fusion.
"""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.methods.fedcpd.attention import MapDistillation
from pbfl_flwr.models.contract import body_names
from tests.methods.conftest import descend, play

RATE, ROUNDS, WIDTH = 0.02, 3, 5
LABELS = {0: (0, 0, 1, 1, 2), 1: (1, 1, 1), 2: (2, 0, 1, 2, 2, 2, 1)}  # nobody holds class 3
N = sum(map(len, LABELS.values()))
TRAINING = {"batch_order": "fixed", "drop_last": "never", "learning_rate": RATE, "layout": "contiguous"}


def cbam(p, level, maps):
    """CBAM of Woo et al., one sample at a time."""
    at = {name.split(".", 2)[2]: t for name, t in p.items() if name.startswith(f"attention.{level}.")}
    result = []
    for x in maps:
        gates = torch.zeros(())
        for summary in (x.flatten(1).mean(1), x.flatten(1).max(1).values):
            hidden = torch.relu(at["channel_gate.0.weight"] @ summary + at["channel_gate.0.bias"])
            gates = gates + at["channel_gate.2.weight"] @ hidden + at["channel_gate.2.bias"]
        x = x * torch.sigmoid(gates)[:, None, None]
        places = torch.stack([x.mean(0), x.max(0).values])
        result.append(x * torch.sigmoid(F.conv2d(places[None], at["spatial_gate.weight"], padding=3))[0])
    return torch.stack(result)


def fusion(p, kind, maps):
    """X^{l,*} = Cv2(up(Cv1(X^{l+1})) + Cv1(X^l) + Cv3(X^l)), no up-term at the top."""

    def convolved(name, level, x, padding):
        return F.conv2d(
            x, p[f"{kind}.{name}.{level}.weight"], p[f"{kind}.{name}.{level}.bias"], padding=padding
        )

    low, high = maps
    above = F.interpolate(convolved("unify", 1, high, 0), size=low.shape[2:], mode="bilinear")
    mixed = above + convolved("unify", 0, low, 0) + convolved("enhance", 0, low, 1)
    top = convolved("unify", 1, high, 0) + convolved("enhance", 1, high, 1)
    return [convolved("smooth", 0, mixed, 1), convolved("smooth", 1, top, 1)]


def loss_of(network, x, y, P, p, teacher, weights):
    """L_ce + α·L_align + β·L_pcl + γ·L_fd; teacher: its stages and the attention of then."""
    alpha, beta, gamma, tau, reduction = weights
    low = network.stages[0](x)
    maps = [low, network.stages[1](low)]
    z = network.neck(maps[1])
    loss = F.cross_entropy(network.head(z), y)
    known = [b for b, label in enumerate(y.tolist()) if label in P]
    for b in known:
        label = int(y[b])
        loss = loss + alpha * ((z[b] - P[label]) ** 2).sum() / len(y)
        cosine = {c: z[b] @ P[c] / (z[b].norm() * P[c].norm()) for c in P}
        share = torch.exp(cosine[label] / tau) / sum(torch.exp(s / tau) for s in cosine.values())
        loss = loss - beta * torch.log(share) / len(known)
    if teacher is not None:
        stages, frozen = teacher
        with torch.no_grad():
            first = stages[0](x)
            F_t = [first, stages[1](first)]
            A_t = [cbam(frozen, level, m) for level, m in enumerate(F_t)]
        A_s = fusion(p, "fuse_attention", [cbam(p, level, m) for level, m in enumerate(maps)])
        for student, memory in zip([*A_s, *fusion(p, "fuse_maps", maps)], [*A_t, *F_t], strict=True):
            error = (student - memory) ** 2
            loss = loss + gamma * (error.mean() if reduction == "mean" else error.sum() / len(y))
    return loss


def literal(make_client, theta, base, weights):
    networks = {i: make_client(i, "cnn4", LABELS[i]).model for i in LABELS}
    distillation: dict[int, Any] = {}
    teachers: dict[int, Any] = {}
    P: dict[int, Any] = {}
    for _ in range(ROUNDS):
        answers, means = {}, {}
        for i, network in networks.items():
            client = make_client(i, "cnn4", LABELS[i])
            x, y = client.data.train.inputs, client.data.train.labels
            named = dict(network.named_parameters())
            for name in theta:
                named[name].data.copy_(theta[name])
            if i not in distillation:
                first = MapDistillation([32, 64], width=WIDTH, seed=seeds.derive(0, "fedcpd", client.key))
                distillation[i] = {name: t.detach().requires_grad_() for name, t in first.named_parameters()}
            p, teacher = distillation[i], None
            if i in teachers:
                teacher = teachers[i], {name: tensor.detach().clone() for name, tensor in p.items()}
            batches = [(x[b : b + 4], y[b : b + 4]) for b in range(0, len(y), 4)]
            head = [parameter for name, parameter in named.items() if name not in body_names(network)]
            if base == "fedrep":
                for inputs, labels in batches:
                    descend(F.cross_entropy(network(inputs), labels), head, RATE)
            trained = [named[name] for name in theta] + (list(p.values()) if teacher else [])
            for inputs, labels in batches:
                descend(loss_of(network, inputs, labels, P, p, teacher, weights), trained, RATE)
            teachers[i] = copy.deepcopy(network.stages)
            answers[i] = {name: named[name].detach().clone() for name in theta}
            with torch.no_grad():
                z = network.features(x)
            means[i] = {j: z[y == j].mean(0) for j in set(y.tolist())}
        theta = {name: sum(len(LABELS[i]) / N * answers[i][name] for i in LABELS) for name in theta}
        sent = {j: [of[j] for of in means.values() if j in of] for j in range(4)}
        P = {j: sum(rows) / len(rows) for j, rows in sent.items() if rows}
    return theta, P, distillation


@pytest.mark.parametrize("base", ["fedrep", "fedavg"])
@pytest.mark.parametrize("weights", [(0.1, 0.7, 0.5, 0.4, "mean"), (0.02, 1.0, 0.001, 0.5, "sum")])
def test_rounds_are_those_of_the_equations(make_method, make_client, task, base, weights):
    names = ("align_weight", "contrast_weight", "distill_weight", "temperature", "map_reduction")
    own = {"base": base, "fusion_width": WIDTH, **dict(zip(names, weights, strict=True))}
    method = make_method("fedcpd", own=own, models="cnn4")
    theta, P, distillation = literal(make_client, method.init(task, 0).weights.tensors, base, weights)
    *_, last = play(method, make_client, LABELS, ROUNDS, "cnn4", **TRAINING)
    state = last.state
    for name, tensor in theta.items():
        assert torch.allclose(state.weights.tensors[name], tensor, rtol=1e-4, atol=1e-5), name
    assert state.prototypes.present.tolist() == [True, True, True, False]
    for j, row in P.items():
        assert torch.allclose(state.prototypes.values[j], row, rtol=1e-4, atol=1e-5)
    for i, p in distillation.items():
        for name, tensor in p.items():
            assert torch.allclose(last.memories[i][f"distillation.{name}"], tensor, rtol=1e-4, atol=1e-5), (
                name
            )
