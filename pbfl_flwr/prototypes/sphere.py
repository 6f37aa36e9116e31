"""Points on the unit sphere that repel each other: energy, distances and forces.

E = Σ_{j<k} ln(1/‖C_j - C_k‖) over unit rows C, the force F_j = -∂E/∂C_j = Σ_{k!=j} (C_j - C_k)/‖C_j - C_k‖². Source:
ProtoNorm, Section 4.1.

All pairs are computed at once by a Gram matrix instead of all K² differences: memory O(K² + K·d). For two rows so close
that this loses precision, the pair is computed from its difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SOFTENING = 1e-10  # added to squared distances in the force, as in ProtoNorm's published code
PAIRS_AT_ONCE = 4096


@dataclass(frozen=True)
class Geometry:
    """How spread out unit prototypes are; all zero for fewer than two.

    Attributes:
        energy: E.
        min_distance, mean_distance, max_distance: of all pairs.
        margin: the largest distance of a prototype to its nearest neighbour (FedTGP's δ before the cap,
            ProtoNorm's "maximum margin"); the smallest such distance is ``min_distance``.
    """

    energy: float = 0.0
    min_distance: float = 0.0
    mean_distance: float = 0.0
    max_distance: float = 0.0
    margin: float = 0.0


def geometry(units: Tensor) -> Geometry:
    """Return energy and distances of unit rows (K, d), in float64."""
    num_rows = len(units)
    if num_rows < 2:
        return Geometry()
    squared = squared_distances(units.detach().to("cpu", torch.float64)).clamp_min_(1e-300)
    nearest = squared.clone().fill_diagonal_(math.inf).min(dim=1).values.sqrt()
    squared.fill_diagonal_(1.0)
    energy = -0.25 * float(squared.log().sum())  # each pair is counted twice, and ln D = ½ ln D²
    distances = squared.sqrt_().fill_diagonal_(0.0)
    return Geometry(
        energy=energy,
        min_distance=float(nearest.min()),
        mean_distance=float(distances.sum()) / (num_rows * (num_rows - 1)),
        max_distance=float(distances.max()),
        margin=float(nearest.max()),
    )


def forces(units: Tensor) -> Tensor:
    """Return F_j = Σ_{k!=j} (C_j - C_k) / (‖C_j - C_k‖² + 1e-10) (ProtoNorm, Eq. 11) in O(K² + K·d) memory.

    F is W's graph Laplacian times C, with W_jk = 1/(‖C_j - C_k‖² + 1e-10). Both that product and the squared
    distances lose precision when rows are close. So rows are centred first, which helps if all rows are close
    together, and single close pairs are computed from their difference.
    """
    centred, squared, close = _distances_and_close_pairs(units)
    squared.add_(SOFTENING).fill_diagonal_(math.inf)
    inverse = squared.reciprocal_()
    if close is not None:
        inverse[close[0], close[1]] = 0
        inverse[close[1], close[0]] = 0
    total = torch.addmm(inverse.sum(1, keepdim=True) * centred, inverse, centred, alpha=-1)
    if close is not None:
        for j, k in _chunks(close):
            difference = units[j] - units[k]
            push = difference / ((difference**2).sum(1, keepdim=True) + SOFTENING)
            total.index_add_(0, j, push).index_add_(0, k, push, alpha=-1)
    return total


def squared_distances(units: Tensor) -> Tensor:
    """Return ‖C_j - C_k‖² of all pairs (K, K)."""
    _, squared, close = _distances_and_close_pairs(units)
    if close is not None:
        for j, k in _chunks(close):
            exact = ((units[j] - units[k]) ** 2).sum(1)
            squared[j, k] = exact
            squared[k, j] = exact
    return squared


def _distances_and_close_pairs(units: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return centred rows, squared distances by Gram matrix, and the pairs j < k for which these are imprecise."""
    centred = units - units.mean(0)
    squares = (centred * centred).sum(1)
    squared = torch.addmm(squares.unsqueeze(1) + squares, centred, centred.T, alpha=-2)
    # A Gram distance has an error of about eps·(‖x_j‖² + ‖x_k‖²); below this limit less than half its digits are right.
    limit = 2 * float(squares.max()) * math.sqrt(torch.finfo(units.dtype).eps)
    close = None
    if float(squared.fill_diagonal_(math.inf).amin()) < limit:
        j, k = (squared < limit).triu().nonzero(as_tuple=True)
        close = (j, k)
    return centred, squared.fill_diagonal_(0.0), close


def _chunks(pairs: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(pairs[0]), PAIRS_AT_ONCE):
        yield pairs[0][first : first + PAIRS_AT_ONCE], pairs[1][first : first + PAIRS_AT_ONCE]


def normalised(rows: Tensor) -> Tensor:
    """Return rows at unit length."""
    units: Tensor = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return units
