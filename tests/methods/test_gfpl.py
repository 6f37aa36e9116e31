import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.method import Round
from pbfl_flwr.methods.gfpl.etf import equiangular_frame, projection_layer
from pbfl_flwr.methods.gfpl.payload import Mixtures
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.task import Task
from pbfl_flwr.testing.contract import same_tensors
from pbfl_flwr.training.evaluation import evaluate
from tests.methods.conftest import play

OFF = {"dual_classifier": False, "pseudo_features": False}
SOON = {"start": 1, "interval": 1}


def weights(client):
    return {name: tensor.clone() for name, tensor in client.model.state_dict().items()}


def mixtures(*labels, width=6):
    """One component at 3·e_label a label."""
    means = torch.zeros(len(labels), width)
    for row, label in enumerate(labels):
        means[row, label] = 3.0
    return Mixtures(torch.tensor(labels), torch.ones(len(labels)), means, torch.full_like(means, 0.1))


# When and what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "exchanges", "shows"),
    [
        ({}, [10, 20, 30], 11),
        ({"start": 15}, [20, 30], 21),  # Algorithm 2: t >= t1 and t mod S_T = 0
        ({"start": 3, "interval": 12}, [12, 24], 13),
        (SOON, [*range(1, 31)], 2),
        ({"pseudo_features": False}, [], 0),
    ],
)
def test_rounds_of_exchange_and_a_warning_if_none_shows(make_method, task, own, exchanges, shows):
    method = make_method("gfpl", own=own)
    assert [t for t in range(1, 31) if method.exchanges(t)] == exchanges
    assert method.warnings(shows or 1) == []
    if shows:
        (warning,) = method.warnings(shows - 1)
        assert warning.startswith(
            f"num-server-rounds = {shows - 1}: the first exchange of mixtures is in round {shows - 1}"
        )
        assert method.warnings(shows - 1, method.init(task, 0)) == []  # not again after the run


def test_only_rounds_of_exchange_carry_components(make_method, make_client):
    method = make_method("gfpl", own={"start": 2, "interval": 2, "components": 2})
    holders = {0: (0, 0, 0, 1, 1, 1), 1: (1, 1, 1, 1, 2, 2)}
    for after in play(method, make_client, holders, 5):
        number, state, uploads = after.number, after.state, [u.payload for u in after.updates.values()]
        exchange = number in (2, 4)
        up = [wire.encode(upload) for upload in uploads]
        sizes = [sum(len(array.data) for array in record.values()) for record in up]
        assert all(size > 0 for size in sizes) if exchange else sizes == [0, 0]
        assert (state.broadcast.num_components > 0) == exchange
        assert len(wire.encode(method.broadcast(state, 0))) == int(exchange)
        # two classes a client, two components a class, 2·6 + 1 numbers each
        assert [u.scalars() for u in uploads] == ([4 * 13, 4 * 13] if exchange else [0, 0])
        report = method.report(state)
        assert report["components-stored"] == (0 if number < 2 else 8)
        assert report["classes-stored"] == (0 if number < 2 else 3)


# Switches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("off", "down", "terms", "sends", "remembers"),
    [
        ("dual_classifier", mixtures(0, 3), {"retrain-loss.ce", "loss.ce"}, True, set()),
        (
            "pseudo_features",
            Mixtures.empty(6),
            {"loss.ce", "loss.dot"},
            False,
            {"projection.weight", "projection.bias"},
        ),
    ],
)
def test_each_part_can_be_switched_off(make_method, make_client, off, down, terms, sends, remembers):
    update = make_method("gfpl", own={off: False, **SOON}).local_update(make_client(), down)
    assert {name for name in update.metrics if "loss" in name} == terms
    assert (update.payload.num_components > 0) is sends
    assert set(update.memory) == remembers


def test_without_cross_entropy_a_step_descends_the_dot_regression_alone(make_method, make_client):
    client, alone = make_client(batch_size=8, batch_order="fixed"), make_client()  # one step
    method = make_method("gfpl", own={"cross_entropy": False})
    update = method.local_update(client, Mixtures.empty(6))
    layer, Z = projection_layer(6, 0, {}), equiangular_frame(4, 6, 0)
    inputs, labels = alone.data.train.inputs, alone.data.train.labels
    projected = layer(alone.model.features(inputs))
    loss = sum(
        (1 - h @ Z[:, y] / h.norm()) ** 2 / 8 for h, y in zip(projected, labels, strict=True)
    )  # λ·½ = 1
    body = [p for name, p in alone.model.named_parameters() if not name.startswith("head")]
    slopes = torch.autograd.grad(loss, [*body, layer.weight, layer.bias])
    expected = [p - 0.01 * slope for p, slope in zip([*body, layer.weight, layer.bias], slopes, strict=True)]
    result = [p for name, p in client.model.named_parameters() if not name.startswith("head")]
    result += [update.memory["projection.weight"], update.memory["projection.bias"]]
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(result, expected, strict=True))
    assert torch.equal(client.model.head.weight, alone.model.head.weight)
    assert set(update.metrics) == {"loss.dot"}
    assert method.primary_predictor == "etf"
    retrained = method.local_update(make_client(), mixtures(0, 3)).metrics
    assert {"retrain-loss.dot", "loss.dot"} == {name for name in retrained if "loss" in name}


@pytest.mark.parametrize("own", [{"dual_classifier": False}, {"dot_weight": 0.0}])
def test_a_loss_without_terms_is_refused(make_method, own):
    with pytest.raises(PbflError, match="no loss is left"):
        make_method("gfpl", own={"cross_entropy": False, **own})


# Retraining -------------------------------------------------------------------------------------------------


def retrained(method, client, down):
    """The pass over pseudo-features alone, and the projection's weights after it."""
    dual = method._dual(client) if method.config.dual_classifier else None
    report = method._train(client, dual, down)
    return report, dual[0].weight.detach().clone() if dual else None


@pytest.mark.parametrize("architecture", ["mlp5", "resnet4"])
def test_retraining_leaves_the_extractor_alone(make_method, make_client, architecture):
    method, client = (
        make_method("gfpl"),
        make_client(architecture=architecture, weight_decay=0.1, momentum=0.5),
    )
    before, projection = weights(client), method._dual(client)[0].weight
    report, after = retrained(method, client, mixtures(0, 1, 2))
    changed = {name for name, tensor in weights(client).items() if not torch.equal(tensor, before[name])}
    assert changed == {"head.weight", "head.bias"} or changed == {"head.1.weight", "head.1.bias"}
    assert not torch.equal(after, projection)
    assert report.samples == 3 * 16
    assert report.steps == 12  # batches of 4


@pytest.mark.parametrize(("drop_last", "batch_size"), [("always", 64), ("small", 10), ("never", 47)])
def test_retraining_takes_all_pseudo_features(make_method, make_client, drop_last, batch_size):
    client = make_client(drop_last=drop_last, batch_size=batch_size)
    report, _ = retrained(make_method("gfpl"), client, mixtures(0, 1, 2))
    assert (report.samples, report.steps) == (48, -(-48 // batch_size))


def test_retraining_the_projection_only(make_method, make_client):
    method, client = make_method("gfpl", own={"retrain": "projection"}), make_client()
    before, projection = weights(client), method._dual(client)[0].weight
    _, after = retrained(method, client, mixtures(0, 1))
    assert same_tensors(weights(client), before)
    assert not torch.equal(after, projection)
    with pytest.raises(PbflError, match=r"gfpl\.retrain = 'projection'"):
        make_method("gfpl", own={"retrain": "projection", "dual_classifier": False})


def test_retraining_starts_without_the_momentum_that_the_local_epochs_kept(make_method, make_client):
    method, down = make_method("gfpl"), mixtures(0, 1)
    result = []
    for memory in ({}, {"momentum.head.weight": torch.ones(4, 6), "momentum.head.bias": torch.ones(4)}):
        client = make_client(memory=memory, momentum=0.9, optimizer_state="kept")
        assert set(dict(client.model.named_parameters())) >= {"head.weight", "head.bias"}
        retrained(method, client, down)
        result.append(weights(client))
    assert same_tensors(*result)


# Prediction and memory --------------------------------------------------------------------------------------


def test_the_projection_is_kept_and_predicts(make_method, make_client):
    method = make_method("gfpl")
    assert set(method.predictors(make_client(), Mixtures.empty(6))) == {"head"}
    Z = equiangular_frame(4, 6, 0)
    memory = {"projection.weight": torch.eye(6), "projection.bias": torch.zeros(6)}
    client = make_client(memory=memory)
    scores = method.predictors(client, Mixtures.empty(6))["etf"](9 * Z.T, torch.zeros(4, 4))
    torch.testing.assert_close(scores, 4 / 3 * torch.eye(4) - 1 / 3, atol=1e-6, rtol=0)
    assert set(evaluate(client, method.predictors(client, Mixtures.empty(6))).correct) == {"head", "etf"}


# Server -----------------------------------------------------------------------------------------------------


def test_uploads_between_exchanges_are_ignored(make_method, task):
    method = make_method("gfpl")
    state = method.aggregate(method.init(task, 0), {0: mixtures(0)}, Round(9, task, 1))
    assert state.latest.num_components == state.broadcast.num_components == 0


def test_uploads_are_validated(make_method, task):
    state = make_method("gfpl").init(task, 0)
    with pytest.raises(RejectedPayload, match="5 components of a class, must be at most 4"):
        make_method("gfpl").validate(mixtures(1, 1, 1, 1, 1), state, task)
    by_share = make_method("gfpl", own={"weight": "pi"})
    by_share.validate(mixtures(0, 1), state, task)
    by_share.validate(Mixtures.empty(6), state, task)
    with pytest.raises(RejectedPayload, match="add up to 1"):
        by_share.validate(mixtures(0, 1, 1), state, task)


def test_the_frame_needs_as_many_dimensions_as_classes(make_method):
    narrow = Task(num_classes=7, feature_dim=6, input_shape=(1, 16, 16))
    with pytest.raises(PbflError, match=r"feature-dim = 6: .* feature-dim must be 7 or more"):
        make_method("gfpl").check(narrow, ["mlp5"])
    make_method("gfpl", own={"dual_classifier": False}).check(narrow, ["mlp5"])
    make_method("gfpl").check(Task(6, 6, (1, 16, 16)), ["mlp5"])
