"""Which networks can be copied, and what is left of training that leaves no trace."""

import math
from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.isolation import is_copyable, restored, ties_kept
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


class Tied(Plain):
    """A layer back from the features, whose weight is that of the body transposed."""

    bias: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        weight = self.body.get_parameter("1.weight")
        self.back = nn.Linear(*weight.shape)
        self.back.weight = nn.Parameter(weight.t())
        self.register_buffer("bias", self.head.bias.detach())


def with_a_view_in_an_attribute() -> nn.Module:
    net = Plain(TASK)
    vars(net)["rows"] = list(net.head.weight.detach())
    return net


def with_a_shared_mask() -> nn.Module:
    net, mask = Plain(TASK), torch.ones(4, 4).tril()
    for part in (net.body, net.head):
        part.register_buffer("mask", mask.view(1, 4, 4))
    return net


def with_halves_of_one_tensor() -> nn.Module:
    net, whole = Plain(TASK), torch.randn(4, 6)
    net.halves = nn.ParameterList([whole[:, :3], whole[:, 3:]])
    return net


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Plain(TASK), True),
        (Tied(TASK), False),
        (with_a_view_in_an_attribute(), False),
        (with_halves_of_one_tensor(), True),
        (with_a_shared_mask(), True),
        (Twice(TASK), True),
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
def test_networks_with_functions_without_a_name_or_hooks_or_views_of_weights_cannot_be_copied(
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


def test_a_tie_by_a_view_holds_in_training_that_leaves_no_trace() -> None:
    net = Tied(TASK)
    bias, before = net.bias, net.bias.clone()
    with restored(net):
        net.head.bias.data.add_(1)
        assert torch.equal(net.bias, before + 1)
    assert net.bias is bias
    assert torch.equal(net.bias, before)


def test_what_would_lose_a_tie_by_a_view_is_refused() -> None:
    net = Tied(TASK)
    with ties_kept("tied", net):
        net.to("cpu")
    with (
        pytest.raises(
            PbflError, match=r"^model 'tied': 'back.weight' lies in the memory of 'body.1.weight', and"
        ),
        ties_kept("tied", net),
    ):
        net.body.double()
    with ties_kept("twice", twice := Twice(TASK)):
        twice.double()
    with ties_kept("masks", masks := with_a_shared_mask()):
        masks.double()
