"""What the data layer hands on: a pool of samples, its partition, and the shards of one client."""

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

if TYPE_CHECKING:  # the table of datasets is to be read without waiting for torch
    import torch
    from torch import Tensor

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a dataset, before they are dealt to clients.

    Attributes:
        inputs: (N, *input_shape), uint8 for images (channels first), int32 for token ids, float32 for
            everything else; it may be a memory map that all processes of the machine share.
        labels: (N,) int64, 0..K-1.
        label_names: the K names.
        num_train: the first ``num_train`` rows are the official training part, the rest the official test
            part; equal to N when the set has no official test part.
        owner: (N,) int64, the natural client of every row, 0..; None when the set has no such column.
        in_train: (N,) bool, True where a row belongs to its owner's training part; only for sources whose
            files fix the clients and their split.
        mean: per channel, in units of [0, 1] for images: what is fed to a model is (x/255 - mean)/std.
        std: per channel; float32 inputs have mean 0 and std 1 and are fed as they are.
        notes: what the reader should tell the user (images that were resized), a line each.
        columns: names of the features, in their order, of sources that name them.
        vocabulary: of text: the tokens, whose places are the ids; inputs are fed as they are.
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
        """Return what clients with these samples agree on, with d features."""
        return Task(self.num_classes, feature_dim, self.input_shape, len(self.vocabulary))

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.label_names)

    def fingerprint(self) -> str:
        """Return a short hash of all labels and of up to 256 samples, evenly spaced: other data has another one."""
        some = self.inputs[:: max(1, len(self.labels) // 256)]
        digest = hashlib.sha256(f"{self.inputs.dtype} {self.inputs.shape} {self.label_names}".encode())
        digest.update(np.ascontiguousarray(self.labels).data)
        digest.update(np.ascontiguousarray(some).data)
        return digest.hexdigest()[:16]

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (scale, shift), float32 (C, 1, 1, ...), so that x * scale + shift is what a model is fed."""
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
    """Who holds what.

    Attributes:
        splits: one a client, M of them.
        counts: (M, K) int64, training and test samples together: the K_i and n_ij of the papers, which the
            references take before they split a client's share.
        notes: what differs from what was asked (samples moved by the repair, classes left out), a line each.
    """

    splits: tuple[Split, ...]
    counts: NDArray[np.int64]
    notes: tuple[str, ...] = ()

    def majority(self, labels: Rows) -> float | None:
        """Return the share of all test samples that are of their client's most frequent training class.

        Who has learnt nothing but the skew of the labels scores this; None without test samples.

        Args:
            labels: (N,) of the pool that was dealt.
        """
        tested = sum(len(split.test) for split in self.splits)
        held = (split for split in self.splits if len(split.train) and len(split.test))
        hits = (np.sum(labels[s.test] == np.bincount(labels[s.train]).argmax()) for s in held)
        return float(sum(hits)) / tested if tested else None


@dataclass(frozen=True, eq=False)
class Shard:
    """Samples in memory: ``inputs`` (n, *input_shape), see :class:`Pool`, contiguous; ``labels`` (n,) int64."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def check(self, name: str, num_classes: int) -> None:
        """Make sure that these are samples of K classes.

        Args:
            name: of the shard, for messages.
            num_classes: K.

        Raises:
            PbflError: saying what they are and what is allowed.
        """
        import torch

        for what, found in (("inputs", self.inputs), ("labels", self.labels)):
            if not isinstance(found, torch.Tensor):
                raise PbflError(
                    f"{what} of {name} are of type {type(found).__name__}: allowed is a torch.Tensor"
                )
        inputs, labels = self.inputs, self.labels
        if not inputs.dim():
            raise PbflError(f"inputs of {name} are a single number: allowed is one input after the other")
        if labels.dtype != torch.int64 or labels.dim() != 1 or len(labels) != len(inputs):
            raise PbflError(
                f"labels of {name} are {labels.dtype} of shape {tuple(labels.shape)}: allowed is torch.int64 of shape "
                f"({len(inputs)},), one for each of its inputs"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise PbflError(
                f"labels of {name} go from {int(labels.min())} to {int(labels.max())}: allowed is 0 to "
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
        validation: samples held out of the training data to choose a round by; None is none.
        columns: names of the features, of sources that name them.
        vocabulary: of text: the tokens, whose places are the ids.
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
        """Make sure that it is what is said above; for data that an app brings.

        Raises:
            PbflError: saying what is not.
        """
        import torch

        if len(self.label_names) != self.num_classes:
            raise PbflError(
                f"label_names has {len(self.label_names)} names: allowed is one for each of {self.num_classes} classes"
            )
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        for name, shard in parts.items():
            if shard is None:
                continue
            shard.check(name, self.num_classes)
            if (shape := tuple(shard.inputs.shape[1:])) != self.input_shape:
                raise PbflError(
                    f"inputs of {name} are of shape {shape}, those of train of {self.input_shape}"
                )
            if self.vocabulary and (found := shard.inputs.dtype) not in (torch.int32, torch.int64):
                raise PbflError(f"token ids of {name} are {found}: allowed are torch.int32 and torch.int64")
            if self.vocabulary and shard.inputs.numel():
                # On a GPU one id too many ends the whole process's work.
                least, most = int(shard.inputs.min()), int(shard.inputs.max())
                if not 0 <= least <= most < len(self.vocabulary):
                    raise PbflError(
                        f"token ids of {name} go from {least} to {most}: allowed is 0 to {len(self.vocabulary) - 1}, "
                        "the places in vocabulary"
                    )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis."""
        return tuple(self.train.inputs.shape[1:])

    def task(self, feature_dim: int) -> Task:
        """Return what this client agrees on with others, with d features."""
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
        """Return a batch as a model is fed: float32, normalised, on the batch's own device; token ids stay ids."""
        if self.vocabulary:
            return batch_inputs
        device = batch_inputs.device
        return batch_inputs.float() * self.scale.to(device) + self.shift.to(device)


@dataclass(frozen=True)
class Dataset:
    """A row of the table of datasets: how to load it and what it is, in a line."""

    load: Callable[[DataSettings], Pool]
    description: str
