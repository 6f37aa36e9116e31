"""A fixed classifier that all clients derive from the seed: the simplex equiangular tight frame (ETF).

Source: GFPL, Section 3.2 and 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError


def equiangular_frame(num_classes: int, feature_dim: int, seed: int) -> Tensor:
    """Return Z (d, K) float32: unit columns with z_iᵀz_j = -1/(K-1), the largest possible equal angles.

    Z = sqrt(K/(K-1))·Q·(I - 11ᵀ/K) with A = QR for a Gaussian A (d, K) (Eq. 9 and 10). Signs are chosen so that R has
    a positive diagonal, which makes Q unique: clients with different processors get the same Z up to rounding.

    Args:
        num_classes: K.
        feature_dim: d.
        seed: of A.

    Raises:
        PbflError: if d < K, where A cannot have K orthogonal columns.
    """
    K, d = num_classes, feature_dim
    if d < K:
        raise PbflError(
            f"feature-dim = {d}: an equiangular tight frame of {K} classes is built from {K} orthogonal vectors; "
            f"feature-dim must be {K} or more"
        )
    A = torch.randn(d, K, generator=seeds.generator(seed, "etf"), dtype=torch.float64)
    Q, R = torch.linalg.qr(A)
    Q = Q * R.diagonal().sign()
    centred = torch.eye(K, dtype=torch.float64) - 1 / K
    Z: Tensor = math.sqrt(K / (K - 1)) * Q @ centred
    return Z.to(torch.float32)


def frame_scores(projected: Tensor, frame: Tensor) -> Tensor:
    """Return hᵀz_j (B, K) with h = ĥ/‖ĥ‖₂ (Eq. 11); a zero vector has the scores 0.

    Args:
        projected: ĥ (B, d).
        frame: Z (d, K).
    """
    scores: Tensor = F.normalize(projected, dim=1) @ frame
    return scores


def dot_regression(projected: Tensor, labels: Tensor, frame: Tensor) -> Tensor:
    """Return the mean over the batch of ½(hᵀz_y - 1)² (Eq. 12).

    Args:
        projected: ĥ (B, d).
        labels: (B,).
        frame: Z (d, K).
    """
    scores = frame_scores(projected, frame).gather(1, labels[:, None])
    return (scores - 1).square().mean() / 2


def projection_layer(feature_dim: int, seed: int, state: Mapping[str, Tensor]) -> nn.Linear:
    """Return the layer l(ω3), d to d, between non-negative sparse features and the dense frame.

    Args:
        feature_dim: d.
        seed: of the initial weights, the same for all clients; torch's global random state is restored.
        state: the layer's state from the client's memory; empty at first.
    """
    with seeds.seeded(seeds.derive(seed, "projection")):
        layer = nn.Linear(feature_dim, feature_dim)
    if state:
        layer.load_state_dict(dict(state))
    return layer
