"""Multilayer perceptrons: of any widths for tables, and the one of ProtoNorm's spiral example."""

import math
from itertools import pairwise

from torch import nn

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import linear_head
from pbfl_flwr.task import Task


def mlp(task: Task, *widths: int) -> SplitModel:
    """MLP for tables: hidden layers of the widths in its name (mlp-500-200), then a hidden layer d.

    Every hidden layer, also that of width d, is followed by a ReLU: features are never negative. HtFLlib's AmazonMLP
    does the same; its last hidden layer has 100 units, averaged to d.
    """
    sizes = [math.prod(task.input_shape), *widths]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU(inplace=True)) for a, b in pairwise(sizes)]
    neck = nn.Sequential(nn.Linear(sizes[-1], task.feature_dim), nn.ReLU(inplace=True))
    return SplitModel(task, [nn.Flatten(), *layers], neck, linear_head(task))


def mlp5(task: Task) -> SplitModel:
    """5-layer MLP: hidden layers 16-8-4-d, classifier; with d = 2 prototypes can be plotted.

    Its features have no activation and may be negative.
    """
    stages = [
        nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.input_shape), 16), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True)),
    ]
    return SplitModel(task, stages, nn.Linear(4, task.feature_dim), linear_head(task))
