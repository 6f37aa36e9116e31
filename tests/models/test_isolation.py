"""Which networks can be copied, and what is left of training that leaves no trace."""

import math
from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.isolation import is_copyable, restored
from pbfl_flwr.task import Task
from tests.methods.tiny_nets import Plain, Twice, by_function
from tests.models.kinds import EXAMPLES, shapes, task_of

TASK = Task(4, 6, (1, 8, 8))


def through_the_body(net: Plain, inputs: Tensor) -> Tensor:
    features: Tensor = net.body(inputs)
    return features


def with_features(given: Callable[[Plain], Callable[[Tensor], Tensor]]) -> Plain:
    net = Plain(TASK)
    net.features = given(net)  # type: ignore[assignment, method-assign]
    return net


def of_a_local_class() -> nn.Module:
    body = nn.Flatten()

    class Local(Plain):
        def features(self, inputs: Tensor) -> Tensor:
            features: Tensor = body(inputs)
            return features

    return Local(TASK)


def with_a_hook_on_a_weight() -> nn.Module:
    net = Plain(TASK)
    net.head.weight.register_hook(torch.zeros_like)
    return net


def with_a_mark_on_a_weight() -> nn.Module:
    net = Plain(TASK)
    net.head.weight.decays = False  # type: ignore[attr-defined]
    return net


def with_a_method_of_a_tensor() -> nn.Module:
    net = Plain(TASK)
    net.scaled = net.head.weight.mul  # type: ignore[assignment]
    return net


def with_built_in_functions() -> nn.Module:
    net = Plain(TASK)
    net.functions = [torch.relu, torch.nn.functional.gelu, math.sqrt, len, dict.fromkeys]  # type: ignore[assignment]
    return net


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Plain(TASK), True),
        (with_features(lambda net: MethodType(through_the_body, net)), True),
        (with_features(lambda net: partial(through_the_body, net)), True),
        (by_function(TASK), False),
        (with_features(lambda net: MethodType(lambda self, inputs: net.body(inputs), net)), False),
        (with_features(lambda net: partial(lambda net, inputs: net.body(inputs), net)), False),
        (of_a_local_class(), False),
        (with_a_hook_on_a_weight(), False),
        (with_a_mark_on_a_weight(), False),
        (with_a_method_of_a_tensor(), False),
        (with_built_in_functions(), True),
    ],
)
def test_networks_with_functions_without_a_name_or_hooks_on_weights_cannot_be_copied(
    net: nn.Module, expected: bool
) -> None:
    assert is_copyable(net) is expected


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith(("vit", "resnet"))])
def test_the_packages_networks_can_be_copied(name: str) -> None:
    assert is_copyable(build_model(name, task_of(name, 8, shapes(name)[-1]), 0))


def test_training_that_leaves_no_trace() -> None:
    net, inputs = Twice(TASK), torch.randn(3, *TASK.input_shape)
    net.eval().head.train().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with restored(net):
        net.train().requires_grad_(True)
        net.head(net.features(inputs + 1))
        assert net.mean is net.again
        assert net.mean != before["mean"]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1)
        vars(net)["count"] = 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [net.training, net.head.training] == [False, True]
    assert [p.requires_grad for p in net.parameters()] == [True, True, False, False]
    assert net.mean is net.again
    assert not hasattr(net, "count")
