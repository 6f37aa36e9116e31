"""The losses that FedCPD takes from the global prototypes: contrast and alignment.

Gradients flow only into the features. A class without a prototype adds nothing and never gives NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr.errors import PbflError
from pbfl_flwr.prototypes.regularizer import prototype_regularizer

SMALLEST_NORM = 1e-8
ABSENT = -100  # label that torch's cross-entropy ignores


def contrast(
    features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor, temperature: float
) -> Tensor:
    """Return FedCPD's L_pcl = mean_b -log(e^{s(z_b,P_y)/τ} / Σ_{c available} e^{s(z_b,P_c)/τ}), s the cosine.

    A class without a prototype is not in the denominator; its samples contribute 0 to the mean, as in
    :func:`alignment_loss`. With one available class the loss is 0; with none it is a 0 attached to the graph. Norms are
    clamped at 1e-8. Shapes do not depend on ``present``, so that a GPU is not waited for.

    Args:
        features: (B, d) z, attached to the graph.
        labels: (B,) y.
        prototypes: (K, d) P.
        present: (K,) bool.
        temperature: τ > 0.

    Raises:
        PbflError: if τ is not positive.
    """
    if not temperature > 0:
        raise PbflError(f"the temperature of the contrastive loss is {temperature}; it must be positive")
    present = present.to(features.device)
    table = prototypes.detach().to(features).masked_fill(~present.unsqueeze(1), 0.0)
    units = F.normalize(table, dim=1, eps=SMALLEST_NORM)
    cosines = F.normalize(features, dim=1, eps=SMALLEST_NORM) @ units.T  # (B, K)
    scores = (cosines / temperature).masked_fill(~present, torch.finfo(cosines.dtype).min)  # exp gives 0
    targets = labels.masked_fill(~present[labels], ABSENT)
    return F.cross_entropy(scores, targets, ignore_index=ABSENT, reduction="sum") / len(labels)


def alignment_loss(features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor) -> Tensor:
    """Return FedCPD's L_align = mean_b ‖z_b - P_{y_b}‖₂², summed over dimensions.

    A class without a prototype adds nothing; see :func:`prototype_regularizer`.

    Args:
        features: (B, d) z, attached to the graph.
        labels: (B,) y.
        prototypes: (K, d) P.
        present: (K,) bool.
    """
    return prototype_regularizer(features, labels, prototypes, present) * features.shape[1]
