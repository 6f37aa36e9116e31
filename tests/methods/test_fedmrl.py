"""FedMRL: a round against the reference's loop, whom predictions are made with, what is kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Round, WithInputs
from pbfl_flwr.methods.averaging import load_parameters
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import Weights
from pbfl_flwr.serving.states import read_state, state_file
from pbfl_flwr.task import Task
from pbfl_flwr.training.evaluation import evaluate
from tests.flower.inprocess import federation
from tests.methods.conftest import TASK, dealt, same_weights

WIDTH = 3
INNER = replace(TASK, feature_dim=WIDTH)


def fused(shared, projection, model, x):
    return projection(torch.cat([shared.features(x), model.features(x)], 1))


@pytest.fixture
def fedmrl(make_method):
    return lambda **keys: make_method("fedmrl", own={"width": WIDTH, "auxiliary": "mlp5"}, **keys)


def test_a_round_follows_the_reference_loop(fedmrl, make_client):
    """One loss, three optimisers; the first s fused features are the shared network's."""
    method, client, oracle = fedmrl(), make_client(learning_rate=0.1), make_client(learning_rate=0.1)
    state = method.init(TASK, 5)
    update = method.local_update(client, state)

    shared = build_model("mlp5", INNER, 5)
    with seeds.seeded(0):
        projection = nn.Linear(6 + WIDTH, 6)
    networks = (oracle.model, shared, projection)
    steps = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
    for x, y in dealt(oracle):
        z = fused(shared, projection, oracle.model, x)
        loss = F.cross_entropy(oracle.model.head(z), y) + F.cross_entropy(shared.head(z[:, :WIDTH]), y)
        for step in steps:
            step.zero_grad()
        loss.backward()
        for step in steps:
            step.step()
    assert update.payload.num_examples == 8
    same_weights(shared, update.payload.tensors)
    same_weights(oracle.model, client.model.state_dict())
    same_weights(projection, {name[4:]: t for name, t in update.memory.items() if name.startswith("map.")})


@pytest.mark.parametrize("moment", ["before", "after"])
def test_scores_are_of_the_fused_features(fedmrl, make_client, moment):
    """Before local training with the network that has just arrived, after it with the one that was trained."""
    method, client = fedmrl(), make_client(learning_rate=0.3)
    client = replace(client, evaluation=client.evaluation.model_copy(update={"evaluate_moment": moment}))
    first = method.init(TASK, 5)
    update = method.local_update(client, first)
    arrived = Weights({name: w + 0.1 for name, w in first.tensors.items()})
    client = replace(client, memory=update.memory)
    predictors = method.predictors(client, arrived)
    shared, projection = build_model("mlp5", INNER, 0), nn.Linear(6 + WIDTH, 6)
    load_parameters(shared, (arrived if moment == "before" else update.payload).tensors)
    projection.load_state_dict(
        {name[4:]: tensor for name, tensor in update.memory.items() if name.startswith("map.")}
    )
    x = client.data.test.inputs
    expected = client.model.head(fused(shared, projection, client.model, x)).detach()
    head = predictors["head"]
    assert isinstance(head, WithInputs)
    actual = head(x, client.model.features(x), torch.zeros(3, 4))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    right = int((expected.argmax(1) == client.data.test.labels).sum())
    scores = evaluate(client, predictors)
    assert scores.correct == {"head": right}
    assert scores.loss == pytest.approx(float(F.cross_entropy(expected, client.data.test.labels)), rel=1e-5)


def test_the_average_is_weighted_but_not_under_htfl(fedmrl):
    uploads = {0: Weights({"w": torch.tensor([0.0])}, 1), 1: Weights({"w": torch.tensor([4.0])}, 3)}
    nothing = Weights({"w": torch.zeros(1)})
    means = [
        float(fedmrl(**keys).aggregate(nothing, uploads, Round(1, TASK, 2)).tensors["w"])
        for keys in ({}, {"protocol": "htfl"}, {"protocol": "htfl", "weighting": "samples"})
    ]
    assert means == [3.0, 2.0, 3.0]


def test_under_htfl_every_round_starts_from_the_initial_map(fedmrl, make_client):
    method, client = fedmrl(protocol="htfl"), make_client(protocol="htfl")
    update = method.local_update(client, method.init(TASK, 0))
    assert not [name for name in update.memory if name.startswith("map.")]
    assert method.predictors(replace(client, memory=update.memory), method.init(TASK, 0))


def test_widths(make_method):
    assert make_method("fedmrl", feature_dim=512).width == 128
    assert make_method("fedmrl", feature_dim=2).width == 1
    with pytest.raises(PbflError, match=r"fedmrl\.width = 7: must be at most feature-dim, 6"):
        make_method("fedmrl", own={"width": 7}).check(TASK, ["mlp5"])
    with pytest.raises(PbflError, match=r"fedmrl\.auxiliary: model 'cnn4'"):
        make_method("fedmrl").check(Task(4, 6, (2,)), ["mlp5"])


def test_a_client_has_no_network_that_predicts_alone(tmp_path):
    keys: dict[str, Any] = {"num_clients": 1, "num_server_rounds": 1, "models": "cnn2"}
    run = federation(tmp_path, "fedmrl", on_disk=True, **keys).run()
    with pytest.raises(PbflError, match=r"from a method whose clients predict with two networks \(fedmrl\)"):
        read_state(state_file(run.directory.path, "0"))
