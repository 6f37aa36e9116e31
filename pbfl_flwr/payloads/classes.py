"""Payloads with one row per class: prototypes, logits, and class counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pbfl_flwr.payloads.contract import (
    MAX_COUNT,
    MAX_MAGNITUDE,
    Magnitudes,
    RejectedPayload,
    floats,
    integers,
    no_others,
    num_examples_of,
    whole_numbers,
)
from pbfl_flwr.task import Task


@dataclass(frozen=True)
class Prototypes:
    """One vector per class, in the width that travels: d, or s under class-wise sparsification.

    Attributes:
        values: (K, width) float32; rows of absent classes are zero. Local prototypes are c̄_ij (or n_ij·c̄_ij
            if the method scales them), global ones c_j.
        present: (K,) bool; which classes have a prototype.
        counts: (K,) int64 n_ij, or None if the rule does not need them (then they never travel).
        num_examples: n_i, or None if the rule does not need it.
    """

    values: Tensor
    present: Tensor
    counts: Tensor | None = None
    num_examples: int | None = None

    max_magnitude: ClassVar[float] = MAX_MAGNITUDE

    @classmethod
    def widths(cls, task: Task) -> tuple[int, int]:
        """Return the smallest and the largest allowed width of a row: 1..d."""
        return 1, task.feature_dim

    @classmethod
    def empty(cls, num_classes: int, width: int) -> Self:
        """Return a table in which no class is present."""
        return cls(torch.zeros(num_classes, width), torch.zeros(num_classes, dtype=torch.bool))

    @property
    def num_present(self) -> int:
        """Number of classes that have a prototype."""
        return int(torch.count_nonzero(self.present))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return labels (present classes, ascending), their rows, and counts and n_i unless they are None."""
        labels = self.present.nonzero().flatten()
        small = self.present.numel() <= 256
        tensors = {
            "labels": labels.to(torch.uint8 if small else torch.int32),
            "rows": self.values[labels].contiguous(),
        }
        if self.counts is not None:
            tensors["counts"] = self.counts[labels].contiguous()
        if self.num_examples is not None:
            tensors["n"] = torch.tensor([self.num_examples])
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Self:
        """Rebuild the dense table from labels and rows; see :class:`Payload`."""
        labels = integers(tensors, "labels")
        rows = floats(tensors, "rows", dimensions=2, limit=cls.max_magnitude)
        K = task.num_classes
        if len(labels) != rows.shape[0]:
            raise RejectedPayload(f"{len(labels)} labels for {rows.shape[0]} rows")
        if len(labels) > K:  # before tolist(), which needs eight times the memory
            raise RejectedPayload(f"{len(labels)} rows for {K} classes")
        classes: list[int] = labels.tolist()
        narrowest, widest = cls.widths(task)
        if not narrowest <= rows.shape[1] <= widest:
            raise RejectedPayload(f"rows are {rows.shape[1]} wide, must be {narrowest}..{widest}")
        if classes != list(range(K)):
            if classes and not 0 <= min(classes) <= max(classes) < K:
                outside = next(label for label in classes if not 0 <= label < K)
                raise RejectedPayload(f"class id {outside} is outside 0..{K - 1}")
            if len(set(classes)) != len(classes):
                raise RejectedPayload("a class is sent twice")
        counts = whole_numbers(tensors, "counts") if "counts" in tensors else None
        if counts is not None and counts.shape[0] != len(classes):
            raise RejectedPayload(f"{counts.shape[0]} counts for {len(classes)} rows")
        if counts is not None and classes:
            ends = torch.aminmax(counts)
            if ends.min.item() < 1:
                raise RejectedPayload("a row with a count of zero or less")
            if ends.max.item() >= MAX_COUNT:
                raise RejectedPayload(f"a count of {ends.max.item()}, must be less than {MAX_COUNT}")
        total = num_examples_of(tensors) if "n" in tensors else None
        no_others(tensors, {"labels", "rows", "counts", "n"})
        if classes == list(range(K)):  # all classes present, in order: no copy needed
            return cls(rows, torch.ones(K, dtype=torch.bool), counts, total)
        labels = labels.long()
        values = torch.zeros(K, rows.shape[1]).index_copy_(0, labels, rows)
        present = torch.zeros(K, dtype=torch.bool).index_fill_(0, labels, True)
        if counts is not None:
            counts = torch.zeros(K, dtype=torch.int64).index_copy_(0, labels, counts)
        return cls(values, present, counts, total)

    def scalars(self) -> int:
        """Return K_present · width."""
        return self.num_present * int(self.values.shape[1])

    def classes(self, task: Task) -> list[int]:
        """Return the classes with a row that is not zero."""
        present = self.present & self.values.any(dim=1)
        labels: list[int] = present.nonzero().flatten().tolist()
        return labels

    def magnitudes(self) -> Magnitudes:
        """Return the size of every present row, and the larger of n_i and the sum of the n_ij."""
        rows = torch.linalg.vector_norm(self.values, dim=1) / math.sqrt(self.values.shape[1])
        samples = max(self.num_examples or 0, 0 if self.counts is None else int(self.counts.sum()))
        return Magnitudes(dict(enumerate(rows.tolist())), samples=samples)


@dataclass(frozen=True)
class Logits(Prototypes):
    """One vector of class scores per class: prototypes in the space of outputs, of width K.

    Attributes:
        values: (K, K) float32; row c is the mean output on samples of class c, as logits or probabilities.
        present: (K,) bool; which classes have a row.
    """

    @classmethod
    def widths(cls, task: Task) -> tuple[int, int]:
        """Return (K, K): the width is always K."""
        return task.num_classes, task.num_classes


def class_counts(tensors: Mapping[str, Tensor], name: str, task: Task) -> Tensor:
    """Return a tensor of one count per class, (K,) int64.

    Raises:
        RejectedPayload: if it is missing, or not K whole numbers from 0 to MAX_COUNT - 1.
    """
    counts = whole_numbers(tensors, name)
    if len(counts) != task.num_classes or int(counts.min()) < 0 or int(counts.max()) >= MAX_COUNT:
        raise RejectedPayload(f"'{name}' must be {task.num_classes} whole numbers from 0")
    return counts
