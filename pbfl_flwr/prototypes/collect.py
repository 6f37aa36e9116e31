"""A client's class table: sums and means of its features, and those of them that may leave the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pbfl_flwr.method import Client
from pbfl_flwr.prototypes.privacy import Release
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


def released_means(client: Client, stage: Release, means: Tensor) -> Tensor:
    """Return the means (K, d) that may be sent: of clipped features, in a second pass, where samples are clipped."""
    return means if stage.of_samples is None else class_sums_of(client, stage.of_samples).means()[0]
