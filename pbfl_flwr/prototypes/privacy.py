"""Protects a client's class table before it is sent: small classes held back, clipping, noise.

::

    class means -> [hold back small classes] -> [scale, mask] -> [clip] -> [noise]  ~~>

Differential privacy of what is sent. One release is the table R (K, w) of a client in one round. Two data sets are
neighbours according to ``dp-unit``, and the noise has the standard deviation z·Δ in every entry, where Δ is the largest
Euclidean distance between the tables of neighbours:

* ``client``: any two data sets are neighbours. Every row as sent is clipped to norm C, so two tables differ by at most
  2C in each of K rows: Δ = 2C·√K. This assumes nothing about the training: it holds although the network was trained on
  the data, in this round and in all earlier ones.
* ``sample``: neighbours differ in the presence of one sample, and **the network is given**. Every feature is clipped to
  norm C, and only the row of the sample's class changes. A row that is a sum changes by the feature: Δ = C; a row that
  is a mean changes by ‖x - mean‖/(n + 1) <= 2C/(n + 1), where n >= m is the number of samples without it (m is
  ``min-class-count``): Δ = 2C/(m + 1). The list of sent classes is treated as public. The network depends on the data
  as well, which this unit does not cover.

Releases over rounds. A Gaussian mechanism with noise z·Δ and T adaptively chosen releases is exactly as private as one
with noise z·Δ/√T, so with μ = √T/z

    δ(ε) = Φ(-ε/μ + μ/2) - e^ε·Φ(-ε/μ - μ/2)

(Balle and Wang 2018, Theorem 8; Dong, Roth and Su 2022, Corollaries 2 and 4). This is exact, so no accountant is
needed. Client sampling by the server gives no amplification against the server.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pbfl_flwr.config import PrivacySettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Update
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.rules import rule_named
from pbfl_flwr.prototypes.stages import scale_by_counts
from pbfl_flwr.util.extras import require

LEAST_NOISE = 1e-6  # of z; float32 rounds less away
RELEASES = "releases"  # name in the client's memory of its number of noisy releases


def clip_norms(rows: Tensor, bound: float) -> Tensor:
    """Return rows (N, w) clipped to a Euclidean norm of C."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows * (bound / norms.clamp_min(bound))


def delta_of(epsilon: float, mu: float) -> float:
    """Return δ(ε) of a Gaussian mechanism with Δ/σ = μ."""
    require("dp-noise", "scipy")
    from scipy.special import log_ndtr, ndtr

    shifted = log_ndtr(-epsilon / mu - mu / 2)  # in logarithms, since e^ε could overflow
    return float(ndtr(-epsilon / mu + mu / 2) - math.exp(min(0.0, epsilon + float(shifted))))


def epsilon_of(noise: float, releases: int, delta: float) -> float:
    """Return the smallest ε at δ after T releases with noise z·Δ each; 0 releases cost nothing.

    Args:
        noise: z > 0.
        releases: T.
        delta: δ.
    """
    require("dp-noise", "scipy")
    from scipy.optimize import brentq

    if not releases:
        return 0.0
    mu = math.sqrt(releases) / noise
    if delta_of(0.0, mu) <= delta:
        return 0.0
    highest = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1  # above the zCDP bound
    return float(brentq(lambda epsilon: delta_of(epsilon, mu) - delta, 0.0, highest, xtol=1e-9))


def gaussian(rows: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """Return standard normal numbers (rows, width) float64.

    Without a generator they come from the operating system's randomness, which cannot be predicted from the run's
    seed. Each is half the sum of four, which prevents reconstruction from the gaps between floating-point numbers
    (Holohan and Braghin 2021; Opacus' secure mode does the same).
    """
    if generator is not None:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)
    require("dp-noise", "scipy")
    from scipy.special import ndtri

    words = np.frombuffer(os.urandom(4 * rows * width * 8), dtype=np.uint64).reshape(4, rows, width)
    # Strictly within (0, 1): with 53 bits the added half would be rounded, at the upper end to 1.
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.from_numpy(ndtri(uniform).sum(0) / 2)


@dataclass(frozen=True)
class Release:
    """The stages above for one method, built by :func:`release`.

    Attributes:
        settings: with ``min-class-count`` resolved.
        scaled: whether rows are n_ij·c̄_ij, not means.
    """

    settings: PrivacySettings = field(default_factory=lambda: PrivacySettings(min_class_count=1))
    scaled: bool = False

    @property
    def minimum(self) -> int:
        """m, number of samples below which a class is held back."""
        assert self.settings.min_class_count != "auto", "parse() resolves it"
        return self.settings.min_class_count

    @property
    def of_samples(self) -> Callable[[Tensor], Tensor] | None:
        """Function applied to features (B, d) before they are added to the sums that are sent; None for none."""
        bound = self.settings.dp_clip
        if not bound or self.settings.dp_unit != "sample":
            return None
        return lambda features: clip_norms(features, bound)

    def table(
        self,
        client: Client,
        means: Tensor,
        seen: Tensor,
        narrow: Callable[[Tensor], Tensor] | None = None,
    ) -> Update[Prototypes]:
        """Return the client's class table in the form that may leave the device.

        Rows are zero and counts 0 where a class is held back or absent. The memory has the number of noisy releases.

        Args:
            client: its counts, memory and random generators are used.
            means: (K, d) local prototypes, of features clipped by :attr:`of_samples` if that is set.
            seen: (K,) int64, samples in each mean; at most the client's count is used.
            narrow: (K, d) -> (K, w), compression by the mask.
        """
        keys, counts = self.settings, client.data.counts
        behind = torch.minimum(counts, seen)
        present = behind >= self.minimum
        rows = scale_by_counts(means, counts) if self.scaled else means
        rows = rows if narrow is None else narrow(rows)
        if keys.dp_clip and keys.dp_unit == "client":
            rows = clip_norms(rows, keys.dp_clip)
        rows = torch.where(present[:, None], rows, torch.zeros_like(rows))
        metrics, memory = {}, {}
        if held_back := int(((behind > 0) & ~present).sum()):
            metrics["held-back"] = float(held_back)
        if keys.dp_noise:
            generator = client.generator("privacy") if keys.dp_randomness == "seed" else None
            deviation = keys.dp_noise * self.sensitivity(len(rows))
            noise = deviation * gaussian(len(rows), rows.shape[1], generator)
            rows = (rows.double() + noise * present[:, None]).to(torch.float32)
            releases = 1 + int(client.memory.get(RELEASES, torch.zeros(())))
            memory[RELEASES] = torch.tensor(releases)
            metrics["epsilon"] = epsilon_of(keys.dp_noise, releases, keys.dp_delta)
        table = Prototypes(rows, present, counts * present, int(counts.sum()))
        return Update(table, memory, metrics)

    def sensitivity(self, num_classes: int) -> float:
        """Return Δ, the largest distance between the tables of neighbours; derived in the module's docstring."""
        clip = self.settings.dp_clip
        if self.settings.dp_unit == "client":
            return 2 * clip * math.sqrt(num_classes)
        return clip if self.scaled else 2 * clip / (self.minimum + 1)


def release(settings: PrivacySettings, rule: str, *, sends_total: bool, once: bool) -> Release:
    """Return the stages for a method with the given aggregation rule.

    Args:
        settings: with ``min-class-count`` resolved.
        rule: the server's aggregation rule.
        sends_total: whether uploads have n_i.
        once: whether every sample is in the means exactly once.

    Raises:
        PbflError: if a setting cannot give its guarantee with this rule.
    """
    if settings.dp_clip and settings.dp_unit == "sample" and not once:
        raise PbflError(
            "dp-unit = 'sample' needs every sample exactly once in the class means; collect must be 'post' "
            "and drop-last other than 'always'"
        )
    sent = rule_named(rule)
    if not settings.dp_noise:
        return Release(settings, sent.scaled)
    if settings.dp_noise < LEAST_NOISE:
        raise PbflError(
            f"dp-noise = {settings.dp_noise:g}: so little hides nothing; must be 0, or at least {LEAST_NOISE:g}"
        )
    if not settings.dp_clip:
        raise PbflError(
            "dp-noise needs a clipping norm, which bounds the sensitivity; dp-clip must be above 0"
        )
    if sent.counts:
        raise PbflError(f"dp-noise: rule '{rule}' sends exact counts with the rows; must be another rule")
    if sends_total:
        remedy = "total-examples" if rule == "ppa" else "aps-scale to a number"
        raise PbflError(f"dp-noise: rule '{rule}' sends n_i exactly; set {remedy}")
    return Release(settings, sent.scaled)
