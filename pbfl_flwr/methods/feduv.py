"""FedUV: FedAvg with regularisers that keep outputs varied (variance) and features spread (uniformity).

Son et al., "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.

Round: each client copies w and minimises CE + a·V + b·U. V = mean over classes of max(0, 1/√K - std over the batch of
the class's probability); U = mean over pairs of exp(-‖z_b - z_b'‖²/σ²), σ² the median of the non-zero squared distances
of the batch. The server averages, w <- Σ_i (n_i/Σn)·w_i.
Travels: all parameters, both ways, and n_i.
Predicts: the logits of the client's locally trained network, with which ProtoNorm's comparison is consistent; scored
before training (evaluate-moment="before") it is the global model.
Differs from the paper: its results are the global model's, after rounds with momentum, weight decay and a cosine
learning rate schedule, which are the run's settings. Its code calls the weight of V λ and that of U μ, ProtoNorm's text
the other way round; the values, 2.5 and 0.5, are the same. Its code averages BatchNorm's buffers, too.
Differs from the reference: σ² carries a gradient, as there. A batch of one sample has
neither term, a batch of equal features no U, where the code would give NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client
from pbfl_flwr.methods.sharing import SharedWeights
from pbfl_flwr.payloads import Weights
from pbfl_flwr.training.loop import FitReport, fit, forward


class Config(Group):
    """Settings ``feduv.*``."""

    variance_weight: float = Field(2.5, ge=0, description="a, weight of V on the classifier's outputs")
    uniformity_weight: float = Field(0.5, ge=0, description="b, weight of U on the features")


def variance(logits: Tensor) -> Tensor:
    """Return V = mean_k max(0, 1/√K - std_b softmax(o)_bk), the unbiased deviation over the batch (B >= 2).

    1/√K is the deviation of a column of the K x K identity matrix.
    """
    deviations = logits.softmax(dim=1).std(dim=0)  # (K,)
    return (1 / math.sqrt(logits.shape[1]) - deviations).clamp_min(0).mean()


def uniformity(features: Tensor) -> Tensor:
    """Return U = mean over pairs b < b' of exp(-‖z_b - z_b'‖²/σ²); 0 if all rows are equal."""
    squared = torch.pdist(features).square()  # (P,), P = B·(B-1)/2
    equal = (squared <= 0).sum()  # zeros are sorted first; the median of the others is at ``place``
    place = equal + (len(squared) - equal - 1).div(2, rounding_mode="floor")
    sigma = squared.sort().values.gather(0, place.unsqueeze(0))  # (1,), 0 if there are no others
    scale = torch.where(sigma > 0, sigma, 1.0)
    return torch.exp(-squared / scale).mean() * (equal < len(squared))


@dataclass(frozen=True)
class FedUV(SharedWeights):
    """See the module."""

    config: Config = field(default_factory=Config)

    def train(self, client: Client, received: Weights) -> FitReport:
        """CE + a·V + b·U."""

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            features, logits = forward(client.model, inputs)
            terms = {"ce": nn.functional.cross_entropy(logits, labels)}
            if len(labels) > 1:
                terms["variance"] = self.config.variance_weight * variance(logits)
                terms["uniformity"] = self.config.uniformity_weight * uniformity(features)
            return terms

        return fit(client, loss)


def build(settings: Settings) -> FedUV:
    """Return the method."""
    return FedUV.configured(
        "feduv", settings, moment="after", keeps_nothing=True, config=parse_section(Config, settings)
    )
