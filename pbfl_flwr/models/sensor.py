"""A 1-D convolutional network for windows of sensor readings, e.g. human activity recognition (HAR)."""

from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import linear_head
from pbfl_flwr.task import Task

SHORTEST_WINDOW = 8  # three times halved


def har_cnn(task: Task) -> SplitModel:
    """1-D CNN for sensor windows (channels, length): 32, 64 and 128 channels, hidden layer d.

    Average pooling over time makes it independent of the window's length. This project's own design. PFLlib's
    layout of HAR data, (channels, 1, length), is taken as well.

    Raises:
        PbflError: if inputs are no such windows, or too short.
    """
    shape = task.input_shape
    if not (len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)) or shape[-1] < SHORTEST_WINDOW:
        raise PbflError(
            f"model 'har-cnn', first layer: expected windows (channels, length) or (channels, 1, length) of "
            f"length {SHORTEST_WINDOW} or more, found input shape {shape}"
        )
    stages = [
        nn.Sequential(nn.Flatten(start_dim=2), *_block(shape[0], 32, kernel=9)),
        nn.Sequential(*_block(32, 64, kernel=5)),
        nn.Sequential(*_block(64, 128, kernel=3)),
    ]
    neck = nn.Sequential(
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, task.feature_dim), nn.ReLU(inplace=True)
    )
    return SplitModel(task, stages, neck, linear_head(task))


def _block(before: int, channels: int, kernel: int) -> list[nn.Module]:
    return [nn.Conv1d(before, channels, kernel, padding=kernel // 2), nn.MaxPool1d(2), nn.ReLU(inplace=True)]
