"""A client's class table: sums and means of its features, and the means that may leave the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pbfl_flwr.config.keys import Collect
from pbfl_flwr.method import Client
from pbfl_flwr.prototypes.class_means import ClassSums
from pbfl_flwr.prototypes.privacy import Release
from pbfl_flwr.training.loop import complete_batches, each_feature


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
        self._client, self.by_epoch = client, moment == "last-epoch"
        self._passing: ClassSums | None = None
        if self.by_epoch or moment == "trajectory":
            self._passing = ClassSums(client.task.num_classes, client.task.feature_dim, client.device)
        self._taken = class_sums_of(client) if moment == "before" else None

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Record a training batch: features (B, d), labels (B,)."""
        if self._passing is not None:
            self._passing.add(features.detach(), labels)

    def close_epoch(self) -> None:
        """Replace the sums of the previous epoch by those of this one, if they are kept per epoch (``by_epoch``)."""
        if self._passing is not None and self.by_epoch:
            self._taken = self._passing.emptied()

    def sums(self) -> ClassSums:
        """Return the class sums, after the client's training."""
        found = self._passing if self._taken is None else self._taken
        return class_sums_of(self._client) if found is None else found


def released_means(client: Client, stage: Release, means: Tensor) -> Tensor:
    """Return the means (K, d) that may be sent; if samples are clipped, computed in a second pass over the features."""
    return means if stage.of_samples is None else class_sums_of(client, stage.of_samples).means()[0]
