"""The contract of all models: features, then head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pbfl_flwr.models.cpu_convolutions import DepthwiseConv2d, FewPixelsConv2d, PointwiseConv2d
from pbfl_flwr.models.isolation import is_altered
from pbfl_flwr.task import Task

HEAD_PREFIX = "head."
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SplitModel(nn.Module):
    """A network split at the penultimate activation: f_i = head(φ_i) ∘ body(θ_i).

    The body is ``stages`` followed by ``neck``. It may differ between clients; d and K are common to all.

    Attributes:
        feature_dim: d, the width of the features.
        num_classes: K.
        stages: the body's blocks, each mapping a feature map to the next; empty if there are no maps.
        neck: maps the last feature map, or the inputs, to features: pooling, flattening, a hidden layer, the width d.
        head: the classifier, (B, d) -> (B, K).
        reduced: dtype of the body's products; None: that of its parameters.
    """

    def __init__(self, task: Task, stages: Sequence[nn.Module], neck: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.feature_dim = task.feature_dim
        self.num_classes = task.num_classes
        self.stages = nn.ModuleList(stages)
        self.neck = neck
        self.head = head
        self.reduced: torch.dtype | None = None

    def feature_maps(self, inputs: Tensor) -> list[Tensor]:
        """Return the output of each stage, F^1 to F^L.

        Args:
            inputs: (B, *input_shape).
        """
        return self.maps_and_features(inputs)[0]

    def maps_and_features(self, inputs: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the output of each stage and the features from one pass, in the dtype of the parameters.

        Args:
            inputs: (B, *input_shape).
        """
        maps = []
        with self._arithmetic(inputs):
            for stage in self.stages:
                inputs = stage(inputs)
                maps.append(inputs)
            features: Tensor = self.neck(inputs)
        if self.reduced is None:
            return maps, features
        return [feature_map.float() for feature_map in maps], features.float()

    def features(self, inputs: Tensor) -> Tensor:
        """Return the penultimate activation z, (B, d), in the dtype of the parameters.

        Args:
            inputs: (B, *input_shape).
        """
        with self._arithmetic(inputs):
            for stage in self.stages:
                inputs = stage(inputs)
            features: Tensor = self.neck(inputs)
        return features if self.reduced is None else features.float()

    def _arithmetic(self, inputs: Tensor) -> torch.autocast:
        return torch.autocast(inputs.device.type, self.reduced, enabled=self.reduced is not None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (B, K)."""
        logits: Tensor = self.head(self.features(inputs))
        return logits


def random_inputs(task: Task, batch: int, seed: int = 0) -> Tensor:
    """Return random inputs for the task, (B, *input_shape): normal numbers, or token ids."""
    generator, shape = torch.Generator().manual_seed(seed), (batch, *task.input_shape)
    if task.vocabulary_size:
        return torch.randint(task.vocabulary_size, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def body_names(model: nn.Module) -> list[str]:
    """Return the names of the body's parameters θ_i (no buffers), in the model's order."""
    return [name for name, _ in model.named_parameters() if not name.startswith(HEAD_PREFIX)]


def head_names(model: nn.Module) -> list[str]:
    """Return the names of the head's parameters φ_i, in the model's order."""
    return [name for name, _ in model.named_parameters() if name.startswith(HEAD_PREFIX)]


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters (no buffers) of body and head, |θ_i| and |φ_i|."""
    body = head = 0
    for name, parameter in model.named_parameters():
        if name.startswith(HEAD_PREFIX):
            head += parameter.numel()
        else:
            body += parameter.numel()
    return body, head


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether training depends on batch statistics (a batch of one sample may then fail)."""
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.Flatten)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ReLU, nn.LayerNorm, nn.GroupNorm)
_POOLING = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
)
_REPLACEMENTS = (PointwiseConv2d, FewPixelsConv2d, DepthwiseConv2d)
DETERMINISTIC = frozenset({*_CONTAINERS, *_LAYERS, *_POOLING, *_REPLACEMENTS})
"""Layers whose output for a sample is the same in training and evaluation, whatever the batch."""


def is_deterministic(model: nn.Module) -> bool:
    """Return whether a frozen body is deterministic and stateless: equal features for a sample at every pass.

    False for layers and models of other types, or that a user has altered, where this is unknown.
    """
    if type(model) is not SplitModel or is_altered(model):
        return False
    return all(
        type(module) in DETERMINISTIC and not is_altered(module)
        for part in (model.stages, model.neck)
        for module in part.modules()
    )
