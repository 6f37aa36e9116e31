"""FedProx: FedAvg with a proximal term that keeps weights near the received ones.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Round: each client copies the global weights w_t, minimises cross-entropy + (μ/2)·‖w - w_t‖² over all parameters with
w_t constant, and sends its weights. The server averages them, w <- Σ_i (n_i/Σn)·w_i.
Travels: all parameters, both ways, and n_i. BatchNorm's buffers stay on the client and are not part of the norm.
Predicts: the logits of the global model, scored when it arrives, before local training.
Differs from the paper: no stragglers are simulated; the paper draws clients by n_i and takes their unweighted mean. No
source read states the μ in the FedProx rows of GFPL and FedCPD; 0.001 is PFLlib's former example value.
Differs from the references: PFLlib makes the same step (it reports another loss); FedProto's repository detaches both
weights, so that its FedProx is FedAvg. Flower's documentation shows the norm without its square.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client
from pbfl_flwr.methods.sharing import SharedWeights
from pbfl_flwr.payloads import Weights
from pbfl_flwr.training.loop import FitReport, classification, fit


class Config(Group):
    """Settings ``fedprox.*``."""

    mu: float = Field(0.001, ge=0, description="μ, weight of the proximal term")


@dataclass(frozen=True)
class FedProx(SharedWeights):
    """See the module."""

    mu: float = 0.001

    def train(self, client: Client, received: Weights) -> FitReport:
        """Cross-entropy + (μ/2)·‖w - w_t‖²."""
        ce = classification(client.model)
        anchored = [
            (parameter, received.tensors[name].to(parameter.device))
            for name, parameter in client.model.named_parameters()
        ]

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            distance = torch.stack([(w - w_t).square().sum() for w, w_t in anchored]).sum()
            return {**ce(inputs, labels), "prox": self.mu / 2 * distance}

        return fit(client, loss)


def build(settings: Settings) -> FedProx:
    """Return the method."""
    return FedProx.configured("fedprox", settings, keeps_nothing=True, mu=parse_section(Config, settings).mu)
