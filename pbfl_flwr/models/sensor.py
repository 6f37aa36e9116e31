"""Networks for windows of sensor readings, (channels, length), e.g. human activity recognition (HAR).

PFLlib's layout, (channels, 1, length), is accepted too. Pooling precedes the ReLU, which gives bit-identical outputs
and gradients for half of the work. Features follow a ReLU or are averages of such, hence never negative.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import impose_width, linear_head, replaced_classifier
from pbfl_flwr.task import Task

SHORTEST_WINDOW = 8  # leaves a reading after three halvings
HARCNN_CHANNELS = (32, 64, 128)


def har_cnn(task: Task) -> SplitModel:
    """1-D CNN for sensor windows (channels, length): 32, 64 and 128 channels; hidden layer d.

    Average pooling over time makes it independent of the window's length. Designed for this project.

    Raises:
        PbflError: if inputs are no such windows, or too short.
    """
    channels, _ = _window("har-cnn", task)
    stages = [
        nn.Sequential(nn.Flatten(start_dim=2), *_convolution(channels, 32, kernel=9)),
        nn.Sequential(*_convolution(32, 64, kernel=5)),
        nn.Sequential(*_convolution(64, 128, kernel=3)),
    ]
    neck = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), *_hidden_layer(128, task))
    return SplitModel(task, stages, neck, linear_head(task))


def har_resnet(task: Task) -> SplitModel:
    """1-D residual network for sensor windows: 32, 64 and 128 channels; last layer 128.

    Designed for this project. GroupNorm replaces BatchNorm, whose batch statistics suit neither a person's few
    windows nor the average of several people's networks.

    Raises:
        PbflError: if inputs are no such windows, or too short.
    """
    channels, _ = _window("har-resnet", task)
    stem = nn.Sequential(
        nn.Flatten(start_dim=2),
        nn.Conv1d(channels, 32, 9, stride=2, padding=4, bias=False),
        nn.GroupNorm(8, 32),
        nn.ReLU(inplace=True),
    )
    widths = (32, 32, 64, 128)
    blocks = [ResidualBlock(before, width) for before, width in pairwise(widths)]
    neck = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), *impose_width(widths[-1], task.feature_dim))
    return SplitModel(task, [stem, *blocks], neck, linear_head(task))


def har_gru(task: Task) -> SplitModel:
    """GRU for sensor windows: 64 units over pairs of readings, mean over time, hidden layer d.

    The mean over time makes it independent of the window's length; averaging pairs of readings halves the time steps,
    which dominate its run time. Without LayerNorm the means are so small that SGD hardly makes progress. Designed for
    this project. It has no maps to distil.

    Raises:
        PbflError: if inputs are no such windows, or too short.
    """
    channels, _ = _window("har-gru", task)
    stage = nn.Sequential(nn.Flatten(start_dim=2), nn.AvgPool1d(2), MeanOfGRU(channels, 64))
    neck = nn.Sequential(nn.LayerNorm(64), *_hidden_layer(64, task))
    return SplitModel(task, [stage], neck, linear_head(task))


def harcnn(task: Task, blocks: int, stride: int) -> SplitModel:
    """HtFLlib's HARCNN for sensor windows, harcnn-BLOCKS-STRIDE; features average-pooled to d.

    Unpadded convolutions to 32, 64 and 128 channels, with kernel 9, or 5 with three blocks, each followed by
    max-pooling of 2. HtFLlib uses Conv2d over a height of 1, which is equivalent.

    Args:
        task: of the federation.
        blocks: 1 is HtFLlib's HARCNN1, 2 its HARCNN, 3 its HARCNN3.
        stride: of every convolution.

    Raises:
        PbflError: if there are more than three blocks, or inputs are no such windows, or too short.
    """
    name = f"harcnn-{blocks}-{stride}"
    if blocks > len(HARCNN_CHANNELS):
        raise PbflError(f"model '{name}': found {blocks} blocks, must be 1 to {len(HARCNN_CHANNELS)}")
    kernel = 5 if blocks == 3 else 9
    shortest = 1
    for _ in range(blocks):
        shortest = (2 * shortest - 1) * stride + kernel
    channels, length = _window(name, task, shortest)
    stages: list[nn.Module] = []
    for before, width in pairwise((channels, *HARCNN_CHANNELS[:blocks])):
        flatten = [] if stages else [nn.Flatten(start_dim=2)]
        convolution = nn.Conv1d(before, width, kernel, stride)
        stages.append(nn.Sequential(*flatten, convolution, nn.MaxPool1d(2), nn.ReLU(inplace=True)))
        length = ((length - kernel) // stride + 1) // 2
    for before, after in pairwise((26 * HARCNN_CHANNELS[blocks - 1], 1024, 512)):
        nn.Linear(before, after)  # drawn and discarded, as in replaced_classifier
    replaced_classifier(512, task)
    pooling = impose_width(HARCNN_CHANNELS[blocks - 1] * length, task.feature_dim)
    return SplitModel(task, stages, nn.Sequential(nn.Flatten(), *pooling), linear_head(task))


class ResidualBlock(nn.Module):
    """Two convolutions over time with a shortcut; halves the length where the width grows.

    Args:
        before: input channels.
        width: output channels.
    """

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.convolutions = nn.Sequential(
            nn.Conv1d(before, width, 5, stride, padding=2, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(inplace=True),
            nn.Conv1d(width, width, 5, padding=2, bias=False),
            nn.GroupNorm(8, width),
        )
        self.bypass = nn.Identity() if stride == 1 else nn.Conv1d(before, width, 1, stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Return (B, width, length or half of it) for (B, before, length)."""
        return torch.relu(self.convolutions(maps) + self.bypass(maps))


class MeanOfGRU(nn.Module):
    """A GRU's mean output over time.

    Args:
        channels: of the input.
        units: of the GRU.
    """

    def __init__(self, channels: int, units: int) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, units, batch_first=True)

    def forward(self, maps: Tensor) -> Tensor:
        """Return (B, units) for (B, channels, length)."""
        outputs: Tensor = self.gru(maps.transpose(1, 2))[0]
        return outputs.mean(dim=1)


def _window(name: str, task: Task, shortest: int = SHORTEST_WINDOW) -> tuple[int, int]:
    """Return channels and length of the task's windows."""
    shape = task.input_shape
    if not (len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)) or shape[-1] < shortest:
        raise PbflError(
            f"model '{name}', first layer: expected windows (channels, length) or (channels, 1, length) of "
            f"length {shortest} or more, found input shape {shape}"
        )
    return shape[0], shape[-1]


def _convolution(before: int, channels: int, kernel: int) -> Sequence[nn.Module]:
    return nn.Conv1d(before, channels, kernel, padding=kernel // 2), nn.MaxPool1d(2), nn.ReLU(inplace=True)


def _hidden_layer(width: int, task: Task) -> Sequence[nn.Module]:
    return nn.Linear(width, task.feature_dim), nn.ReLU(inplace=True)
