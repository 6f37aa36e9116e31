"""Arranged networks are the same functions with the same parameters; the oracle is torch's own convolution."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pbfl_flwr.models import cpu_convolutions
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.cpu_convolutions import (
    FEW_PIXELS,
    DepthwiseConv2d,
    FewPixelsConv2d,
    PointwiseConv2d,
    optimize_layout,
)
from pbfl_flwr.task import Task
from pbfl_flwr.training.optimizers import SGD, ParamGroup
from tests.models.kinds import EXAMPLES, LONGER, TABLES, is_one_of, takes_images

TASK = Task(5, 24, (3, 32, 32))


def replaced(model: nn.Module) -> list[nn.Module]:
    kinds = (DepthwiseConv2d, FewPixelsConv2d, PointwiseConv2d)
    return [module for module in model.modules() if isinstance(module, kinds)]


def gradients(function: nn.Module, inputs: Tensor) -> list[Tensor]:
    inputs = inputs.clone().requires_grad_()
    outputs = function(inputs)
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)
    return [outputs, *torch.autograd.grad((outputs * weights).sum(), [inputs, *function.parameters()])]


# Class of the replacement, channels in and out, groups; kernel, stride and padding; sides of the map.
CONVOLUTIONS: list[tuple[type[nn.Conv2d], tuple[int, int, int], tuple[int, int, int], tuple[int, int]]] = [
    *(
        (DepthwiseConv2d, (6, 6, 6), (kernel, stride, kernel // 2), (side, side))
        for kernel, stride in ((3, 1), (3, 2), (5, 1), (5, 2), (1, 2))
        for side in (1, 2, 3, 4)
    ),
    *(
        (FewPixelsConv2d, (3, 4, 1), shape, sides)
        for shape in ((3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 2), (2, 2, 0), (4, 3, 3))
        for sides in ((1, 1), (2, 2), (4, 4), (1, 4), (4, 1), (3, 2), (5, 6))
        if min(sides) >= shape[0] - 2 * shape[2]
    ),
    (FewPixelsConv2d, (3, 4, 1), (2, 9, 4), (1, 1)),  # over padding alone: the bias
    (PointwiseConv2d, (6, 4, 1), (1, 1, 0), (5, 4)),
]


@pytest.mark.parametrize(("kind", "channels", "shape", "sides"), CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_replaced_convolution_keeps_its_values_and_gradients(
    kind: type[nn.Conv2d],
    channels: tuple[int, int, int],
    shape: tuple[int, int, int],
    sides: tuple[int, int],
    bias: bool,
) -> None:
    torch.manual_seed(0)
    before, after, groups = channels
    conv = nn.Conv2d(before, after, *shape, groups=groups, bias=bias).double()
    model = nn.Sequential(conv)
    inputs = torch.randn(5, before, *sides, dtype=torch.float64)
    expected = gradients(conv, inputs)
    optimize_layout(model, "channels-last")
    assert isinstance(model[0], kind)
    for result, wanted in zip(gradients(model[0], inputs), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 3, 1)]
)
def test_a_single_map_and_no_map_at_all_are_the_librarys(conv: nn.Conv2d) -> None:
    model = optimize_layout(nn.Sequential(conv), "channels-last")
    assert replaced(model)
    maps = torch.randn(2, 4, 2, 2)
    torch.testing.assert_close(model(maps[0]), conv(maps)[0])
    assert model(maps[:0]).shape == (0, conv.out_channels, 2, 2)


def of_a_user(name: str, added: object) -> nn.Conv2d:
    """A convolution to which something was added."""
    conv = nn.Conv2d(4, 4, 1)
    setattr(conv, name, added)
    return conv


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding=1, dilation=2),
        nn.Conv2d(4, 4, (3, 5), padding=1),
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding="same", groups=4),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"),
        nn.Conv2d(4, 4, (3, 1), padding=(1, 0), groups=4),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.utils.weight_norm(nn.Conv2d(4, 4, 1)),  # keeps its weight by a hook
        of_a_user("forward", lambda maps: -maps),
        of_a_user("gain", nn.Parameter(torch.ones(()))),
        of_a_user("after", nn.ReLU()),
    ],
)
def test_other_convolutions_stay_the_librarys(conv: nn.Conv2d) -> None:
    model = nn.Sequential(conv)
    optimize_layout(model, "channels-last")
    assert model[0] is conv


@pytest.mark.parametrize(
    "name",
    [name for name in EXAMPLES if (takes_images(name) or is_one_of(name, TABLES)) and name not in LONGER],
)
def test_every_architecture_stays_the_same_function(name: str) -> None:
    plain = build_model(name, TASK, 0)
    optimized = optimize_layout(copy.deepcopy(plain), "channels-last")
    assert list(plain.state_dict()) == list(optimized.state_dict())
    for ours, theirs in zip(optimized.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    inputs = torch.randn(4, *TASK.input_shape, generator=torch.Generator().manual_seed(1))
    plain.double().eval()
    optimized.double().eval()
    torch.testing.assert_close(optimized.features(inputs.double()), plain.features(inputs.double()))


@pytest.mark.parametrize(
    ("name", "kind", "small"),
    [("resnet8", FewPixelsConv2d, 2), ("mobilenet-v2", DepthwiseConv2d, 10), ("efficientnet-b0", DepthwiseConv2d, 10)],
)  # fmt: skip
def test_deep_networks_end_in_small_maps(name: str, kind: type[nn.Conv2d], small: int) -> None:
    model = optimize_layout(build_model(name, TASK, 0), "channels-last").eval()
    sizes: list[int] = []

    def note(_: nn.Module, given: tuple[Tensor], result: Tensor) -> None:
        sizes.append((given[0] if kind is DepthwiseConv2d else result)[0, 0].numel())

    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_hook(note)
    model.features(torch.zeros(1, *TASK.input_shape))
    assert sum(size <= FEW_PIXELS for size in sizes) == small


@pytest.mark.parametrize("name", ["cnn4", "resnet18", "mobilenet-v2"])
def test_a_step_follows_the_gradient_in_every_layout(name: str) -> None:
    """torch's fused SGD pairs the wrong numbers where a parameter is channels-last and its gradient is not."""
    model = optimize_layout(build_model(name, TASK, 0), "channels-last").train()
    inputs = torch.randn(4, *TASK.input_shape, generator=torch.Generator().manual_seed(1))
    parameters = tuple(model.parameters())
    descent = SGD([ParamGroup(parameters)], 0.1)
    model.head(
        model.features(inputs.contiguous(memory_format=torch.channels_last))
    ).square().mean().backward()
    wanted = [p.detach() - 0.1 * p.grad for p in parameters if p.grad is not None]
    descent.step()
    for result, expected in zip([p for p in parameters if p.grad is not None], wanted, strict=True):
        torch.testing.assert_close(result.detach(), expected)


def test_a_network_that_was_scored_first_can_be_trained() -> None:
    model = optimize_layout(build_model("mobilenet-v2", TASK, 0), "channels-last").eval()
    with torch.inference_mode():
        model.features(torch.zeros(2, *TASK.input_shape))
    model.features(torch.zeros(2, *TASK.input_shape)).sum().backward()
    made = [layer._taps for layer in model.modules() if isinstance(layer, cpu_convolutions.DepthwiseConv2d)]
    assert any(made)


def test_contiguous_leaves_a_network_as_it_was_built() -> None:
    model = optimize_layout(build_model("mobilenet-v2", TASK, 0), "contiguous")
    assert not replaced(model)
    assert next(model.parameters()).is_contiguous()
