"""A fixed classifier that all clients share without sending it: the simplex equiangular tight frame (ETF).

Source: GFPL, Section 3.2 and 4.1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError


@lru_cache(maxsize=8)
def equiangular_frame(num_classes: int, feature_dim: int, seed: int) -> Tensor:
    """Return Z (d, K) float32: unit columns with z_iᵀz_j = -1/(K-1), the widest equal angles there are.

    Z = sqrt(K/(K-1))·Q·(I - 11ᵀ/K) with A = QR of a Gaussian A (d, K) (Eq. 9 and 10). Signs are chosen so that R has
    a positive diagonal, which makes Q unique: clients with other processors get the same Z up to rounding.

    Args:
        num_classes: K.
        feature_dim: d.
        seed: of A; the result is shared between calls and must not be changed.

    Raises:
        PbflError: if d < K: A then has no K orthogonal columns.
    """
    K, d = num_classes, feature_dim
    if d < K:
        raise PbflError(
            f"feature-dim = {d} with {K} classes: an equiangular tight frame is built from {K} orthogonal "
            f"vectors; allowed is feature-dim >= {K}"
        )
    A = torch.randn(d, K, generator=seeds.generator(seed, "etf"), dtype=torch.float64)
    Q, R = torch.linalg.qr(A)
    Q = Q * R.diagonal().sign()
    centred = torch.eye(K, dtype=torch.float64) - 1 / K
    return ((K / (K - 1)) ** 0.5 * Q @ centred).to(torch.float32)


def frame_scores(projected: Tensor, frame: Tensor) -> Tensor:
    """Return hᵀz_j (B, K) with h = ĥ/‖ĥ‖₂ (Eq. 11); a zero vector keeps the score 0.

    Args:
        projected: ĥ (B, d).
        frame: Z (d, K).
    """
    return F.normalize(projected, dim=1) @ frame


def dot_regression(projected: Tensor, labels: Tensor, frame: Tensor) -> Tensor:
    """Return the mean over the batch of ½(hᵀz_y - 1)² (Eq. 12).

    Args:
        projected: ĥ (B, d).
        labels: (B,).
        frame: Z (d, K).
    """
    own = frame_scores(projected, frame).gather(1, labels[:, None])
    return (own - 1).square().mean() / 2
