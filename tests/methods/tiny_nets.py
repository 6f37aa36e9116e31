"""Networks that cost next to nothing, where a test is not about their layers."""

import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.task import Task


def normed(task: Task) -> SplitModel:
    """One convolution with BatchNorm, so with statistics that training writes beside the weights."""
    stages = [nn.Sequential(nn.Conv2d(task.input_shape[0], 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())]
    neck = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, task.feature_dim), nn.ReLU())
    return SplitModel(task, stages, neck, nn.Linear(task.feature_dim, task.num_classes))


class Plain(nn.Module):
    """Features and a head, but no stages and neck."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        size = task.input_shape[0] * task.input_shape[1] * task.input_shape[2]
        self.body: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(size, task.feature_dim), nn.ReLU())
        self.head = nn.Linear(task.feature_dim, task.num_classes)

    def features(self, inputs: Tensor) -> Tensor:
        """Return (B, d)."""
        features: Tensor = self.body(inputs)
        return features


def by_function(task: Task) -> nn.Module:
    """The same network, whose features are a function that knows it."""
    net = Plain(task)
    net.features = lambda inputs: net.body(inputs)  # type: ignore[method-assign]
    return net


def weight_normed(task: Task) -> SplitModel:
    """Layers that keep a computed tensor."""
    stages = [weight_norm(nn.Conv2d(task.input_shape[0], 4, 3, 2, 1))]
    neck = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), weight_norm(nn.Linear(64, task.feature_dim)))
    return SplitModel(task, stages, neck, nn.Linear(task.feature_dim, task.num_classes))


class Odd(Plain):
    """Its features are scaled by a parameter of that name, its body is float64, and some of it is never used."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.body.double()
        self.spare = nn.Linear(2, 3)

    def features(self, inputs: Tensor) -> Tensor:
        """Return (B, d)."""
        return self.scale * super().features(inputs.double()).float()


class Twice(Plain):
    """Keeps the mean of its inputs under two names, and a number that is in no state."""

    mean: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("again", self.mean)
        self.register_buffer("one", torch.ones(1), persistent=False)

    def features(self, inputs: Tensor) -> Tensor:
        """Return (B, d)."""
        if self.training:
            self.mean.copy_(inputs.detach().mean())
        return super().features(inputs - self.mean)


class Cosine(nn.Linear):
    """A classifier with the tensors of a linear one."""

    def forward(self, features: Tensor) -> Tensor:
        """Return (B, K)."""
        return nn.functional.linear(
            nn.functional.normalize(features), nn.functional.normalize(self.weight), self.bias
        )


def with_a_cosine_head(task: Task) -> SplitModel:
    """See :class:`Cosine`."""
    net = normed(task)
    net.head = Cosine(task.feature_dim, task.num_classes)
    return net


def of_unit_features(task: Task) -> SplitModel:
    """Its features are not what its neck computes."""

    class Unit(SplitModel):
        def features(self, inputs: Tensor) -> Tensor:
            return nn.functional.normalize(super().features(inputs))

    net = normed(task)
    return Unit(task, [*net.stages], net.neck, net.head)


def with_other_maps(task: Task) -> SplitModel:
    """Its maps are not what its stages compute."""

    class Doubled(SplitModel):
        def maps_and_features(self, inputs: Tensor) -> tuple[list[Tensor], Tensor]:
            maps, features = super().maps_and_features(inputs)
            return [2 * feature_map for feature_map in maps], features

    net = normed(task)
    return Doubled(task, [*net.stages], net.neck, net.head)


def with_anchors(task: Task) -> nn.Module:
    """It has a parameter of that name."""
    net = Plain(task)
    net.anchors = nn.Parameter(torch.ones(task.feature_dim))
    return net
