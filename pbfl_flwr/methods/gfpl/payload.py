"""Payload of Gaussian mixtures, a few components per class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pbfl_flwr.payloads.contract import (
    MAX_MAGNITUDE,
    Magnitudes,
    RejectedPayload,
    first_outside,
    floats,
    no_others,
    whole_numbers,
)
from pbfl_flwr.task import Task


@dataclass(frozen=True)
class Mixtures:
    """Gaussian mixtures with diagonal covariance, any number of components per class; ragged in memory too.

    Attributes:
        labels: (N,) int64, the class each component belongs to.
        weights: (N,) float32 w > 0: the component's share of its class, or of its class's samples.
        means: (N, d) float32 μ.
        stds: (N, d) float32 σ >= 0, square roots of the covariance's diagonal.
    """

    labels: Tensor
    weights: Tensor
    means: Tensor
    stds: Tensor

    max_components: ClassVar[int] = 2**20

    @classmethod
    def empty(cls, width: int) -> Mixtures:
        """Return mixtures without components, of which nothing travels."""
        rows = torch.zeros(0, width)
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0), rows, rows)

    @classmethod
    def concatenated(cls, parts: Iterable[Mixtures], width: int) -> Mixtures:
        """Return all components of the parts, in their order."""
        mixtures = [cls.empty(width), *parts]
        names = ("labels", "weights", "means", "stds")
        return cls(*(torch.cat([getattr(part, name) for part in mixtures]) for name in names))

    @property
    def num_components(self) -> int:
        """N, the number of components."""
        return len(self.labels)

    def subset(self, index: Tensor) -> Mixtures:
        """Return the components selected by an index or a mask."""
        return Mixtures(self.labels[index], self.weights[index], self.means[index], self.stds[index])

    def present(self, num_classes: int) -> Tensor:
        """Return (K,) bool: which classes have a component."""
        return torch.bincount(self.labels, minlength=num_classes) > 0

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the four tensors, or none if there is no component."""
        if not self.num_components:
            return {}
        small = int(self.labels.max()) < 256
        return {
            "labels": self.labels.to(torch.uint8 if small else torch.int32),
            "weights": self.weights.contiguous(),
            "means": self.means.contiguous(),
            "stds": self.stds.contiguous(),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Mixtures:
        """Rebuild the components; see :class:`Payload`."""
        d = task.feature_dim
        if not tensors:
            return cls.empty(d)
        labels = whole_numbers(tensors, "labels")
        weights = floats(tensors, "weights", dimensions=1, limit=MAX_MAGNITUDE)
        means = floats(tensors, "means", dimensions=2, limit=MAX_MAGNITUDE)
        stds = floats(tensors, "stds", dimensions=2, limit=MAX_MAGNITUDE)
        no_others(tensors, {"labels", "weights", "means", "stds"})
        N = len(labels)
        if not 1 <= N <= cls.max_components:
            raise RejectedPayload(f"{N} components, must be 1..{cls.max_components}")
        if len(weights) != N:
            raise RejectedPayload(f"{len(weights)} weights for {N} components")
        for name, rows in (("means", means), ("stds", stds)):
            if rows.shape != (N, d):
                raise RejectedPayload(f"'{name}' has shape {tuple(rows.shape)}, expected ({N}, {d})")
        if not 0 <= int(labels.min()) <= int(labels.max()) < task.num_classes:
            raise RejectedPayload(
                f"class id {first_outside(labels, task.num_classes)} is outside 0..{task.num_classes - 1}"
            )
        if float(weights.min()) <= 0:
            raise RejectedPayload(f"a component's weight is {float(weights.min()):.3g}, it must be positive")
        if float(stds.min()) < 0:
            raise RejectedPayload(f"a standard deviation is {float(stds.min()):.3g}, it must not be negative")
        return cls(labels, weights, means, stds)

    def scalars(self) -> int:
        """Return N·(2d + 1)."""
        return self.num_components * (2 * int(self.means.shape[1]) + 1)

    def classes(self, task: Task) -> list[int]:
        """Return the classes that have a component."""
        labels: list[int] = self.present(task.num_classes).nonzero().flatten().tolist()
        return labels

    def magnitudes(self) -> Magnitudes:
        """Return of every class its largest √(μ² + σ²), the root mean square of what a component generates.

        Weights add up to n_i, or to the number of classes; a wire-dtype of 16 bits changes them by up to 0.4 %.
        """
        components = (self.means.square() + self.stds.square()).mean(1).sqrt()
        rows: dict[int, float] = {}
        for label, size in zip(self.labels.tolist(), components.tolist(), strict=True):
            rows[label] = max(size, rows.get(label, 0.0))
        return Magnitudes(rows, samples=round(0.99 * float(self.weights.sum())))
