"""SGD, Adam and AdamW by torch's functional forms against torch's own classes, bit for bit."""

import pytest
import torch
from torch import nn

from pbfl_flwr.training.optimizers import SGD, Adam, Group


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_bits_of_torchs_sgd(momentum: float, weight_decay: float) -> None:
    """Two rates, a bound on one group's gradients, and a layer that gets none in the second of three steps."""
    ours, theirs = network(), network()
    descent = SGD(
        [
            Group(tuple(ours[0].parameters()), 0.1),
            Group((*ours[2].parameters(), *ours[4].parameters()), 0.5, 0.2),
        ],
        momentum,
        weight_decay,
    )
    last = [*theirs[2].parameters(), *theirs[4].parameters()]
    optimizer = torch.optim.SGD(
        [{"params": list(theirs[0].parameters()), "lr": 0.1}, {"params": last, "lr": 0.5}],
        momentum=momentum,
        weight_decay=weight_decay,
        fused=True,
    )
    inputs = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for net in (ours, theirs):
            used = net[:3] if step == 1 else net
            used(inputs[step]).square().sum().backward()
        nn.utils.clip_grad_norm_(last, 0.2)
        optimizer.step()
        optimizer.zero_grad()
        descent.step()
        descent.zero_grad()
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(found, expected)
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert len(descent.state) == (6 if momentum else 0)
    for parameter, twin in zip(descent.parameters, [*theirs[0].parameters(), *last], strict=True):
        if momentum:
            assert torch.equal(descent.state[parameter]["momentum"], optimizer.state[twin]["momentum_buffer"])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_bits_of_torchs_adam(weight_decay: float, decoupled: bool, fused: bool) -> None:
    """Two rates, a bound on one group, a layer that gets no gradient in the second of four steps; the last one goes on.

    Before it a new object is given what the first has kept.
    """
    ours, theirs = network(), network()
    groups = [
        Group(tuple(ours[0].parameters()), 0.05),
        Group((*ours[2].parameters(), *ours[4].parameters()), 0.02, 0.2),
    ]
    adam = Adam(groups, weight_decay, decoupled=decoupled, fused=fused)
    last = [*theirs[2].parameters(), *theirs[4].parameters()]
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [{"params": list(theirs[0].parameters()), "lr": 0.05}, {"params": last, "lr": 0.02}],
        weight_decay=weight_decay,
        fused=fused,
    )
    inputs = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        for net in (ours, theirs):
            used = net[:3] if step == 1 else net
            used(inputs[step]).square().sum().backward()
        if step == 3:
            adam = Adam(groups, weight_decay, adam.state, decoupled=decoupled, fused=fused)
        adam.step()
        adam.zero_grad()
        nn.utils.clip_grad_norm_(last, 0.2)
        optimizer.step()
        optimizer.zero_grad()
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(found, expected)
    for parameter, twin in zip(adam.parameters, [*theirs[0].parameters(), *last], strict=True):
        assert parameter.grad is None
        kept = adam.state[parameter]
        assert tuple(kept) == Adam.state_names
        assert kept.keys() == optimizer.state[twin].keys()
        assert all(torch.equal(t, optimizer.state[twin][name]) for name, t in kept.items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_unfused_the_bits_of_torchs_sgd_by_default(momentum: float) -> None:
    ours, theirs = network(), network()
    descent = SGD([Group(tuple(ours.parameters()), 0.1)], momentum, fused=False)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum)
    for step in range(3):
        inputs = torch.full((2, 6), 0.1 + step)
        for net in (ours, theirs):
            net.zero_grad()
            net(inputs).square().sum().backward()
        descent.step()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_layer_whose_gradients_come_late_starts_as_in_a_first_step() -> None:
    """torch's own class mixes them up: with some buffers there and some not, it fails or reads memory of nobody."""
    net = network()
    descent = SGD([Group(tuple(net.parameters()), 0.5)], momentum=0.9)
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
