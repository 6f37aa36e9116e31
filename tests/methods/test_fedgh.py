import pytest
import torch

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Round
from pbfl_flwr.payloads import Prototypes, RejectedPayload, Weights
from pbfl_flwr.prototypes.privacy import epsilon_of
from tests.methods.conftest import descend, same_weights


def zero_head():
    return Weights({"head.weight": torch.zeros(4, 6), "head.bias": torch.zeros(4)})


def one_prototype(label, value):
    table = Prototypes.empty(4, 6)
    values, present = table.values.clone(), table.present.clone()
    values[label], present[label] = value, True
    return Prototypes(values, present)


def test_a_client_trains_its_whole_network_from_the_head_it_received(make_method, make_client):
    settings = {"batch_size": 8, "batch_order": "fixed", "learning_rate": 0.1}
    method, client, twin = make_method("fedgh"), make_client(**settings), make_client(**settings).model
    down = Weights({"head.weight": torch.full((4, 6), 0.3), "head.bias": torch.tensor([0.0, 1.0, 2.0, 3.0])})
    twin.head.load_state_dict({name.removeprefix("head."): t for name, t in down.tensors.items()})
    loss = torch.nn.functional.cross_entropy(twin(client.data.train.inputs), client.data.train.labels)
    descend(loss, twin.parameters(), 0.1)
    assert method.local_update(client, down).metrics["loss.ce"] == pytest.approx(loss.item(), rel=1e-5)
    same_weights(twin, client.model.state_dict())


def test_uploads_are_clipped_and_noised(make_method, make_client):
    sample = {"dp_clip": 0.1, "dp_unit": "sample", "min_class_count": 1}
    client = make_client()
    upload = make_method("fedgh", **sample).local_update(client, zero_head()).payload
    with torch.no_grad():
        features = client.model.eval().features(client.data.train.inputs)
    clipped = [row * min(1.0, 0.1 / float(row.norm())) for row in features]
    assert features.norm(dim=1).max() > 0.1
    for label in (0, 1, 2):
        rows = [
            row for row, own in zip(clipped, client.data.train.labels.tolist(), strict=True) if own == label
        ]
        torch.testing.assert_close(upload.values[label], torch.stack(rows).mean(0))
    noised = make_method("fedgh", dp_noise=2.0, **sample)
    update = noised.local_update(make_client(memory={"releases": torch.tensor(2)}), zero_head())
    assert update.metrics["epsilon"] == epsilon_of(2.0, 3, 1e-5)
    assert int(update.memory["releases"]) == 3
    with pytest.raises(PbflError, match="needs every sample exactly once"):
        make_method("fedgh", drop_last="always", **sample)


def test_uploads_without_prototypes_are_skipped(make_method, task):
    method, sent = make_method("fedgh"), one_prototype(1, torch.eye(6)[0])
    both = method.aggregate(zero_head(), {0: Prototypes.empty(4, 6), 1: sent}, Round(1, task, 2))
    alone = method.aggregate(zero_head(), {1: sent}, Round(1, task, 2))
    assert torch.equal(both.tensors["head.weight"], alone.tensors["head.weight"])
    assert alone.tensors["head.weight"].any()
    state = method.init(task, 3)
    assert method.aggregate(state, {0: Prototypes.empty(4, 6)}, Round(1, task, 1)) is state
    assert make_method("fedgh", batch_size=7).batch_size == 7  # prototypes a batch


def test_server_follows_a_literal_loop_over_shuffled_batches(make_method, task):
    method = make_method(
        "fedgh", own={"server_epochs": 3, "server_batch_size": 2, "server_learning_rate": 0.1}
    )
    random = torch.Generator().manual_seed(0)
    sent = {i: Prototypes(torch.randn(4, 6, generator=random), torch.tensor([True] * 4)) for i in (0, 1)}
    result = method.aggregate(method.init(task, 1), sent, Round(5, task, 2, seed=9)).tensors

    head = torch.nn.Linear(6, 4)
    head.load_state_dict({k.removeprefix("head."): v for k, v in method.init(task, 1).tensors.items()})
    pairs = [(sent[i].values[j], j) for i in (0, 1) for j in range(4)]
    order = seeds.generator(9, "fedgh", 5)
    for _ in range(3):
        shuffled = torch.randperm(8, generator=order).tolist()
        for start in range(0, 8, 2):
            chosen = [pairs[n] for n in shuffled[start : start + 2]]
            logits = head(torch.stack([vector for vector, _ in chosen]))
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor([label for _, label in chosen]))
            descend(loss, head.parameters(), 0.1)
    same_weights(torch.nn.ModuleDict({"head": head}), result)


def test_uploads_are_checked(make_method, task):
    method = make_method("fedgh")
    state = method.init(task, 3)
    with pytest.raises(RejectedPayload, match="5 wide, expected 6"):
        method.validate(Prototypes.empty(4, 5), state, task)
    with pytest.raises(RejectedPayload, match="unexpected counts"):
        method.validate(
            Prototypes(torch.zeros(4, 6), torch.zeros(4).bool(), torch.zeros(4).long()), state, task
        )
