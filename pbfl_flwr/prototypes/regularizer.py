"""Prototype regularisation, which is added to a client's cross-entropy.

Gradients flow only into the features. A class without a prototype adds nothing and never gives NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pbfl_flwr.config.keys import RegularizerForm


def prototype_regularizer(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    present: Tensor,
    *,
    form: RegularizerForm = "mse",
    class_weights: Tensor | None = None,
    per_class: bool = False,
    masks: Tensor | None = None,
) -> Tensor:
    """Return the regulariser R(z, y, c), to be multiplied by λ.

    With T_b = c_{y_b}, or the detached z_b itself if class y_b has no prototype (zero error and zero
    gradient, but counted in every denominator), and weights β (1 without ``class_weights``):

    ======  =========  ======================================================================================
    form    per_class  R
    ======  =========  ======================================================================================
    mse     False      (1/(B·d)) Σ_b β_{y_b} ‖z_b - T_b‖²: all published code; CPKD then weights ∝ n_ij²
    mse     True       mean over the classes j of the batch of β_j · mean over its samples of ‖z_b - T_b‖²/d
    l2      False      (1/B) Σ_b β_{y_b} ‖z_b - T_b‖₂
    l2      True       Σ over the classes j of the batch of β_j ‖z̄_j - c_j‖₂, z̄_j the batch's class mean
    ======  =========  ======================================================================================

    The last row is FedProto's regulariser as printed (CPS paper, Eq. 6 and 12; TinyProto, Eq. 6; ProtoNorm,
    Eq. 15) with the batch's class means instead of the local prototypes, which are unknown during SGD.
    λ depends on the form: the published runs used λ = 10 with "mse"; the texts' λ = 0.1 and 1 are for "l2".

    Args:
        features: (B, d) z, attached to the graph.
        labels: (B,) y.
        prototypes: (K, d) c, already expanded and scaled.
        present: (K,) bool; which rows of ``prototypes`` are prototypes.
        form: "mse" or "l2".
        class_weights: (K,) β_ij of CPKD, or None.
        per_class: average within a class first.
        masks: (K, d) bool; count only the errors inside the class's mask (CPS paper with CPKD). None counts
            all d, so that outside the mask features move to the zeros of the expanded prototype
            (published code). The denominators are B·d in both cases.

    Returns:
        A scalar attached to the graph.
    """
    prototypes = prototypes.detach().to(features)
    present = present.to(features.device)
    targets = torch.where(present[labels].unsqueeze(1), prototypes[labels], features.detach())
    errors = features - targets
    if masks is not None:
        errors = errors * masks.to(features.device)[labels].to(features.dtype)
    weights = features.new_ones(len(prototypes)) if class_weights is None else class_weights.to(features)
    if not per_class:
        sizes = (errors**2).mean(1) if form == "mse" else torch.linalg.vector_norm(errors, dim=1)
        return (weights[labels] * sizes).mean()
    ones = torch.ones_like(labels, dtype=features.dtype)
    counts = features.new_zeros(len(prototypes)).index_add_(0, labels, ones)
    shares = (1 / counts.clamp_min(1))[labels]  # 1 / number of samples of this class in the batch
    if form == "mse":
        return (weights[labels] * shares * (errors**2).mean(1)).sum() / (counts > 0).sum()
    means = torch.zeros_like(prototypes).index_add(0, labels, errors * shares.unsqueeze(1))
    distances: Tensor = weights * torch.linalg.vector_norm(means, dim=1)
    return distances.sum()


def proportional_weights(counts: Tensor) -> Tensor:
    """Return CPKD's β_ij = p_ij / max_k p_ik = n_ij / max_k n_ik (K,) float32; all zero without samples.

    Source: CPKD, Eq. 12. The counts are the client's own and never leave it.

    Args:
        counts: (K,) n_ij.
    """
    wide = counts.to(torch.float32)
    return wide / wide.max().clamp_min(1)
