"""One client's data as tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.contract import Pool, Rows, Split
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task

if TYPE_CHECKING:  # listing the datasets must not import torch
    import torch
    from torch import Tensor


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
        vocabulary_size: V if inputs are token ids 0..V-1; 0 if they are numbers.
        natural_id: name of the person or device whose samples these are, for tables and messages; "" if there is none.
    """

    train: Shard
    test: Shard
    num_classes: int
    label_names: tuple[str, ...]
    scale: Tensor
    shift: Tensor
    validation: Shard | None = None
    columns: tuple[str, ...] = ()
    vocabulary_size: int = 0
    natural_id: str = ""

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
        texts = {"label_names": self.label_names, "columns": self.columns, "natural_id": (self.natural_id,)}
        for what, names in texts.items():
            if wrong := [name for name in names if not isinstance(name, str)]:
                raise PbflError(f"{what} has {wrong[0]!r} of type {type(wrong[0]).__name__}: must be str")
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        for name, shard in parts.items():
            if shard is None:
                continue
            shard.check(name, self.num_classes)
            if (shape := tuple(shard.inputs.shape[1:])) != self.input_shape:
                raise PbflError(f"inputs of {name} have shape {shape}, those of train {self.input_shape}")
            if self.vocabulary_size and (dtype := shard.inputs.dtype) not in (torch.int32, torch.int64):
                raise PbflError(f"token ids of {name} are {dtype}: must be torch.int32 or torch.int64")
            if self.vocabulary_size and shard.inputs.numel():
                # On a GPU an id out of range makes CUDA unusable for the whole process.
                least, most = int(shard.inputs.min()), int(shard.inputs.max())
                if not 0 <= least <= most < self.vocabulary_size:
                    raise PbflError(
                        f"token ids of {name} range from {least} to {most}: must be 0 to "
                        f"{self.vocabulary_size - 1} (vocabulary_size - 1)"
                    )
        for what, values in {"scale": self.scale, "shift": self.shift}.items():
            if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
                found = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
                raise PbflError(f"{what} is {found}: must be a torch.Tensor of torch.float32")
            if self.vocabulary_size:  # ids are fed unchanged
                continue
            sizes, wanted = values.shape, self.input_shape
            pairs = zip(reversed(sizes), reversed(wanted), strict=False)
            if len(sizes) > len(wanted) or any(size not in (1, length) for size, length in pairs):
                channels = (*wanted[:1], *(1 for _ in wanted[1:]))
                raise PbflError(
                    f"{what} has shape {tuple(sizes)}: must be {channels} for inputs of shape {wanted}, or spread to it"
                )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis."""
        return tuple(self.train.inputs.shape[1:])

    def task(self, feature_dim: int) -> Task:
        """Return this client's task, with d features."""
        return Task(self.num_classes, feature_dim, self.input_shape, self.vocabulary_size)

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
        if self.vocabulary_size:
            return batch_inputs
        device = batch_inputs.device
        return batch_inputs.float() * self.scale.to(device) + self.shift.to(device)


def materialise(
    pool: Pool, split: Split, validation_share: float = 0.0, seed: int = 0, natural_id: str = ""
) -> ClientData:
    """Return one client's data as contiguous tensors.

    Args:
        pool: all samples.
        split: this client's rows.
        validation_share: share of the training rows that is held out at random, rounded down.
        seed: seed of that draw.
        natural_id: of the client.

    Rows that are contiguous in the pool (a source with fixed clients) are not copied: the tensor is a view of the
    memory map, shared with other processes until it is written to.
    """
    scale, shift = pool.affine()
    train, held_out = hold_out(split.train, validation_share, seed)
    return ClientData(
        train=_shard(pool, train),
        test=_shard(pool, split.test),
        num_classes=pool.num_classes,
        label_names=pool.label_names,
        scale=scale,
        shift=shift,
        validation=_shard(pool, held_out) if len(held_out) else None,
        columns=pool.columns,
        vocabulary_size=pool.vocabulary_size,
        natural_id=natural_id,
    )


def hold_out(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Return (remaining training rows, held-out rows), both in their original order."""
    validation = np.zeros(len(rows), dtype=bool)
    generator = np.random.default_rng(seed)
    validation[generator.permutation(len(rows))[: num_held_out(len(rows), share)]] = True
    return rows[~validation], rows[validation]


def num_held_out(num_train: int, share: float) -> int:
    """Return how many of a client's training rows :func:`hold_out` holds out."""
    return int(share * num_train)


def _shard(pool: Pool, rows: Rows) -> Shard:
    import torch

    return Shard(torch.from_numpy(_take(pool.inputs, rows)), torch.from_numpy(pool.labels[rows]))


def _take(inputs: NDArray[Any], rows: Rows) -> NDArray[Any]:
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return inputs[rows[0] : rows[0] + len(rows)]
    return np.ascontiguousarray(inputs[rows])
