"""Types of the data layer: a pool of samples, its partition, and the shards of one client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task

if TYPE_CHECKING:  # listing the datasets must not import torch
    import torch
    from torch import Tensor

Rows = NDArray[np.int64]


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
        in_train: (N,) bool, True where a row belongs to its owner's training part; only for sources whose
            files fix the clients and their split.
        mean: per channel, on the [0, 1] scale for images: the model's input is (x/255 - mean)/std.
        std: per channel; float32 inputs have mean 0 and std 1, i.e. are not normalised.
        notes: messages of the loader for the user (e.g. resized images), one per line.
        columns: feature names in order, if the source has names.
        vocabulary: for text, the tokens in the order of their ids; ids are fed unchanged.
    """

    inputs: NDArray[Any]
    labels: Rows
    label_names: tuple[str, ...]
    num_train: int
    owner: Rows | None = None
    in_train: NDArray[np.bool_] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis."""
        return tuple(int(side) for side in self.inputs.shape[1:])

    def task(self, feature_dim: int) -> Task:
        """Return the task of clients with these samples, with d features."""
        return Task(self.num_classes, feature_dim, self.input_shape, len(self.vocabulary))

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.label_names)

    def fingerprint(self) -> str:
        """Return a short hash of the class names, all labels and up to 511 evenly spaced inputs, to tell data apart."""
        some = self.inputs[:: max(1, len(self.labels) // 256)]
        digest = hashlib.sha256(f"{self.inputs.dtype} {self.inputs.shape} {self.label_names}".encode())
        digest.update(np.ascontiguousarray(self.labels).data)
        digest.update(np.ascontiguousarray(some).data)
        return digest.hexdigest()[:16]

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (scale, shift), float32 (C, 1, 1, ...); x * scale + shift is the model's input."""
        import torch

        channels = self.input_shape[0]
        images = self.inputs.dtype == np.uint8
        mean = np.asarray(self.mean or (0.5 if images else 0.0,) * channels)
        std = np.asarray(self.std or (0.5 if images else 1.0,) * channels)
        largest = 255.0 if images else 1.0
        shape = (channels, *(1 for _ in self.input_shape[1:]))
        scale = torch.from_numpy(1.0 / (largest * std)).float().reshape(shape)
        shift = torch.from_numpy(-mean / std).float().reshape(shape)
        return scale, shift


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
    """

    splits: tuple[Split, ...]
    counts: NDArray[np.int64]
    notes: tuple[str, ...] = ()

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


@dataclass(frozen=True, eq=False)
class Shard:
    """Samples in memory: ``inputs`` (n, *input_shape), see :class:`Pool`, contiguous; ``labels`` (n,) int64."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def check(self, name: str, num_classes: int) -> None:
        """Check types, shapes and values of the samples.

        Args:
            name: name of the shard, for messages.
            num_classes: K.

        Raises:
            PbflError: stating what was found and what is allowed.
        """
        import torch

        for what, tensor in (("inputs", self.inputs), ("labels", self.labels)):
            if not isinstance(tensor, torch.Tensor):
                raise PbflError(
                    f"{what} of {name} are of type {type(tensor).__name__}: must be a torch.Tensor"
                )
        inputs, labels = self.inputs, self.labels
        if not inputs.dim():
            raise PbflError(f"inputs of {name} are a single number: must be a tensor of shape (N, ...)")
        if labels.dtype != torch.int64 or labels.dim() != 1 or len(labels) != len(inputs):
            raise PbflError(
                f"labels of {name} are {labels.dtype} of shape {tuple(labels.shape)}: must be torch.int64 of "
                f"shape ({len(inputs)},), one per input"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise PbflError(
                f"labels of {name} range from {int(labels.min())} to {int(labels.max())}: must be 0 to "
                f"{num_classes - 1} (num_classes - 1)"
            )
        if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
            raise PbflError(f"inputs of {name} hold numbers that are not finite")

    def on(self, device: torch.device) -> Shard:
        """Return the same samples in a device's memory."""
        return Shard(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's data.

    Attributes:
        train: training samples.
        test: test samples; may be empty.
        num_classes: K of the whole federation.
        label_names: the K names.
        scale: (C, 1, 1, ...) float32.
        shift: (C, 1, 1, ...) float32.
        validation: training samples held out to select a round by; None if there are none.
        columns: feature names, if the source has names.
        vocabulary: for text, the tokens in the order of their ids.
    """

    train: Shard
    test: Shard
    num_classes: int
    label_names: tuple[str, ...]
    scale: Tensor
    shift: Tensor
    validation: Shard | None = None
    columns: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()

    def check(self) -> None:
        """Check the invariants above; for data that an app supplies.

        Raises:
            PbflError: naming the first violation.
        """
        import torch

        if len(self.label_names) != self.num_classes:
            raise PbflError(
                f"label_names has {len(self.label_names)} names: must be one for each of {self.num_classes} classes"
            )
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        for name, shard in parts.items():
            if shard is None:
                continue
            shard.check(name, self.num_classes)
            if (shape := tuple(shard.inputs.shape[1:])) != self.input_shape:
                raise PbflError(f"inputs of {name} have shape {shape}, those of train {self.input_shape}")
            if self.vocabulary and (dtype := shard.inputs.dtype) not in (torch.int32, torch.int64):
                raise PbflError(f"token ids of {name} are {dtype}: must be torch.int32 or torch.int64")
            if self.vocabulary and shard.inputs.numel():
                # On a GPU an id out of range makes CUDA unusable for the whole process.
                least, most = int(shard.inputs.min()), int(shard.inputs.max())
                if not 0 <= least <= most < len(self.vocabulary):
                    raise PbflError(
                        f"token ids of {name} range from {least} to {most}: must be 0 to "
                        f"{len(self.vocabulary) - 1}, the indices of vocabulary"
                    )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis."""
        return tuple(self.train.inputs.shape[1:])

    def task(self, feature_dim: int) -> Task:
        """Return this client's task, with d features."""
        return Task(self.num_classes, feature_dim, self.input_shape, len(self.vocabulary))

    def on(self, device: torch.device) -> ClientData:
        """Return the same data in a device's own memory, so that batches need no transfer."""
        if device == self.train.inputs.device:
            return self
        return replace(
            self,
            train=self.train.on(device),
            test=self.test.on(device),
            validation=None if self.validation is None else self.validation.on(device),
            scale=self.scale.to(device),
            shift=self.shift.to(device),
        )

    @property
    def counts(self) -> Tensor:
        """n_ij: training samples of every class, int64 (K,), on the CPU."""
        import torch

        return torch.bincount(self.train.labels.cpu(), minlength=self.num_classes)

    def prepare(self, batch_inputs: Tensor) -> Tensor:
        """Return a batch as model input: float32, normalised, on the batch's own device; token ids are unchanged."""
        if self.vocabulary:
            return batch_inputs
        device = batch_inputs.device
        return batch_inputs.float() * self.scale.to(device) + self.shift.to(device)


@dataclass(frozen=True)
class Dataset:
    """An entry of the table of datasets: its loader and a one-line description."""

    load: Callable[[DataSettings], Pool]
    description: str
