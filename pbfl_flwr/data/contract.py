"""A pool of samples, and its partition."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.task import Task

if TYPE_CHECKING:  # listing the datasets must not import torch
    from torch import Tensor

Rows = NDArray[np.int64]
MAX_NATURAL_ID = 64  # characters
FINGERPRINT_DIGITS = 32
ROWS_AT_ONCE = 1024  # of a memory map


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a dataset, before they are assigned to clients.

    Attributes:
        inputs: (N, *input_shape), uint8 for images (channels first), int32 for token ids, float32 for
            everything else; possibly a memory map shared by all processes of the machine.
        labels: (N,) int64, 0..K-1.
        label_names: the K class names.
        num_train: the first ``num_train`` rows are the official training part, the rest the official test
            part; N if there is no official test part.
        owner: (N,) int64, the natural client of every row, 0..; None if the dataset has none.
        owner_names: the names of the natural clients 0.. in the data; empty if they have none.
        in_train: (N,) bool, True where a row belongs to its owner's training part; only for sources whose
            files fix the clients and their split.
        notes: messages of the loader for the user (e.g. resized images), one per line.
        columns: feature names in order, if the source has names.
        vocabulary_size: V if inputs are token ids 0..V-1, which are fed unchanged; 0 if they are numbers.
    """

    inputs: NDArray[Any]
    labels: Rows
    label_names: tuple[str, ...]
    num_train: int
    owner: Rows | None = None
    owner_names: tuple[str, ...] = ()
    in_train: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    vocabulary_size: int = 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis."""
        return tuple(int(side) for side in self.inputs.shape[1:])

    def task(self, feature_dim: int) -> Task:
        """Return the task of clients with these samples, with d features."""
        return Task(self.num_classes, feature_dim, self.input_shape, self.vocabulary_size)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.label_names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all samples, the class names, who owns a sample and what is for training."""
        about = (self.inputs.dtype, self.inputs.shape, self.label_names, self.num_train, self.owner_names)
        digest = hashlib.sha256(f"{about}".encode())
        for rows in (self.labels, self.owner, self.in_train):
            digest.update(b"none" if rows is None else np.ascontiguousarray(rows).data)
        for first in range(0, len(self.inputs), ROWS_AT_ONCE):
            digest.update(np.ascontiguousarray(self.inputs[first : first + ROWS_AT_ONCE]).data)
        return digest.hexdigest()[:FINGERPRINT_DIGITS]

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (scale, shift), float32 (C, 1, 1, ...); x * scale + shift is the model's input.

        Images are fed as -1 to 1, other numbers as they are.
        """
        import torch

        scale, shift = (2 / 255, -1.0) if self.inputs.dtype == np.uint8 else (1.0, -0.0)
        shape = (self.input_shape[0], *(1 for _ in self.input_shape[1:]))
        return torch.full(shape, scale), torch.full(shape, shift)


def same_samples(one: str | None, other: str | None) -> bool:
    """Whether two runs' fingerprints are of the same data, as far as they tell; None if a run recorded none."""
    return one is None or other is None or one == other


@dataclass(frozen=True, eq=False)
class Split:
    """The row indices of one client; ``train`` and ``test`` are int64 and disjoint."""

    train: Rows
    test: Rows


@dataclass(frozen=True, eq=False)
class Partition:
    """The assignment of samples to clients.

    Attributes:
        splits: one per client, M in all.
        counts: (M, K) int64, training plus test samples: the papers' K_i and n_ij, which the references count
            before the train/test split.
        notes: deviations from the request (samples moved by the repair, classes left out), one per line.
        natural_ids: M names, of the natural client that each client is; empty if they are none, or have no names.
    """

    splits: tuple[Split, ...]
    counts: NDArray[np.int64]
    notes: tuple[str, ...] = ()
    natural_ids: tuple[str, ...] = ()

    def majority(self, labels: Rows) -> float | None:
        """Return the share of test samples that belong to their client's most frequent training class.

        This is the accuracy of always predicting that class; None without test samples.

        Args:
            labels: (N,), of the partitioned pool.
        """
        tested = sum(len(split.test) for split in self.splits)
        scored = (split for split in self.splits if len(split.train) and len(split.test))
        hits = (np.sum(labels[s.test] == np.bincount(labels[s.train]).argmax()) for s in scored)
        return float(sum(hits)) / tested if tested else None
