"""GFPL's prototypes: Gaussian mixtures of features, fused by Bhattacharyya distance, sampled as pseudo-features.

Source: GFPL, Section 3.3 (mixtures), 3.4 (distance), Algorithm 1 (fusion), Section 4.2 (pseudo-features).

EM is scikit-learn's ``GaussianMixture``. A batched EM in torch (all classes at once, k-means++ start) was compared
with it on one core, 4 components: 4 classes of 100 samples at d = 50 took 3 ms instead of 7, 10 classes of 2,000 at
d = 512 2,300 ms instead of 370, and its log-likelihood was always worse (4.3 against 14.0 a sample in the first
case), because scikit-learn starts from k-means; its own k-means++ start is no faster and worse (11.3). A client fits
once every few rounds, so that milliseconds do not matter, and features are small enough to be moved off a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.config.keys import Stale
from pbfl_flwr.methods.gfpl.payload import Mixtures
from pbfl_flwr.payloads import RejectedPayload, joined, part_of
from pbfl_flwr.task import Task

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

STD_FLOOR = 1e-3  # ReLU features are often constant within a class
MAX_ITERATIONS = 100
TOLERANCE = 1e-3  # on the mean log-likelihood

Floats = NDArray[np.float64]
Weight = Literal["count", "pi"]
Distance = Literal["sum", "per-dimension"]


def fit_mixtures(
    batches: Iterable[tuple[Tensor, Tensor]],
    width: int,
    components: int,
    seed: int,
    weight: Weight = "count",
) -> tuple[Mixtures, dict[str, float]]:
    """Fit one mixture with diagonal covariance to the features of every class, by EM (Eq. 4 to 6).

    A class with fewer distinct samples than components gets one component per distinct sample. A component based on
    a single sample has no deviation of its own: it gets the client's pooled within-class deviation, so that samples
    drawn from it differ from that sample. No deviation is below STD_FLOOR.

    Args:
        batches: features (B, d), finite, and labels (B,), whole numbers from 0.
        width: d.
        components: n.
        seed: of the k-means initialisation, which is drawn separately for every class.
        weight: "count" gives component c of class j the weight π_c·n_j, so that the components of several clients
            together are the mixture of the pooled samples; "pi" gives π_c and does not send n_j.

    Returns:
        Components of the classes that have samples, in ascending class order, and metrics for the round's log: how many
        components, how many classes with too few distinct samples for n, and in how many EM had not converged.
    """
    from sklearn.mixture import GaussianMixture

    columns = [(features.detach().cpu(), labels.cpu()) for features, labels in batches]
    X = torch.cat([torch.zeros(0, width), *(x for x, _ in columns)]).to(torch.float64).numpy()
    y = torch.cat([torch.zeros(0, dtype=torch.int64), *(labels for _, labels in columns)]).numpy()
    pooled = _pooled_std(X, y)
    parts: list[Mixtures] = []
    reduced = not_converged = 0
    # k-means on several threads rounds differently from run to run.
    with threadpool_limits(limits=1):
        for label in np.unique(y):
            rows = X[y == label]
            n = min(components, len(np.unique(rows, axis=0)))
            em = GaussianMixture(
                n,
                covariance_type="diag",
                reg_covar=STD_FLOOR**2,
                tol=TOLERANCE,
                max_iter=MAX_ITERATIONS,
                random_state=seeds.derive(seed, "mixture", int(label)) % 2**32,
            )
            parts.append(_fitted(em, rows, int(label), pooled, weight))
            reduced += n < components
            not_converged += not em.converged_
    mixtures = Mixtures.concatenated(parts, width)
    return mixtures, {
        "mixture-components": float(mixtures.num_components),
        "mixture-classes-reduced": float(reduced),
        "mixture-classes-not-converged": float(not_converged),
    }


def _fitted(em: GaussianMixture, rows: Floats, label: int, pooled: Floats, weight: Weight) -> Mixtures:
    from sklearn.exceptions import ConvergenceWarning

    if len(rows) == 1:  # scikit-learn refuses to fit a single sample
        em.converged_ = True
        pi, means, stds = np.ones(1), rows, np.zeros_like(rows)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # counted in the metrics
            centre = rows.mean(0)  # EM computes variances as E[x²] - E[x]², which is inexact far from 0
            em.fit(rows - centre)
        pi, means, stds = em.weights_, em.means_ + centre, np.sqrt(em.covariances_)
    alone = pi * len(rows) < 1.5
    stds = np.maximum(np.where(alone[:, None], pooled, stds), STD_FLOOR)
    populated = pi * len(rows) > 1e-6  # EM may leave a component without samples
    scale = len(rows) if weight == "count" else 1
    return Mixtures(
        torch.full((int(populated.sum()),), label, dtype=torch.int64),
        torch.from_numpy(pi[populated] / pi[populated].sum() * scale).to(torch.float32),
        torch.from_numpy(means[populated]).to(torch.float32),
        torch.from_numpy(stds[populated]).to(torch.float32),
    )


def _pooled_std(X: Floats, y: NDArray[np.int64]) -> Floats:
    """Return (d,) the within-class deviation over all classes; 0 if no class has two samples."""
    squares, freedom = np.zeros(X.shape[1]), 0
    for label in np.unique(y):
        rows = X[y == label]
        squares += np.square(rows - rows.mean(0)).sum(0)
        freedom += len(rows) - 1
    pooled: Floats = np.sqrt(squares / max(1, freedom))
    return pooled


def bhattacharyya(means_a: Floats, stds_a: Floats, means_b: Floats, stds_b: Floats) -> Floats:
    """Return the Bhattacharyya distances of diagonal Gaussians (n, m), in float64.

    D_B = Σ_l [ (μ_a - μ_b)_l² / (8·s_l) + ½·ln(s_l / (σ_a·σ_b)_l) ] with s = (σ_a² + σ_b²)/2: Eq. 8 for diagonal
    covariances. Deviations below STD_FLOOR count as STD_FLOOR.

    Args:
        means_a: (n, d).
        stds_a: (n, d).
        means_b: (m, d).
        stds_b: (m, d).
    """
    a, b = np.maximum(stds_a, STD_FLOOR)[:, None], np.maximum(stds_b, STD_FLOOR)[None]
    s = (np.square(a) + np.square(b)) / 2  # (n, m, d)
    shift = np.square(means_a[:, None] - means_b[None]) / s
    distances: Floats = (shift / 8 + np.log(s / (a * b)) / 2).sum(2)
    return distances


def clusters(means: Floats, stds: Floats, threshold: float) -> list[NDArray[np.int64]]:
    """Return the clusters of Algorithm 1, lines 2 to 11: disjoint index arrays that cover all components.

    A cluster starts with the first unassigned component, its seed. As printed, all components closer than S_C to *all*
    present members join at once, and the test is repeated with the grown cluster. The first pass already takes
    everything close to the seed, and components not close to the seed fail all later passes: so a cluster is the seed
    and every unassigned component close to it, whether or not these are close to one another.

    Args:
        means: (N, d).
        stds: (N, d).
        threshold: S_C.
    """
    rest = np.arange(len(means))
    groups = []
    while len(rest):
        seed = rest[:1]
        near = bhattacharyya(means[seed], stds[seed], means[rest], stds[rest])[0] < threshold
        near[0] = True
        groups.append(rest[near])
        rest = rest[~near]
    return groups


def fuse(
    mixtures: Iterable[Mixtures], width: int, *, threshold: float, distance: Distance = "sum"
) -> Mixtures:
    """Cluster the components of every class and replace each cluster by one with the same moments (Algorithm 1).

    w = Σw_c, μ = Σw_c·μ_c/w, σ² = Σw_c·[σ_c² + (μ_c - μ)²]/w: the diagonal of the printed covariance. Weight, mean
    and second moment of every class are those of the uploads. The components are first sorted by weight (largest
    first; ties by means, then deviations), so that the seeds and thus the result do not depend on the order of
    the uploads.

    Args:
        mixtures: the uploads.
        width: d.
        threshold: S_C.
        distance: "sum" compares D_B itself, as printed, which grows with d; "per-dimension" compares D_B/d.
    """
    pooled = Mixtures.concatenated(mixtures, width)
    parts: list[Mixtures] = []
    for label in pooled.labels.unique().tolist():
        of_class = pooled.subset(pooled.labels == label)
        w, means, stds = (
            tensor.to(torch.float64).numpy() for tensor in (of_class.weights, of_class.means, of_class.stds)
        )
        order = np.lexsort([*stds.T[::-1], *means.T[::-1], -w])
        w, means, stds = w[order], means[order], stds[order]
        limit = threshold * width if distance == "per-dimension" else threshold
        parts.extend(_merged(label, w[c], means[c], stds[c]) for c in clusters(means, stds, limit))
    return Mixtures.concatenated(parts, width)


def _merged(label: int, w: Floats, means: Floats, stds: Floats) -> Mixtures:
    total = w.sum()
    mean = w @ means / total
    variance = w @ (np.square(stds) + np.square(means - mean)) / total
    return Mixtures(
        torch.tensor([label]),
        torch.tensor([total], dtype=torch.float32),
        torch.from_numpy(mean[None]).to(torch.float32),
        torch.from_numpy(np.sqrt(variance)[None]).to(torch.float32),
    )


def sample(mixtures: Mixtures, per_class: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw pseudo-features: for every class with a mixture, r times a component by weight, then μ + σ·N(0, I).

    Args:
        mixtures: global prototypes.
        per_class: r.
        generator: CPU random generator.

    Returns:
        features (r·K', d) float32 and labels (r·K',), shuffled; K' is the number of classes with a mixture.
    """
    rows = []
    for label in mixtures.labels.unique().tolist():
        components = (mixtures.labels == label).nonzero().flatten()
        indices = torch.multinomial(
            mixtures.weights[components], per_class, replacement=True, generator=generator
        )
        rows.append(components[indices])
    index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    index = index[torch.randperm(len(index), generator=generator)]
    noise = torch.randn(len(index), mixtures.means.shape[1], generator=generator)
    return mixtures.means[index] + mixtures.stds[index] * noise, mixtures.labels[index]


@dataclass(frozen=True)
class MixtureState:
    """State of a server that fuses mixtures.

    Attributes:
        broadcast: the fused mixtures after an exchange, empty after any other round.
        latest: the last upload of every client.
        owners: (N,) int64, the client of each component in ``latest``.
    """

    broadcast: Mixtures
    latest: Mixtures
    owners: Tensor

    @classmethod
    def empty(cls, width: int) -> MixtureState:
        """Return the state before any upload."""
        return cls(Mixtures.empty(width), Mixtures.empty(width), torch.zeros(0, dtype=torch.int64))

    def silent(self) -> MixtureState:
        """Return the state with an empty broadcast."""
        return replace(self, broadcast=Mixtures.empty(self.latest.means.shape[1]))

    def received(self, uploads: Mapping[int, Mixtures], stale: Stale) -> MixtureState:
        """Return the state in which these uploads replace their clients' previous ones.

        Args:
            uploads: by client.
            stale: whether to keep or drop the last uploads of other clients.
        """
        other = ~torch.isin(self.owners, torch.tensor(list(uploads), dtype=torch.int64))
        if stale == "drop":
            other = torch.zeros_like(other)
        parts = [self.latest.subset(other), *uploads.values()]
        owners = [torch.full((up.num_components,), client) for client, up in uploads.items()]
        latest = Mixtures.concatenated(parts, self.latest.means.shape[1])
        return replace(self, latest=latest, owners=torch.cat([self.owners[other], *owners]))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        return {**joined(broadcast=self.broadcast, latest=self.latest), "owners": self.owners}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> MixtureState:
        """Rebuild the state of a checkpoint."""
        broadcast, latest = (
            Mixtures.from_tensors(part_of(tensors, name), task) for name in ("broadcast", "latest")
        )
        if len(owners := tensors["owners"]) != latest.num_components:
            raise RejectedPayload(f"{len(owners)} owners for {latest.num_components} components")
        return cls(broadcast, latest, owners)
