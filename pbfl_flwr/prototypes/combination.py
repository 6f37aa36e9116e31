"""How one round's uploads become one table: the rule, and the scale of what was sent n-scaled.

PPA divides by n and APS multiplies by μ, both meant for all clients. Where only some answer, or a class is kept from an
earlier round, the scale is that of the samples that are really behind a sum. An n or a μ in the configuration is for
its num-clients, also before all of them have joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pbfl_flwr.method import Round
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes import aggregation, scaling, sums
from pbfl_flwr.prototypes.stages import APS_RULES, Stages
from pbfl_flwr.task import Task

Uploads = Mapping[int, Prototypes]


@dataclass(frozen=True)
class Combination:
    """The server's rule.

    Attributes:
        stages: of the pipeline.
        dense: whether uploads have a row for every class, zero where the client holds none.
    """

    stages: Stages
    dense: bool = False

    def combine(self, uploads: Uploads, at: Round) -> Prototypes:
        """Return the aggregate of at least one upload; its num_examples is n_t where the clients scale by it."""
        combined = self._rule(uploads, at)
        if self.dense:  # zero everywhere: nobody sent it
            combined = replace(combined, present=(combined.values != 0).any(dim=1))
        return combined

    def _rule(self, uploads: Uploads, at: Round) -> Prototypes:
        K, rule, sent = at.task.num_classes, self.stages.aggregation, uploads.values()
        shares = at.shares_of(uploads)
        if rule == "mean":
            return aggregation.mean(sent, shares)
        if rule == "weighted":
            return aggregation.weighted(sent, shares)
        if rule == "weighted-shrunk":
            return aggregation.weighted_shrunk(sent, shares)
        if rule == "median":
            return aggregation.coordinate_median(sent)
        if rule == "trimmed-mean":
            return aggregation.trimmed_mean(sent, self.stages.trim_share)
        if rule == "ppa":
            known = None if self.stages.sends_total else self._expected_total(uploads, at)
            return aggregation.ppa(sent, K, known, shares)
        if rule == "aps-mean":
            combined = aggregation.aps(sent, 1.0, "mean", shares)  # μ is applied by the client
            # A mean over holders does not grow with who answers, so μ follows the samples of all clients.
            everybody = round((combined.num_examples or 0) * at.num_clients / self._answered(uploads, at))
            return replace(combined, num_examples=everybody or None)
        return aggregation.aps(sent, self._whole(uploads, at), "sum", shares)

    def at_scale_of(self, n_t: int | None, kept: Prototypes) -> Prototypes:
        """Return kept sums over n samples as sums over n_t, since clients multiply all of them by 0.9·K/n_t."""
        if not n_t or not kept.num_examples:
            return kept
        return replace(kept, values=kept.values * (n_t / kept.num_examples), num_examples=n_t)

    def training_scale(self, uploads: Uploads, at: Round) -> float | None:
        """Return what, times |N_j|, brings an upload back to the size of features: K/n, μ, or None for 1."""
        if self.stages.aggregation == "ppa":
            return at.task.num_classes / self._total(uploads, at)
        if self.stages.aggregation not in APS_RULES:
            return None
        if self.stages.aps_scale == "auto":
            return self.mu(at.task, self._total(uploads, at))
        return self.stages.aps_scale * self._whole(uploads, at)

    def mu(self, task: Task, num_examples: int | None) -> float:
        """Return APS's μ.

        Raises:
            RejectedPayload: if it follows from n and n did not come.
        """
        if self.stages.aps_scale != "auto":
            return self.stages.aps_scale
        if not num_examples:
            raise RejectedPayload("aps-scale = 'auto' needs n, the samples behind the sums, and none came")
        return scaling.default_aps_scale(task.num_classes, num_examples)

    def summed(self, total: sums.Total, num_clients: int) -> Prototypes:
        """Return the upload that gives, alone, what the rule makes of all the uploads in a sum.

        Means stand for themselves; sums too, but that PPA with a known n and APS with a known μ expect one upload in M.
        """
        present = total.holders > 0
        factor: Tensor | float = 1.0
        if self.stages.aggregation in ("mean", "aps-mean"):
            factor = 1 / total.holders.clamp_min(1).unsqueeze(1)
        elif self.stages.aggregation == "ppa" and not self.stages.sends_total:
            n = self.stages.total_examples
            factor = max(1, round(n / num_clients)) / max(1, round(n * total.clients / num_clients))
        elif self.stages.aggregation == "aps-sum" and not self.stages.sends_total:
            factor = 1 / max(1, total.clients)
        n_t = total.num_examples if self.stages.sends_total else None
        if n_t and self.stages.aggregation == "aps-mean":
            everybody = round(n_t * num_clients / total.clients)
            n_t = max(1, round(n_t / total.clients))  # of the one client that the sum then is
            factor *= n_t * num_clients / everybody  # μ divides by the rounded n, so the rows make up for it
        rows = torch.where(present[:, None], total.rows * factor, torch.zeros_like(total.rows))
        return Prototypes(rows.to(torch.float32), present, None, n_t)

    def _total(self, uploads: Uploads, at: Round) -> int:
        """n_t, the training samples behind this round's uploads."""
        if not self.stages.sends_total:
            return self._expected_total(uploads, at)
        return max(1, sum(upload.num_examples or 0 for upload in uploads.values()))

    def _expected_total(self, uploads: Uploads, at: Round) -> int:
        answered = self._answered(uploads, at)
        return max(1, round(self.stages.total_examples * answered / at.configured_clients))

    def _whole(self, uploads: Uploads, at: Round) -> float:
        """Return what makes this round's sum one over all clients, n/n_t, where μ is a number: M over who answered."""
        return 1.0 if self.stages.aps_scale == "auto" else at.configured_clients / self._answered(uploads, at)

    @staticmethod
    def _answered(uploads: Uploads, at: Round) -> float:
        return sum(at.shares_of(uploads) or [1.0] * len(uploads))
