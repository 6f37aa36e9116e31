"""The aggregation rule of a run, and the scale of its sums.

PPA divides by n and APS multiplies by μ; both assume all clients. If only some answer, or a class is kept from
an earlier round, the scale is that of the samples actually in a sum. An n or μ in the configuration refers to its
num-clients, even before all of them have joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pbfl_flwr.method import Round
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes.aggregation import (
    aps,
    coordinate_median,
    mean,
    ppa,
    trimmed_mean,
    weighted,
    weighted_shrunk,
)
from pbfl_flwr.prototypes.stages import Stages
from pbfl_flwr.task import Task

Uploads = Mapping[int, Prototypes]


@dataclass(frozen=True)
class Combination:
    """The server's aggregation rule.

    Attributes:
        stages: of the pipeline.
    """

    stages: Stages

    def combine(self, uploads: Uploads, round_info: Round) -> Prototypes:
        """Return the aggregate of at least one upload; its num_examples is n_t if the clients scale by it."""
        K, rule, sent = round_info.task.num_classes, self.stages.aggregation, uploads.values()
        if rule == "mean":
            return mean(sent)
        if rule == "weighted":
            return weighted(sent)
        if rule == "weighted-shrunk":
            return weighted_shrunk(sent)
        if rule == "median":
            return coordinate_median(sent)
        if rule == "trimmed-mean":
            return trimmed_mean(sent, self.stages.trim_share)
        if rule == "ppa":
            total = None if self.stages.sends_total else self._expected_total(uploads, round_info)
            return ppa(sent, K, total)
        if rule == "aps-mean":
            combined = aps(sent, 1.0, "mean")  # μ is applied by the client
            # A mean over holders does not grow with the number of answers, so μ is based on the samples of all clients.
            everybody = round((combined.num_examples or 0) * round_info.num_clients / len(uploads))
            return replace(combined, num_examples=everybody or None)
        return aps(sent, self._whole(uploads, round_info), "sum")

    def at_scale_of(self, n_t: int | None, previous: Prototypes) -> Prototypes:
        """Rescale earlier sums over n samples to n_t samples, since clients multiply all rows by 0.9·K/n_t."""
        if not n_t or not previous.num_examples:
            return previous
        return replace(previous, values=previous.values * (n_t / previous.num_examples), num_examples=n_t)

    def training_scale(self, uploads: Uploads, round_info: Round) -> float | None:
        """Return the factor that, times |N_j|, rescales an upload to the features' scale: K/n or μ; None for 1."""
        if self.stages.aggregation == "ppa":
            return round_info.task.num_classes / self._total(uploads, round_info)
        if not self.stages.rule.aps:
            return None
        if self.stages.aps_scale == "auto":
            return self.mu(round_info.task, self._total(uploads, round_info))
        return self.stages.aps_scale * self._whole(uploads, round_info)

    def mu(self, task: Task, num_examples: int | None) -> float:
        """Return APS's μ: as configured, else 0.9·K/n, with n all samples of all clients.

        The paper's constants are 0.9·K/n for CIFAR-10 and CIFAR-100, 0.83·K/n for Tiny-ImageNet and 0.4-0.5·K/n for the
        skewed GTSRB and Flowers-102: with the sum at the server, APS is PPA with a tunable constant.

        Raises:
            RejectedPayload: if it is derived from n and n was not sent.
        """
        if self.stages.aps_scale != "auto":
            return self.stages.aps_scale
        if not num_examples:
            raise RejectedPayload(
                "aps-scale = 'auto' needs the number of examples n with the uploads, but none was sent"
            )
        return 0.9 * task.num_classes / num_examples

    def _total(self, uploads: Uploads, round_info: Round) -> int:
        """Return n_t, the number of training samples in this round's uploads."""
        if not self.stages.sends_total:
            return self._expected_total(uploads, round_info)
        return max(1, sum(upload.num_examples or 0 for upload in uploads.values()))

    def _expected_total(self, uploads: Uploads, round_info: Round) -> int:
        return max(1, round(self.stages.total_examples * len(uploads) / round_info.configured_clients))

    def _whole(self, uploads: Uploads, round_info: Round) -> float:
        """Return the factor n/n_t from this round's sum to one over all clients, for a numeric μ: M / answers."""
        return 1.0 if self.stages.aps_scale == "auto" else round_info.configured_clients / len(uploads)
