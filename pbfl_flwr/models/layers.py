"""Layers common to all families: the input's channels, the width d, the classifier."""

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task
from pbfl_flwr.util.extras import torchvision_for


def torchvision_models(model: str) -> ModuleType:
    """Return ``torchvision.models``, which a model of ours needs; see :func:`.torchvision_for`."""
    models: ModuleType = torchvision_for(f"model '{model}'").models
    return models


def image_shape(model: str, task: Task) -> tuple[int, int, int]:
    """Return (channels, height, width) of the task's input.

    Raises:
        PbflError: if the input is not an image.
    """
    if len(task.input_shape) != 3:
        raise PbflError(
            f"model '{model}', first layer: expected images (channels, height, width), found input shape "
            f"{task.input_shape}"
        )
    channels, height, width = task.input_shape
    return channels, height, width


def input_convolution(conv: nn.Conv2d, channels: int, *, fan_out: bool) -> nn.Conv2d:
    """Return the first convolution for another number of input channels.

    Args:
        conv: the architecture's own first convolution (no bias, padding of half the kernel); returned unchanged
            if the channels agree.
        channels: of the task's images.
        fan_out: whether the architecture initialises convolutions by Kaiming's rule with fan-out.
    """
    if conv.in_channels == channels:
        return conv
    new = nn.Conv2d(
        channels,
        conv.out_channels,
        (conv.kernel_size[0], conv.kernel_size[1]),
        (conv.stride[0], conv.stride[1]),
        (conv.kernel_size[0] // 2, conv.kernel_size[1] // 2),
        bias=False,
    )
    if fan_out:
        nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    return new


def impose_width(width: int, feature_dim: int) -> list[nn.Module]:
    """Return the parameter-free layers that map a penultimate vector of a = ``width`` values to d.

    As in HtFLlib: AdaptiveAvgPool1d(d) on the flattened vector. Output t is the mean of inputs
    floor(t·a/d) .. ceil((t+1)·a/d)-1; a < d duplicates values. Empty for a = d.
    """
    return [] if width == feature_dim else [nn.AdaptiveAvgPool1d(feature_dim)]


def global_average(width: int, task: Task, dropout: float = 0.0) -> nn.Sequential:
    """Return the neck (B, width, h, w) -> (B, d): global average pooling, optional dropout, width d."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, *impose_width(width, task.feature_dim))


def linear_head(task: Task, dropout: float = 0.0) -> nn.Module:
    """Return the classifier (B, d) -> (B, K): optional dropout, then a linear layer with bias."""
    linear = nn.Linear(task.feature_dim, task.num_classes)
    return nn.Sequential(nn.Dropout(dropout), linear) if dropout else linear


def deeper_head(linear: nn.Module, widths: Sequence[int], task: Task) -> nn.Sequential:
    """Return the classifier (B, d) -> (B, K) with hidden layers of these widths, each followed by a ReLU.

    Args:
        linear: the network's own classifier; a dropout before its linear layer is kept.
        widths: of the hidden layers, at least one.
        task: with d and K.
    """
    layers: list[nn.Module] = [*linear.children()][:-1]
    for before, width in pairwise([task.feature_dim, *widths]):
        layers += [nn.Linear(before, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], task.num_classes))


def replaced_classifier(width: int, task: Task) -> None:
    """Draw and discard the architecture's own classifier.

    HtFLlib builds the whole network and then replaces its classifier by pooling to d and a linear layer. Drawing it
    here too, at the same point, gives the same initial weights for the same seed, so that runs can be compared without
    the noise of the initialisation.
    """
    nn.Linear(width, task.num_classes)
