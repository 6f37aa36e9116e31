"""A client's class table: sums and means of its features, and those of them that may leave the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pbfl_flwr.method import Client
from pbfl_flwr.prototypes.privacy import Release
from pbfl_flwr.prototypes.stages import Collect
from pbfl_flwr.prototypes.statistics import ClassSums
from pbfl_flwr.training import complete_batches, each_feature


def class_sums_of(client: Client, transform: Callable[[Tensor], Tensor] | None = None) -> ClassSums:
    """Return the sums of the features of every class, over the client's training data in evaluation mode.

    What ``drop-last`` "always" keeps from training is left out here as well.

    Args:
        client: whose network and data.
        transform: applied to the features (B, d) before they are added, e.g. to give them unit length.
    """
    sums = ClassSums(client.task.num_classes, client.task.feature_dim, client.device)
    for features, labels in each_feature(client, complete_batches(client)):
        sums.add(features if transform is None else transform(features), labels)
    return sums


class Collector:
    """Takes a client's class sums at the moment that the slot ``collect`` names.

    ``post``: after its training. ``before``: before it. ``trajectory``: from the batches that it trains on, with the
    network as it is at each step. ``last-epoch``: likewise, of the last epoch alone.

    Args:
        client: about to be trained.
        moment: the slot's value.
    """

    def __init__(self, client: Client, moment: Collect) -> None:
        self._client, self.by_epoch = client, moment == "last-epoch"
        self._passing: ClassSums | None = None
        if self.by_epoch or moment == "trajectory":
            self._passing = ClassSums(client.task.num_classes, client.task.feature_dim, client.device)
        self._taken = class_sums_of(client) if moment == "before" else None

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Take note of a batch that is trained on: features (B, d), labels (B,)."""
        if self._passing is not None:
            self._passing.add(features.detach(), labels)

    def close_epoch(self) -> None:
        """Keep the sums of an epoch in the place of the last one's, where epochs are told apart (``by_epoch``)."""
        if self._passing is not None and self.by_epoch:
            self._taken = self._passing.emptied()

    def sums(self) -> ClassSums:
        """Return the class sums, once the client is trained."""
        found = self._passing if self._taken is None else self._taken
        return class_sums_of(self._client) if found is None else found


def released_means(client: Client, stage: Release, means: Tensor) -> Tensor:
    """Return the means (K, d) that may be sent: of clipped features, in a second pass, where samples are clipped."""
    return means if stage.of_samples is None else class_sums_of(client, stage.of_samples).means()[0]
