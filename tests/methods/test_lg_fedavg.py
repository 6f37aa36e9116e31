import torch
from torch import nn

from pbfl_flwr.method import Round
from pbfl_flwr.payloads import Weights


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
        before = {name: p.detach().clone() for name, p in client.model.named_parameters()}
        method.install(client, state)
        stayed = {name for name, p in client.model.named_parameters() if torch.equal(p, before[name])}
        assert stayed == {name for name in before if not name.startswith("head.")}
        linear = [module for module in client.model.head.modules() if isinstance(module, nn.Linear)]
        assert len(linear) == 1
        assert torch.equal(linear[0].weight, state.tensors["head.weight"])
        assert torch.equal(linear[0].bias, state.tensors["head.bias"])


def test_average_by_samples_or_plain(make_method, task):
    # n = 3 and 1: by samples (3·0 + 1·4)/4 = 1, plain (0 + 4)/2 = 2
    uploads = {i: Weights({"head.bias": torch.full((4,), 4.0 * i)}, 3 - 2 * i) for i in (0, 1)}
    state = Weights({"head.bias": torch.zeros(4)})
    for protocol, expected in (("clean", 1.0), ("htfl", 1.0), ("fedproto", 2.0)):
        method = make_method("lg-fedavg", protocol=protocol)
        mean = method.aggregate(state, uploads, Round(1, task, 2)).tensors["head.bias"]
        assert torch.equal(mean, torch.full((4,), expected))
    assert torch.equal(state.tensors["head.bias"], torch.zeros(4))
