import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from pbfl_flwr.method import Round
from pbfl_flwr.methods.averaging import load_parameters, parameters_of
from pbfl_flwr.methods.generative.fedpa import (
    diversity,
    generation_weight,
    generator_loss,
    prototype_weight,
    teaching_weights,
)
from pbfl_flwr.methods.generative.generators import train_generator
from pbfl_flwr.payloads import Prototypes, Weights, WeightsAndPrototypes
from tests.methods.conftest import dealt, descend, same_weights

SMALL = {"noise_dim": 3, "hidden_dim": 8, "server_steps": 5}


def test_schedules():
    assert [generation_weight(0), generation_weight(1), generation_weight(1000)] == [25, 24.5, 1e-4]
    assert [prototype_weight(0), prototype_weight(1), prototype_weight(500)] == [5, 4.9, 0.15]


def test_teaching_weights_by_hand():
    # n = (2, 0) and (0, 0): class 0: 3/4 and 1/4, class 1: halves
    assert teaching_weights(torch.tensor([[2, 0], [0, 0]])).tolist() == [[0.75, 0.5], [0.25, 0.5]]


def test_diversity_is_the_literal_loop_over_pairs():
    random = torch.Generator().manual_seed(0)
    features, noise = torch.randn(4, 6, generator=random), torch.rand(4, 3, generator=random)
    labels = torch.tensor([0, 1, 0, 2])
    total = 0.0
    for i in range(4):
        for j in range(4):
            if labels[i] != labels[j]:
                apart = float(((noise[i] - noise[j]) ** 2).mean())
                total -= apart * float((features[i] - features[j]).abs().mean())
    assert float(diversity(features, noise, labels)) == pytest.approx(math.exp(total / 16), rel=1e-5)
    assert float(diversity(torch.zeros(4, 6), noise, labels)) == 1


def test_generator_loss_is_its_three_terms(make_method, task):
    method = make_method("fedpa", own=SMALL)
    network = method.shape.build(task, 1)
    random = torch.Generator().manual_seed(0)
    heads = [(torch.randn(4, 6, generator=random), torch.randn(4, generator=random)) for _ in range(2)]
    omega = teaching_weights(torch.tensor([[2, 0, 1, 0], [0, 3, 0, 0]]))
    present = torch.tensor([True, True, False, True])
    table = Prototypes(torch.randn(4, 6, generator=random) * present[:, None], present)
    classes = torch.tensor([True, True, True, False])
    drawn = network.draw(classes.long(), 8, torch.Generator().manual_seed(5))
    loss = generator_loss(*drawn, heads=heads, teaching=omega, table=table, generation=2.0, adversarial=0.15)
    result = float(loss.detach())

    again = torch.Generator().manual_seed(5)
    labels = torch.multinomial(classes.double(), 8, replacement=True, generator=again)
    assert 3 not in labels.tolist()
    noise = torch.rand(8, 3, generator=again)
    with torch.no_grad():
        h = network(labels, noise)
        pushed = present[labels]  # a class without a prototype pushes nothing
        assert 0 < int(pushed.sum()) < 8
        expected = float(diversity(h, noise, labels))
        expected -= 0.15 * float(F.mse_loss(h[pushed], table.values[labels[pushed]]))
        for k, (weight, bias) in enumerate(heads):
            for b, y in enumerate(labels.tolist()):
                nll = -float((h[b] @ weight.T + bias).log_softmax(0)[y])
                expected += 2.0 * float(omega[k, y]) * nll / 8
    assert result == pytest.approx(expected, rel=1e-4)


def test_the_generator_is_pushed_off_the_prototypes_of_the_round_before(make_method, task):
    method = make_method("fedpa", own=SMALL)
    state, pushed = method.init(task, 0), []
    for number, value in ((1, 1.0), (2, 5.0), (3, 9.0)):
        rows = Prototypes(torch.full((4, 6), value), torch.ones(4).bool(), torch.ones(4, dtype=torch.int64))
        uploads = {0: WeightsAndPrototypes(Weights(state.taught.weights.tensors, 4), rows)}
        round_info = Round(number, task, 1)
        with patch("pbfl_flwr.methods.generative.fedpa.generator_loss", wraps=generator_loss) as asked:
            state = method.aggregate(state, uploads, round_info)
        table = asked.call_args.kwargs["table"]
        pushed.append(float(table.values[0, 0]) if table.num_present else None)
    assert pushed == [None, 1.0, 5.0]
    assert float(state.taught.prototypes.values[0, 0]) == 9.0


@pytest.mark.parametrize(("batch_size", "drawn"), [(7, 7), (1, 2)])  # BatchNorm needs two
def test_the_server_trains_by_its_schedules(make_method, task, batch_size, drawn):
    own = {**SMALL, "server_learning_rate": 0.5, "server_rate_decay": 0.5, "server_weight_decay": 0.25}
    method = make_method("fedpa", own=own, batch_size=batch_size)
    state, found, server = method.init(task, 0), [], "pbfl_flwr.methods.generative.fedpa"
    rows = Prototypes(torch.ones(4, 6), torch.ones(4).bool(), torch.ones(4, dtype=torch.int64))
    uploads = {0: WeightsAndPrototypes(Weights(state.taught.weights.tensors, 4), rows)}
    for number in (1, 3):
        with (
            patch(f"{server}.generator_loss", wraps=generator_loss) as loss,
            patch(f"{server}.train_generator", wraps=train_generator) as training,
        ):
            method.aggregate(state, uploads, Round(number, task, 1))
        *_, rate, decay = training.call_args.args
        assert len(loss.call_args.args[0]) == drawn
        found.append((rate, decay, loss.call_args.kwargs["generation"]))
    assert found == [(0.5, 0.25, 25), (0.5**3, 0.25, 25 * 0.98**2)]


def test_a_single_prototype_regularises(make_method, make_client, task):
    method = replace(make_method("fedpa", own=SMALL), architecture="cnn4")
    for held, terms in (([0, 0, 0, 0], {"loss.ce"}), ([0, 1, 0, 0], {"loss.ce", "loss.regularizer"})):
        table = Prototypes(torch.ones(4, 6) * torch.tensor(held)[:, None], torch.tensor(held).bool())
        down = replace(method.init(task, 0).taught, prototypes=table)
        assert set(method.local_update(make_client(architecture="cnn4", round=2), down).metrics) == terms


def test_a_second_round_of_a_client_follows_the_repositorys_loop(make_method, make_client, task):
    method, keys = make_method("fedpa", models="cnn4", own=SMALL), {"learning_rate": 0.1, "batch_size": 4}
    start = method.init(task, 3)
    first = {i: method.local_update(make_client(i, "cnn4", **keys), start.taught).payload for i in (0, 1)}
    down = method.broadcast(method.aggregate(start, first, Round(1, task, 2)), 0)
    client, oracle = (make_client(0, "cnn4", round=2, **keys) for _ in range(2))
    upload = method.local_update(client, down).payload
    counts = torch.stack([up.prototypes.counts for up in first.values()]).float()  # (2, 4)
    rows = torch.stack([up.prototypes.values for up in first.values()])
    P = (counts[:, :, None] * rows).sum(0) / counts.sum(0).clamp_min(1)[:, None]
    generator = method.shape.load(task, down.generator.tensors).eval()
    random, network = oracle.generator("generator"), oracle.model.train()
    load_parameters(network, down.weights.tensors)
    for x, y in dealt(oracle):
        z = network.features(x)
        labels = torch.multinomial(torch.tensor([1.0, 1.0, 1.0, 0.0]), 4, replacement=True, generator=random)
        h = generator(labels, torch.rand(4, 3, generator=random)).detach()
        generated = F.nll_loss(network.head(h).log_softmax(1), labels)
        loss = F.nll_loss(network.head(z).log_softmax(1), y) + 25 * 0.98 * generated
        loss = loss + 5 * 0.98 * (z - P[y]).square().sum() / z.numel()
        descend(loss, network.parameters(), 0.1 * 0.99)
    same_weights(network, upload.weights.tensors)


def test_local_steps_replace_epochs_and_the_rate_decays(make_method, make_client, task):
    one = make_method("fedpa", own={**SMALL, "local_steps": 5})
    client = make_client(labels=(0, 1) * 4, learning_rate=0.1)
    update = one.local_update(
        client, replace(one.init(task, 0), taught=_weights_of(client, one, task)).taught
    )
    assert int(update.payload.prototypes.counts.sum()) == 5 * 4
    # the same step in round 1 and, with half the rate, in round 2
    steps = {}
    for number, decay in ((1, 0.5), (2, 0.5)):
        method = make_method("fedpa", own={**SMALL, "local_steps": 1, "client_rate_decay": decay})
        client = make_client(round=number, learning_rate=0.1, batch_order="fixed")
        before = parameters_of(client.model)
        method.local_update(client, _weights_of(client, method, task))
        steps[number] = {n: t - before[n] for n, t in parameters_of(client.model).items()}
    for name, step in steps[1].items():
        assert torch.allclose(steps[2][name], step / 2, atol=1e-6)


def _weights_of(client, method, task):
    taught = method.init(task, 0).taught
    return replace(taught, weights=Weights(parameters_of(client.model)))


def test_means_weigh_by_the_samples_seen(make_method, task):
    # class 0: (1·3 + 5·1)/4 = 2; class 1 of client 1 alone; weights by n_i: (3·0 + 1·4)/4 = 1
    method = make_method("fedpa", own=SMALL)
    state = method.init(task, 0)
    present = torch.tensor([[True, False, False, False], [True, True, False, False]])
    counts = torch.tensor([[3, 0, 0, 0], [1, 2, 0, 0]])
    uploads = {}
    for i, value in ((0, 1.0), (1, 5.0)):
        weights = {n: torch.full_like(t, 4.0 * i) for n, t in state.taught.weights.tensors.items()}
        rows = torch.full((4, 6), value) * present[i].unsqueeze(1)
        uploads[i] = WeightsAndPrototypes(
            Weights(weights, 3 - 2 * i), Prototypes(rows, present[i], counts[i])
        )
    new = method.aggregate(state, uploads, Round(1, task, 2))
    table = new.taught.prototypes
    assert table is not None
    assert table.values[:, 0].tolist() == [2, 5, 0, 0]
    assert table.present.tolist() == [True, True, False, False]
    assert all(bool((tensor == 1).all()) for tensor in new.taught.weights.tensors.values())
    assert method.report(state) == {}
    assert method.report(new)["generator-loss"] > 0


def test_the_generator_still_serves_a_class_of_an_earlier_round(make_method, task):
    method = make_method("fedpa", own=SMALL)
    state = method.init(task, 0)
    for number, held in ((1, [1, 2, 0, 0]), (2, [3, 0, 0, 1])):
        counts = torch.tensor(held)
        rows = Prototypes(torch.ones(4, 6) * (counts > 0)[:, None], counts > 0, counts)
        uploads = {0: WeightsAndPrototypes(Weights(state.taught.weights.tensors, 4), rows)}
        state = method.aggregate(state, uploads, Round(number, task, 1))
    assert state.taught.label_counts.tolist() == [1, 1, 0, 1]
