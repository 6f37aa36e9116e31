"""FedL2G: the gradient a step ahead written out, a round's training, the server's step, the warm-up."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from pbfl_flwr.data import Shard
from pbfl_flwr.method import Round
from pbfl_flwr.methods.fedl2g import Guidance
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.training.look_ahead import look_ahead, some_batches
from tests.methods.conftest import TASK, same_weights
from tests.methods.tiny_nets import Plain

LABELS = (0, 1, 2, 0, 0, 1, 1, 0, 2)
FORMS = {"features": 6, "logits": 4}
TRAINING = {"protocol": "htfl", "learning_rate": 0.1}  # in stored order


class Doubled(nn.Module):
    """A network for functional_call: returns features and logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        features = self.model.features(x)
        return features, self.model.head(features)


@pytest.fixture
def fedl2g(make_method):
    return lambda form="features", **own: make_method(
        "fedl2g", own={"form": form, "warm_up_rounds": 0, **own}, **TRAINING
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_round_and_its_gradient_follow_the_paper(fedl2g, make_client, form):
    method, client, oracle = fedl2g(form), make_client(labels=LABELS, **TRAINING), make_client(labels=LABELS)
    down = method.init(TASK, 3)
    update = method.local_update(client, down)

    v = down.values.clone()
    x, y = oracle.data.train.inputs, oracle.data.train.labels
    quiz, study = (x[:4], y[:4]), (x[4:], y[4:])  # a batch of 4 is the quiz

    def loss(outputs, labels, vectors):
        features, logits = outputs
        guided = features if form == "features" else logits
        return F.cross_entropy(logits, labels) + ((guided - vectors[labels]) ** 2).mean()

    network = Doubled(oracle.model)
    step = torch.optim.SGD(network.parameters(), lr=0.1)
    step.zero_grad()
    loss(network(study[0][:4]), study[1][:4], v).backward()  # the fifth sample is no complete batch
    nn.utils.clip_grad_norm_(network.parameters(), 100)
    step.step()
    same_weights(oracle.model, client.model.state_dict())

    (chosen,) = some_batches(client, Shard(*study), 1)
    weights = {name: p.detach().requires_grad_() for name, p in network.named_parameters()}
    v.requires_grad_()
    ahead = torch.autograd.grad(
        loss(functional_call(network, weights, chosen[0]), chosen[1], v),
        list(weights.values()),
        create_graph=True,
        allow_unused=True,
    )
    moved = {
        name: w if slope is None else w - 0.1 * slope
        for (name, w), slope in zip(weights.items(), ahead, strict=True)
    }
    judged = F.cross_entropy(functional_call(network, moved, quiz[0])[1], quiz[1])
    (expected,) = torch.autograd.grad(judged, v)
    torch.testing.assert_close(update.payload.values, expected, atol=1e-8, rtol=1e-4)
    assert expected.abs().max() > 1e-5
    assert update.payload.present.tolist() == expected.any(dim=1).tolist()
    assert update.metrics["loss.quiz"] == pytest.approx(float(judged.detach()), rel=1e-5)


def test_the_gradient_of_a_clients_step_is_bounded(fedl2g, make_client):
    method, client = fedl2g(), make_client(labels=LABELS, **TRAINING)  # one step on four samples
    before = nn.utils.parameters_to_vector(client.model.parameters()).detach()
    down = method.init(TASK, 3)
    method.local_update(client, replace(down, values=1e4 * down.values))
    step = nn.utils.parameters_to_vector(client.model.parameters()).detach() - before
    assert float(step.norm()) == pytest.approx(0.1 * 100, rel=1e-4)


def test_the_gradient_is_the_slope_of_the_quiz(make_client):
    """Against finite differences, in float64; the network and its buffers stay."""
    client = make_client(architecture="tests.methods.tiny_nets:normed")
    client.model.double()
    x, y = client.data.train.inputs.double(), client.data.train.labels
    before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    v = torch.zeros(4, 6, dtype=torch.float64)

    def learnt(vectors):
        def of(model):
            return lambda inputs, labels: {"mse": F.mse_loss(model.features(inputs), vectors[labels])}

        return of, [(x[:4], y[:4])]

    judged = (
        (lambda model: lambda inputs, labels: {"ce": F.cross_entropy(model(inputs), labels)}),
        [(x[4:], y[4:])],
    )
    gradient, value = look_ahead(client.model, learnt(w := v.clone().requires_grad_()), judged, 0.5, w)
    for row, column in ((0, 0), (1, 3), (2, 5)):
        ends = []
        for sign in (1, -1):
            moved = v.clone()
            moved[row, column] = sign * 1e-4
            ends.append(look_ahead(client.model, learnt(m := moved.requires_grad_()), judged, 0.5, m)[1])
        assert float(ends[0] - ends[1]) / 2e-4 == pytest.approx(
            float(gradient[row, column]), rel=1e-3, abs=1e-9
        )
    assert float(value) > 0
    assert gradient[3].tolist() == [0] * 6  # nobody has class 3
    for name, tensor in client.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_quiz_is_taken_in_training_mode_whatever_the_networks_mode(make_client):
    """That is, BatchNorm by the batch; without a step (a rate of 0) it is the network's own loss."""
    client = make_client(architecture="tests.methods.tiny_nets:normed")
    x, y = 10 * client.data.train.inputs, client.data.train.labels
    model, v = client.model.eval(), torch.zeros(4, 6, requires_grad=True)
    learnt = (lambda net: lambda x, y: {"mse": F.mse_loss(net.features(x), v[y])}), [(x, y)]
    judged = (lambda net: lambda x, y: {"ce": F.cross_entropy(net(x), y)}), [(x, y)]
    _, value = look_ahead(model, learnt, judged, 0.0, v)
    assert not model.training
    with torch.no_grad():
        evaluated, expected = F.cross_entropy(model(x), y), F.cross_entropy(model.train()(x), y)
    torch.testing.assert_close(value, expected)
    assert abs(float(evaluated - expected)) > 0.001


def test_takes_networks_that_cannot_be_copied(fedl2g, make_client):
    method = fedl2g()
    plain, other, weighted = (
        method.local_update(
            make_client(architecture=f"tests.methods.tiny_nets:{name}"), method.init(TASK, 3)
        ).payload
        for name in ("Plain", "by_function", "weight_normed")
    )
    assert torch.equal(plain.values, other.values)
    assert plain.values.any()
    assert weighted.values.any()


def test_what_no_weight_depends_on_has_the_gradient_zero():
    """θ is the head alone, and v acts on the body, which is frozen."""
    model: Any
    model, v = Plain(TASK), torch.zeros(4, 6, requires_grad=True)
    model.body.requires_grad_(False)
    batch = [(torch.randn(3, 1, 16, 16), torch.arange(3))]

    def ce(net, x, y):
        return F.cross_entropy(net.head(net.features(x)), y)

    learnt = (lambda net: lambda x, y: {"ce": ce(net, x, y), "mse": F.mse_loss(net.features(x), v[y])}), batch
    judged = (lambda net: lambda x, y: {"ce": ce(net, x, y)}), batch
    gradient, value = look_ahead(model, learnt, judged, 0.1, v)
    assert torch.equal(gradient, torch.zeros(4, 6))
    assert value > 0


class Attending(nn.Module):
    """Attention without dropout, for which torch has a fused kernel without a second derivative."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 4)

    def features(self, inputs):
        return self.layer(inputs).mean(dim=1)


def test_attention_can_be_differentiated_twice():
    model: Any
    model, v = Attending(), torch.zeros(4, 4, requires_grad=True)
    batch = [(torch.randn(6, 5, 4), torch.arange(6) % 4)]
    learnt = (lambda net: lambda x, y: {"mse": F.mse_loss(net.features(x), v[y])}), batch
    judged = (lambda net: lambda x, y: {"ce": F.cross_entropy(net.head(net.features(x)), y)}), batch
    assert look_ahead(model, learnt, judged, 0.1, v)[0].any()


@pytest.mark.parametrize(("form", "rate"), [("features", 100.0), ("logits", 0.1)])
def test_the_server_descends_the_mean_of_those_who_sent_a_class(fedl2g, form, rate):
    method, width = fedl2g(form), FORMS[form]
    state = method.init(TASK, 0)
    assert state.values.shape == (4, width)
    one, two = torch.zeros(4, width), torch.zeros(4, width)
    one[0, 0], one[1, 1], two[1, 1] = 0.3, 0.1, 0.5
    uploads = {0: Guidance(one, one.any(1)), 1: Guidance(two, two.any(1))}
    expected = state.values.clone()
    expected[0, 0] -= rate * 0.3
    expected[1, 1] -= rate * 0.3
    torch.testing.assert_close(method.aggregate(state, uploads, Round(1, TASK, 2)).values, expected)
    assert method.aggregate(state, {}, Round(1, TASK, 2)) is state
    large = Guidance(one * 1000, one.any(1))  # of norm 316, bounded by 100
    moved = state.values - method.aggregate(state, {0: large}, Round(1, TASK, 2)).values
    assert float(moved.norm()) == pytest.approx(100 * rate, rel=1e-4)


def test_in_the_warm_up_nobody_trains(fedl2g, make_client):
    method, client = fedl2g(warm_up_rounds=2), make_client(labels=LABELS)
    before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    down = method.init(TASK, 0)
    update = method.local_update(replace(client, round=2), down)
    assert [*update.metrics] == ["loss.quiz"]
    assert update.payload.num_present
    same_weights(client.model, before)
    trained = method.local_update(replace(client, round=3), down)
    assert {"loss.ce", "loss.guidance", "loss.quiz"} == {*trained.metrics}
    assert method.warnings(2) == ["fedl2g.warm-up-rounds = 2: no client trains within the run's 2 rounds"]
    assert method.warnings(3) == []
    assert method.warnings(2, down) == []


@pytest.mark.parametrize(
    ("n", "batches", "quiz"), [(9, 1, 4), (20, 2, 8), (6, 2, 2), (5, 1, 1), (4, 1, 2), (1, 1, 0)]
)
def test_the_quiz_leaves_a_batch_to_train_on(fedl2g, make_client, n, batches, quiz):
    """And it is drawn once: the same samples in every round, others on another client."""
    client = make_client(labels=[0] * n)
    drawn = []
    for round in (1, 2):
        asked, study = fedl2g(quiz_batches=batches)._parts(replace(client, round=round))
        assert (len(asked), len(study)) == (quiz, n - quiz)
        drawn.append(asked.inputs)
    assert torch.equal(*drawn)
    samples = {tuple(x.flatten().tolist()) for part in (asked, study) for x in part.inputs}
    assert len(samples) == n


def test_what_does_not_fit_is_refused(fedl2g):
    method = fedl2g("logits")
    with pytest.raises(RejectedPayload, match="6 wide, expected 4"):
        method.validate(Guidance.empty(4, 6), method.init(TASK, 0), TASK)


def test_the_published_scripts_rates(make_method):
    assert make_method("fedl2g").rate == 100.0
    assert make_method("fedl2g", own={"form": "logits", "server_learning_rate": 0.01}).rate == 0.01
