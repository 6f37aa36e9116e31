"""FedProto by angles: features are turned towards the global prototypes, whatever their length.

Round: each client minimises CE + λ·mean over B of (1 - cos(f(x), c_y)), then sends its class means. The server averages
these over the holders of a class and divides the result by its length; a class that nobody sends keeps its prototype.
Travels: up K_i·d, down K·d numbers a client; no weights, no counts.
Predicts: the class of the nearest global prototype, which among unit vectors has the largest cosine; logits and nearest
local prototype are scored beside it.

A method outside of the package: FedProto's stages with another regulariser; docs/add-a-method.md says how it is run.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.prototypes.pipeline import Pipeline, pipeline
from pbfl_flwr.prototypes.stages import Stages


class Config(Group):
    """What ``method-settings`` may say."""

    weight: float = Field(1.0, ge=0, description="λ, weight of the prototype regularisation")


def cosine_regularizer(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    present: Tensor,
    *,
    class_weights: Tensor | None = None,
    masks: Tensor | None = None,
    **forms: object,
) -> Tensor:
    """Return mean over B of β_y·(1 - cos(z, c_y)); 0 for a class without a prototype.

    Args:
        features: (B, d) z, attached to the graph.
        labels: (B,) y.
        prototypes: (K, d) c.
        present: (K,) bool.
        class_weights: (K,) β of CPKD, or None.
        masks: (K, d) bool, the dimensions that count, or None for all.
        forms: of FedProto's regulariser, which do not apply here.
    """
    inside = 1.0 if masks is None else masks[labels]
    away = 1 - F.cosine_similarity(features * inside, prototypes[labels] * inside)  # (B,)
    weights = present.to(away) if class_weights is None else present * class_weights
    return (weights[labels] * away).mean()


def build(settings: Settings) -> Pipeline:
    """Return the method."""
    stages = Stages(alignment="unit", regularizer_weight=parse_section(Config, settings).weight)
    return pipeline(settings, "cosproto", stages, regularizer=cosine_regularizer)
