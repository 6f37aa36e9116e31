import math

import pytest
import torch
from torch.nn import functional as F

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Round
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.methods.fednh import SCALE, move_rows, spread_rows
from pbfl_flwr.payloads import Prototypes, RejectedPayload, Weights, WeightsAndPrototypes
from pbfl_flwr.task import Task
from tests.methods.conftest import descend


def test_rows_at_the_start():
    rows = spread_rows(5, 9, seed=1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(5), atol=1e-6, rtol=0)
    assert torch.equal(rows, spread_rows(5, 9, seed=1))
    plane = spread_rows(6, 2, seed=1)  # 60 degrees apart
    torch.testing.assert_close((plane * plane.roll(1, 0)).sum(1), torch.full((6,), 0.5), atol=1e-6, rtol=0)
    crowded = spread_rows(7, 3, seed=1)  # more classes than dimensions
    torch.testing.assert_close(crowded.norm(dim=1), torch.ones(7))


def test_rows_move_and_absent_classes_stay_bit_for_bit():
    # W_0 = (1, 0), m_0 = 4·(0, 1): 0.5·(1, 0) + 0.5·(0, 1), normalised (√½, √½)
    rows = F.normalize(torch.tensor([[1.0, 0.0], [0.3, 0.7]]), dim=1)
    means = Prototypes(torch.tensor([[0.0, 4.0], [0.0, 0.0]]), torch.tensor([True, False]))
    moved = move_rows(rows, means, 0.5)
    torch.testing.assert_close(moved[0], torch.full((2,), math.sqrt(0.5)))
    assert torch.equal(moved[1], rows[1])


def upload(values, counts, weight, n):
    counts = torch.tensor(counts)
    table = Prototypes(torch.tensor(values), counts > 0, counts)
    return WeightsAndPrototypes(Weights({SCALE: torch.tensor([weight])}, n), table)


def test_server_weighs_class_vectors_by_counts_and_networks_alike(make_method):
    task = Task(2, 2, (1, 16, 16))
    method = make_method("fednh", models="cnn4", feature_dim=2, own={"smoothing": 0.0})
    state = WeightsAndPrototypes(
        Weights({SCALE: torch.zeros(1)}), Prototypes(torch.eye(2), torch.ones(2, dtype=torch.bool))
    )
    # class 0: (3·(1, 0) + 4·(0, 1))/7, normalised (0.6, 0.8); class 1: nobody; s: (1 + 3)/2, not by samples
    uploads = {
        0: upload([[1.0, 0.0], [0.0, 0.0]], [3, 0], 1.0, 3),
        1: upload([[0.0, 1.0], [0.0, 0.0]], [4, 0], 3.0, 400),
    }
    after = method.aggregate(state, uploads, Round(1, task, 2))
    torch.testing.assert_close(after.prototypes.values, torch.tensor([[0.6, 0.8], [0.0, 1.0]]))
    assert float(after.weights.tensors[SCALE]) == 2.0
    assert after.prototypes.counts is None
    assert method.aggregate(state, {}, Round(1, task, 2)) is state


def test_client_trains_body_and_scale_on_cosine_logits(make_method, make_client, task):
    method = make_method("fednh", models="cnn4", own={"scale": 3.0})
    state = method.init(task, 2)
    client = make_client(architecture="cnn4", batch_size=8, batch_order="fixed", learning_rate=0.1)
    twin = make_client(architecture="cnn4")
    method.install(twin, state)
    s = torch.tensor([3.0], requires_grad=True)
    inputs, labels, W = twin.data.train.inputs, twin.data.train.labels, state.prototypes.values
    loss = F.cross_entropy(s * F.normalize(twin.model.features(inputs), dim=1) @ W.T, labels)
    body = {name: p for name, p in twin.model.named_parameters() if not name.startswith("head.")}
    descend(loss, [*body.values(), s], 0.1)
    update = method.local_update(client, state)
    sent = update.payload.weights.tensors
    assert sent.keys() == {*body, SCALE}
    for name, parameter in {**body, SCALE: s}.items():
        torch.testing.assert_close(sent[name], parameter.detach(), atol=1e-5, rtol=1e-4)
    # μ̂: the normalised mean of unit features; class 3 is not held
    client.model.eval()
    units = F.normalize(client.model.features(inputs), dim=1).detach()
    for j in range(3):
        expected = F.normalize(units[labels == j].mean(0), dim=0)
        torch.testing.assert_close(update.payload.prototypes.values[j], expected, atol=1e-5, rtol=1e-4)
    assert update.payload.prototypes.counts.tolist() == [3, 3, 2, 0]


def test_prediction_is_the_received_model_before_and_the_own_after_training(make_method, make_client, task):
    method = make_method("fednh", models="cnn4", own={"scale": 3.0})
    state, client = method.init(task, 2), make_client(architecture="cnn4")
    z = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    method.install(client, state)
    cosines = F.normalize(z, dim=1) @ state.prototypes.values.T
    scores = method.predictors(client, state)["head"](z, torch.zeros(5, 4))
    torch.testing.assert_close(scores, 3.0 * cosines)
    update = method.local_update(client, state)
    scores = method.predictors(client, state)["head"](z, torch.zeros(5, 4))
    torch.testing.assert_close(scores.detach(), update.payload.weights.tensors[SCALE] * cosines)


def test_scale_starts_as_in_the_reference(make_method):
    assert make_method("fednh", models="resnet8").scale == 20.0
    assert make_method("fednh", models="cnn4").scale == 1.0
    assert make_method("fednh", models="cnn4", own={"scale": 7.0}).scale == 7.0


def test_a_scale_that_clients_would_reject_is_refused():
    with pytest.raises(
        PbflError, match=r"^fednh.scale = 1000000000.0: must be less than or equal to 1000000"
    ):
        parse({"method": "fednh", "fednh.scale": 1e9}, SECTIONS)


def test_a_parameter_of_the_network_may_be_called_scale(make_method, make_client, task):
    odd = "tests.methods.tiny_nets:Odd"
    method = make_method("fednh", models=odd, own={"scale": 3.0})
    state, client = method.init(task, 2), make_client(architecture=odd, learning_rate=0.1)
    assert (float(state.weights.tensors["scale"]), float(state.weights.tensors[SCALE])) == (2.0, 3.0)
    sent = method.local_update(client, state).payload.weights.tensors
    assert torch.equal(sent["scale"], client.model.scale.detach())
    assert float(sent[SCALE]) not in (3.0, float(sent["scale"]))


def test_class_vectors_without_counts_are_rejected(make_method, make_client, task):
    method = make_method("fednh", models="cnn4")
    state = method.init(task, 0)
    good = method.local_update(make_client(architecture="cnn4"), state).payload
    method.validate(good, state, task)
    bare = WeightsAndPrototypes(good.weights, Prototypes(good.prototypes.values, good.prototypes.present))
    with pytest.raises(RejectedPayload, match="lack their counts"):
        method.validate(bare, state, task)
