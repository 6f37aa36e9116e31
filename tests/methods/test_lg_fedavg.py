from dataclasses import replace

import pytest
import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Round
from pbfl_flwr.methods.averaging import copies, shared_parameters
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import RejectedPayload, Weights
from pbfl_flwr.task import Task


def head_of(model):
    return Weights(copies(shared_parameters(model, "head")))


def test_published_costs_to_the_printed_digit(make_method):
    # 2·M·d·K with M = 20, d = 500: K = 10 -> 200,000 ... K = 200 -> 4,000,000; AG News K = 4: 80,000
    method = make_method("lg-fedavg")
    found = [
        method.paper_scalars(Task(K, 500, (3, 32, 32)), [K] * 20, [(1_000, 1_000)] * 20)
        for K in (10, 43, 100, 102, 200, 4)
    ]
    assert found == [200_000, 860_000, 2_000_000, 2_040_000, 4_000_000, 80_000]
    assert [f"{cost / 1e6:.2f}" for cost in found[:5]] == ["0.20", "0.86", "2.00", "2.04", "4.00"]


def test_only_the_head_travels_by_role(make_method, make_client, task):
    method = make_method("lg-fedavg")
    state = method.init(task, 3)
    assert {name: tuple(t.shape) for name, t in state.tensors.items()} == {
        "head.weight": (4, 6),
        "head.bias": (4,),
    }
    assert state.scalars() == 4 * 6 + 4
    for architecture in ("cnn4", "efficientnet-b0"):  # Linear, and Sequential(Dropout, Linear)
        client = make_client(architecture=architecture)
        method.install(client, state)
        linear = [module for module in client.model.head.modules() if isinstance(module, nn.Linear)]
        assert len(linear) == 1
        assert torch.equal(linear[0].weight, state.tensors["head.weight"])
        assert torch.equal(linear[0].bias, state.tensors["head.bias"])


def test_body_stays_and_head_is_replaced(make_method, make_client, task):
    method = make_method("lg-fedavg")
    client = make_client()
    before = {name: p.detach().clone() for name, p in client.model.named_parameters()}
    method.install(client, method.init(task, 3))
    for name, parameter in client.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not name.startswith("head."))


def test_one_client_equals_local(make_method, make_client, task):
    lg, local = make_method("lg-fedavg"), make_method("local")
    together, alone = make_client(), make_client()
    state = head_of(together.model)
    for number in (1, 2, 3):
        together, alone = replace(together, round=number), replace(alone, round=number)
        upload = lg.local_update(together, state).payload
        state = lg.aggregate(state, {0: upload}, Round(number, task, 1))
        local.local_update(alone, local.init(task, 0))
    fresh = build_model("mlp5", task, 7)
    assert not torch.equal(alone.model.head.weight, fresh.get_parameter("head.weight"))
    for one, other in zip(together.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(state.tensors["head.weight"], alone.model.head.weight)


def test_average_by_samples_or_plain(make_method, task):
    # n = 3 and 1: by samples (3·0 + 1·4)/4 = 1, plain (0 + 4)/2 = 2
    uploads = {i: Weights({"head.bias": torch.full((4,), 4.0 * i)}, 3 - 2 * i) for i in (0, 1)}
    state = Weights({"head.bias": torch.zeros(4)})
    for protocol, expected in (("clean", 1.0), ("htfl", 1.0), ("fedproto", 2.0)):
        method = make_method("lg-fedavg", protocol=protocol)
        mean = method.aggregate(state, uploads, Round(1, task, 2)).tensors["head.bias"]
        assert torch.equal(mean, torch.full((4,), expected))
    assert torch.equal(state.tensors["head.bias"], torch.zeros(4))


def test_heads_of_another_shape_are_refused(make_method, task):
    method = make_method("lg-fedavg")
    state = method.init(task, 3)
    bad = {"head.weight": torch.zeros(3, 6), "head.bias": torch.zeros(4)}
    with pytest.raises(RejectedPayload, match=r"shape \(3, 6\), expected \(4, 6\)"):
        method.validate(Weights(bad, 1), state, task)


@pytest.mark.parametrize("name", ["lg-fedavg", "fedgen", "fedgh", "fednh", "fedpa"])
def test_a_model_without_a_linear_head_is_refused_before_round_1(
    name, make_method, task, tmp_path, monkeypatch
):
    source = """
from torch import nn
class Net(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.body = nn.Linear(256, task.feature_dim)
        self.head = nn.Sequential(nn.Linear(task.feature_dim, 5), nn.Linear(5, task.num_classes))
    def features(self, x):
        return self.body(x.flatten(1))
def build(task):
    return Net(task)
"""
    (tmp_path / "deep_head.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    method = make_method(name)
    method.check(task, ["cnn4"] if method.same_architecture else ["cnn4", "resnet4"])
    models = "deep_head:build" if method.same_architecture else "cnn4,deep_head:build"
    with pytest.raises(PbflError, match=rf"'{name}' exchanges classifiers.*in 'deep_head:build'"):
        make_method(name, models=models).check(task, models.split(","))
