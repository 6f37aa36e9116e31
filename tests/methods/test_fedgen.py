import pytest
import torch
from torch import nn

from pbfl_flwr.method import Round
from pbfl_flwr.methods.generative.fedgen import LabelledHead
from pbfl_flwr.payloads import Weights
from tests.methods.conftest import dealt, descend, same_weights

SMALL = {"noise_dim": 3, "hidden_dim": 8, "server_steps": 60, "server_learning_rate": 0.05}


def answer(value, counts, n=1):
    head = {"head.weight": torch.full((4, 6), float(value)), "head.bias": torch.full((4,), float(value))}
    return LabelledHead(Weights(head, n), torch.tensor(counts))


def test_heads_are_averaged_and_counts_of_all_known_clients_added(make_method, task):
    method = make_method("fedgen", own=SMALL)
    state = method.init(task, 0)
    first = method.aggregate(
        state, {0: answer(0, [1, 0, 2, 0], 3), 1: answer(4, [0, 1, 0, 0])}, Round(1, task, 3)
    )
    assert torch.equal(first.taught.weights.tensors["head.bias"], torch.ones(4))  # (3·0 + 1·4)/4
    assert first.taught.label_counts.tolist() == [1, 1, 2, 0]
    second = method.aggregate(first, {1: answer(4, [0, 5, 0, 0])}, Round(2, task, 3))
    assert second.taught.label_counts.tolist() == [1, 5, 2, 0]
    assert state.taught.label_counts.tolist() == [0, 0, 0, 0]


def test_the_generator_learns_features_that_the_averaged_head_classifies(make_method, task):
    method = make_method("fedgen", own=SMALL, batch_size=32)
    state = method.init(task, 0)
    assert method.broadcast(state, 0).generator.tensors == {}  # clients use it once it was trained
    head = {"head.weight": torch.eye(4, 6), "head.bias": torch.zeros(4)}
    uploads = {0: LabelledHead(Weights(head, 1), torch.tensor([5, 5, 5, 0]))}
    losses = []
    for number in (1, 2, 3):
        state = method.aggregate(state, uploads, Round(number, task, 1))
        losses.append(method.report(state)["generator-loss"])
    assert losses[2] < losses[0] / 2
    network = method.shape.load(task, method.broadcast(state, 0).generator.tensors)
    features, labels, _ = network.draw(torch.tensor([1, 1, 1, 0]), 30, torch.Generator().manual_seed(1))
    assert float((features[:, :4].argmax(1) == labels).float().mean()) > 0.9


def test_a_second_round_of_a_client_follows_the_reference_loop(make_method, make_client, task):
    method, keys = make_method("fedgen", models="cnn4", own=SMALL), {"learning_rate": 0.1, "batch_size": 4}
    start = method.init(task, 3)
    first = {i: method.local_update(make_client(i, "cnn4", **keys), start.taught).payload for i in (0, 1)}
    down = method.broadcast(method.aggregate(start, first, Round(1, task, 2)), 0)
    client, oracle = (make_client(0, "cnn4", round=2, **keys) for _ in range(2))
    method.local_update(client, down)
    method.install(oracle, down)
    generator = method.shape.load(task, down.generator.tensors).train()  # it normalises by the batch it draws
    random, network = oracle.generator("generator"), oracle.model.train()
    for x, y in dealt(oracle):
        labels = torch.multinomial(torch.tensor([6.0, 6.0, 4.0, 0.0]), 4, replacement=True, generator=random)
        h = generator(labels, torch.rand(4, 3, generator=random)).detach()
        cross_entropy = nn.functional.cross_entropy
        loss = cross_entropy(network(x), y) + cross_entropy(network.head(h), labels)
        descend(loss, network.parameters(), 0.1)
    same_weights(network, client.model.state_dict())


@pytest.mark.parametrize(("drop_last", "counts"), [("small", [3, 1, 1, 0]), ("always", [3, 1, 0, 0])])
def test_labels_are_counted_as_the_loader_deals_them(make_method, make_client, task, drop_last, counts):
    method = make_method("fedgen", own=SMALL)
    client = make_client(labels=(0, 0, 1, 0, 2), batch_size=4, drop_last=drop_last)
    sent = method.local_update(client, method.init(task, 0).taught).payload.label_counts
    assert sent.tolist() == counts
    assert sent.dtype == torch.int64


@pytest.mark.parametrize(("n", "counts"), [(1, [500, 0, 0, 0]), (500, [1, 0, 0, 0])])
def test_an_upload_claims_the_samples_of_its_weights_or_of_its_labels(n, counts):
    assert answer(0, counts, n).magnitudes().samples == 500


def test_without_persistence_clients_always_see_the_initial_generator(make_method, make_client, task):
    method = make_method("fedgen", own={**SMALL, "persist": False})
    state = method.init(task, 0)
    start = dict(method.broadcast(state, 0).generator.tensors)
    assert start
    later = method.aggregate(state, {0: answer(1, [1, 1, 1, 1])}, Round(1, task, 1))
    assert all(torch.equal(later.taught.generator.tensors[name], tensor) for name, tensor in start.items())
    assert method.report(later) == {}
    assert "loss.generated" in method.local_update(make_client(), method.broadcast(later, 0)).metrics
