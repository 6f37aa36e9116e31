"""The perceptron of ProtoNorm's spiral example; its features have no activation, so they take any sign."""

import math

from torch import nn

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import linear_head
from pbfl_flwr.task import Task


def mlp5(task: Task) -> SplitModel:
    """5-layer perceptron: flattened input-16-8-4-d, classifier; d = 2 shows prototypes in the plane."""
    stages = [
        nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.input_shape), 16), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True)),
    ]
    return SplitModel(task, stages, nn.Linear(4, task.feature_dim), linear_head(task))
