"""LG-FedAvg: the classifier is averaged, every client keeps its own feature extractor.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020.

Round: each client copies the global head φ, runs E epochs of SGD on cross-entropy over its body and the head
together, and sends its head. The server averages, φ <- Σ_i (n_i/Σn)·φ_i.
Travels: the head (weight K·d, bias K), both ways, and n_i. Bodies may differ in everything but the width d; a
classifier with hidden layers must be the same on all clients.
Predicts: the logits of the client's own body under the head that was just broadcast, before local training.
Differs from the paper: training starts from scratch, not from a FedAvg checkpoint; averages are weighted by samples
where the paper's code takes the unweighted mean (weighting="uniform"); no client keeps its own best model.
Differs from the reference: nothing known; heads with and without a dropout before the linear layer are matched by
role (weight, bias), which gives the same pairs as HtFLlib's order of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pbfl_flwr.config import Settings
from pbfl_flwr.methods.averaging import shared_parameters
from pbfl_flwr.methods.sharing import SharedWeights, check_heads
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.registry import without_weights
from pbfl_flwr.task import Task


@dataclass(frozen=True)
class LGFedAvg(SharedWeights):
    """See the module."""

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that all heads have the same tensors."""
        check_heads(self.name, task, [self.architecture, *architectures], linear=False)

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·d·K, with hidden layers 2·M·Σ (width·next width); the papers do not count biases."""
        head = shared_parameters(build_model(without_weights(self.architecture), task, 0), "head").values()
        return float(2 * len(class_counts) * sum(tensor.numel() for tensor in head if tensor.dim() > 1))


def build(settings: Settings) -> LGFedAvg:
    """Return the method."""
    return LGFedAvg.configured("lg-fedavg", settings, "head", same_architecture=False)
