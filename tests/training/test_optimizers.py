"""SGD, Adam and AdamW by torch's functional forms against torch's own classes, bit for bit."""

from typing import Any

import pytest
import torch
from torch import nn

from pbfl_flwr.training.optimizers import SGD, Adam, ParamGroup, is_dense, param_group


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def groups_of(net: nn.Sequential) -> tuple[list[ParamGroup], list[dict[str, Any]]]:
    """Two rates, and a bound on the gradients of one of the groups; for torch's classes without the bound."""
    parts = tuple(net[0].parameters()), (*net[2].parameters(), *net[4].parameters())
    ours = [ParamGroup(parts[0]), ParamGroup(parts[1], 0.5, 0.2)]
    return ours, [{"params": [*part], "lr": rate} for part, rate in zip(parts, (0.1, 0.5), strict=True)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw"])
def test_the_bits_of_torchs_optimizer(kind: str, weight_decay: float, fused: bool) -> None:
    """A layer gets no gradient in the second of four steps; before the last one a new object goes on with the state."""
    ours, theirs = network(), network()
    groups, (_, last) = groups_of(ours)[0], (parts := groups_of(theirs)[1])
    momentum = 0.9 * (kind == "momentum")
    optimizer: torch.optim.Optimizer
    if kind in ("sgd", "momentum"):
        optimizer = torch.optim.SGD(parts, momentum=momentum, weight_decay=weight_decay, fused=fused)
    else:
        theirs_of = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
        optimizer = theirs_of(parts, weight_decay=weight_decay, fused=fused)

    def made(state: Any = None) -> SGD | Adam:
        if kind in ("sgd", "momentum"):
            return SGD(groups, 0.1, weight_decay, state=state or {}, fused=fused, momentum=momentum)
        return Adam(groups, 0.1, weight_decay, state=state or {}, fused=fused, decoupled=kind == "adamw")

    descent = made()
    inputs = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        for net in (ours, theirs):
            used = net[:3] if step == 1 else net
            used(inputs[step]).square().sum().backward()
        if step == 3:
            descent = made(descent.state)
        descent.step()
        descent.zero_grad()
        nn.utils.clip_grad_norm_(last["params"], 0.2)
        optimizer.step()
        optimizer.zero_grad()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)
    assert len(descent.state) == (0 if kind == "sgd" else 6)
    for parameter, twin in zip(descent.parameters, [*parts[0]["params"], *last["params"]], strict=True):
        assert parameter.grad is None
        if kind == "momentum":
            assert torch.equal(descent.state[parameter]["momentum"], optimizer.state[twin]["momentum_buffer"])
        elif kind != "sgd":
            state = descent.state[parameter]
            assert tuple(state) == Adam.state_names
            assert state.keys() == optimizer.state[twin].keys()
            assert all(torch.equal(t, optimizer.state[twin][name]) for name, t in state.items())


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_parameter_made_of_some_columns_is_updated_as_by_torch(kind: str) -> None:
    """Fused kernels take its gradients in the order of memory, and write beside it."""
    ours, theirs = network(), network()
    whole = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    for net in (ours, theirs):
        first = net[0]
        assert isinstance(first, nn.Linear)
        first.weight = nn.Parameter(whole.clone()[:, :6])
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        descent: SGD | Adam = SGD([param_group(ours)], 0.1, momentum=0.9)
        optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    else:
        descent, optimizer = Adam([param_group(ours)], 0.1), torch.optim.Adam(theirs.parameters(), 0.1)
    for _ in range(3):
        for net in (ours, theirs):
            net.zero_grad()
            net(torch.ones(2, 6)).square().sum().backward()
        descent.step()
        optimizer.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3, 4, 5), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(4, 1, 3)[:, :, :], True),
        (torch.zeros(()), True),
        (torch.zeros(4, 6)[:, :1], False),
        (torch.zeros(4, 6)[:, 1:], False),
        (torch.zeros(4, 6)[::2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
    ],
)
def test_what_is_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense


def test_a_layer_whose_gradients_come_late_starts_as_in_a_first_step() -> None:
    """torch's own class mixes them up: with some buffers there and some not, it fails or reads memory of nobody."""
    net = network()
    descent = SGD([param_group(net)], 0.5, momentum=0.9)
    inputs = torch.ones(2, 6)
    net[:3](inputs).sum().backward()
    descent.step()
    descent.zero_grad()
    late = net[4]
    assert isinstance(late, torch.nn.Linear)
    before = late.bias.detach().clone()
    net(inputs).sum().backward()
    assert late.bias.grad is not None
    gradient = late.bias.grad.clone()
    descent.step()
    assert torch.equal(late.bias, before - 0.5 * gradient)
