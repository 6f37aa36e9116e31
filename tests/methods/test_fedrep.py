import pytest
import torch

from pbfl_flwr.methods import fedrep
from pbfl_flwr.models.contract import body_names, head_names
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.training.loop import classification, fixed_features
from tests.methods.conftest import dealt, descend, same_weights


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_each_phase_leaves_the_other_half_alone(make_method, make_client):
    method, client = make_method("fedrep"), make_client(architecture="resnet4")
    start = snapshot(client.model)
    method.phases.head_phase(client)
    after_head = snapshot(client.model)
    for name in body_names(client.model):
        assert torch.equal(after_head[name], start[name])
    assert any(not torch.equal(after_head[name], start[name]) for name in head_names(client.model))
    assert not torch.equal(after_head["stages.0.1.running_mean"], start["stages.0.1.running_mean"])
    method.phases.body_phase(client, classification(client.model))
    after_body = snapshot(client.model)
    for name in head_names(client.model):
        assert torch.equal(after_body[name], after_head[name])
    assert any(not torch.equal(after_body[name], after_head[name]) for name in body_names(client.model))
    assert all(parameter.requires_grad for parameter in client.model.parameters())


def test_each_phase_draws_its_own_order(make_method, make_client, task):
    method, settings = make_method("fedrep", own={"head_epochs": 2}), {"batch_size": 3, "learning_rate": 0.1}
    client, oracle = (make_client(architecture="cnn4", **settings) for _ in range(2))
    state, w = method.init(task, 0), oracle.model
    method.install(oracle, state)
    for phase, names, epochs in (("head", head_names(w), 2), ("body", body_names(w), 1)):
        for x, y in dealt(oracle, phase, epochs):
            descend(torch.nn.functional.cross_entropy(w(x), y), map(w.get_parameter, names), 0.1)
    method.local_update(client, state)
    same_weights(w, client.model.state_dict())


def test_other_modules_are_trained_with_the_body(make_method, make_client):
    client, companion = make_client(architecture="cnn4"), torch.nn.Linear(6, 4).eval()
    before = companion.weight.detach().clone()

    def loss(inputs, labels):
        return {"ce": torch.nn.functional.cross_entropy(companion(client.model.features(inputs)), labels)}

    make_method("fedrep").phases.body_phase(client, loss, [companion])
    assert companion.training
    assert not torch.equal(companion.weight, before)


def test_stages_keep_the_hidden_layer_private(make_method, make_client, task):
    method, client = make_method("fedrep", own={"shared": "stages"}), make_client(architecture="cnn4")
    state = method.init(task, 0)
    assert {name.split(".")[0] for name in state.tensors} == {"stages"}
    method.install(client, state)
    start = snapshot(client.model)
    method.phases.head_phase(client)
    changed = {name for name in start if not torch.equal(client.model.state_dict()[name], start[name])}
    assert changed == {"neck.1.weight", "neck.1.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("architecture", "computed"), [("cnn4", True), ("mlp5", True), ("cnn2", False), ("resnet4", False)]
)
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_features_are_computed_once_only_where_nothing_in_the_body_draws_or_counts(
    architecture, computed, layout, make_client
):
    client = make_client(architecture=architecture)
    optimize_layout(client.model, layout)
    assert (fixed_features(client) is not None) == computed


def test_features_of_a_body_that_a_user_has_altered_are_computed_anew(make_client):
    def dropped(module, inputs, output):
        return torch.nn.functional.dropout(output, training=module.training)

    by_hook, by_function = make_client(architecture="cnn4"), make_client(architecture="cnn4")
    by_hook.model.neck.register_forward_hook(dropped)
    plain = by_function.model.features
    by_function.model.features = lambda inputs: torch.nn.functional.dropout(plain(inputs))
    assert fixed_features(by_hook) is None
    assert fixed_features(by_function) is None


def test_a_head_learns_the_same_from_features_computed_once(make_method, make_client, monkeypatch):
    settings = {"batch_size": 3, "learning_rate": 0.1}
    method = make_method("fedrep", own={"head_epochs": 3})
    once, each = make_client(architecture="cnn4", **settings), make_client(architecture="cnn4", **settings)
    calls, features = [], type(once.model).features

    def counted(model, inputs):
        calls.append(len(inputs))
        return features(model, inputs)

    monkeypatch.setattr(type(once.model), "features", counted)
    report = method.phases.head_phase(once)
    assert calls == [8]
    monkeypatch.setattr(fedrep, "fixed_features", lambda client: None)
    expected = method.phases.head_phase(each)
    assert report.steps == expected.steps > 3
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)
    same_weights(each.model, once.model.state_dict())
