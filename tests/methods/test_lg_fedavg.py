import torch
from torch import nn


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
