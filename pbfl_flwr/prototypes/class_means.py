"""Class sums, counts and local prototypes c̄_ij = (1/n_ij) Σ_{x in D_ij} f_i(x) (FedProto, Eq. 3)."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from pbfl_flwr.config.keys import Collect
from pbfl_flwr.method import Client
from pbfl_flwr.prototypes.privacy import Release
from pbfl_flwr.training.loop import complete_batches, each_feature

MOST_ROWS = 2**16  # summed in one operation, so that batches of fewer keep their bits
CHUNK = 2**12  # rows summed in float32 before they go into a sum in float64


def class_sums(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum the features of every class by scatter operations, without a loop over samples.

    Up to 2^16 rows are summed in the dtype of the sums; more are accumulated in float64, 2^12 rows at a time.

    Args:
        features: (B, d) floating point; half-precision features are summed in float32.
        labels: (B,) whole numbers 0..K-1.
        num_classes: K.

    Returns:
        sums (K, d) in float32 or float64, and counts (K,) int64; both on the features' device. A class
        without a sample has a zero row and the count 0.
    """
    wide = features.detach()
    if wide.dtype not in (torch.float32, torch.float64):
        wide = wide.to(torch.float32)
    labels = labels.to(wide.device, torch.int64)
    if len(wide) > MOST_ROWS:
        total = ClassSums(num_classes, wide.shape[1], wide.device)
        for rows, owners in zip(wide.split(CHUNK), labels.split(CHUNK), strict=True):
            total.add(rows, owners)
        return total.sums.to(wide), total.counts.to(labels)
    sums = wide.new_zeros(num_classes, wide.shape[1]).index_add_(0, labels, wide)
    counts = labels.new_zeros(num_classes).index_add_(0, labels, torch.ones_like(labels))
    return sums, counts


def class_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return sums / counts (K, d) in the dtype of the sums; a class with count 0 has a zero row."""
    means = sums / counts.clamp_min(1).to(sums.dtype).unsqueeze(1)
    return means * (counts > 0).to(sums.dtype).unsqueeze(1)


class ClassSums:
    """Class sums and counts over many batches, accumulated in float64.

    So the prototypes depend on the batch size only by the rounding of sums within a batch, a relative 5e-6 with batches
    of 512 and 6e-4 with 2^16. The sums are on the features' device if that is CUDA, so that no batch waits for a copy;
    otherwise on the CPU, since Apple's GPUs have no float64.

    Args:
        num_classes: K.
        feature_dim: d.
        device: of the features.
    """

    def __init__(self, num_classes: int, feature_dim: int, device: torch.device) -> None:
        place = device if device.type == "cuda" else torch.device("cpu")
        self.sums = torch.zeros(num_classes, feature_dim, dtype=torch.float64, device=place)
        self.counts = torch.zeros(num_classes, dtype=torch.int64, device=place)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add one batch in place, features (B, d) of any floating dtype, labels (B,)."""
        sums, counts = class_sums(features, labels, len(self.counts))
        self.sums += sums.to(self.sums)
        self.counts += counts.to(self.counts.device)

    def emptied(self) -> ClassSums:
        """Return a copy of the sums so far, and reset this object in place."""
        finished = copy(self)
        finished.sums, finished.counts = self.sums.clone(), self.counts.clone()
        self.sums.zero_()
        self.counts.zero_()
        return finished

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return c̄_ij (K, d) float32, which classes are present (K,) bool, and n_ij (K,) int64, on the CPU."""
        counts = self.counts.cpu().clone()
        return class_means(self.sums.cpu(), counts).to(torch.float32), counts > 0, counts


def class_sums_of(client: Client, transform: Callable[[Tensor], Tensor] | None = None) -> ClassSums:
    """Return the class sums of the features of the client's training data, in evaluation mode.

    Samples that ``drop-last`` "always" excludes from training are excluded here as well.

    Args:
        client: its network and data are used.
        transform: applied to the features (B, d) before they are added, e.g. to give them unit length.
    """
    sums = ClassSums(client.task.num_classes, client.task.feature_dim, client.device)
    for features, labels in each_feature(client, complete_batches(client)):
        sums.add(features if transform is None else transform(features), labels)
    return sums


class Collector:
    """Collects a client's class sums at the moment that the setting ``collect`` names.

    ``post``: after its training. ``before``: before it. ``trajectory``: from the batches it trains on, with the
    network as it is at each step. ``last-epoch``: likewise, only in the last epoch.

    Args:
        client: before its training.
        moment: the setting's value.
    """

    def __init__(self, client: Client, moment: Collect) -> None:
        self._client, self._by_epoch = client, moment == "last-epoch"
        self._passing: ClassSums | None = None
        if self._by_epoch or moment == "trajectory":
            self._passing = ClassSums(client.task.num_classes, client.task.feature_dim, client.device)
        self._taken = class_sums_of(client) if moment == "before" else None

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Record a training batch: features (B, d), labels (B,)."""
        if self._passing is not None:
            self._passing.add(features.detach(), labels)

    def close_epoch(self) -> None:
        """Replace the sums of the previous epoch by those of this one, if they are kept per epoch."""
        if self._passing is not None and self._by_epoch:
            self._taken = self._passing.emptied()

    def sums(self) -> ClassSums:
        """Return the class sums, after the client's training."""
        sums = self._passing if self._taken is None else self._taken
        return class_sums_of(self._client) if sums is None else sums


def released_means(client: Client, stage: Release, means: Tensor) -> Tensor:
    """Return the means (K, d) that may be sent; if samples are clipped, computed in a second pass over the features."""
    return means if stage.of_samples is None else class_sums_of(client, stage.of_samples).means()[0]
