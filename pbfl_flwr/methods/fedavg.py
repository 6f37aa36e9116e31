"""FedAvg: the weights are averaged.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Round: each client copies the global weights w, runs E epochs of SGD on cross-entropy, and sends its weights.
The server averages them, w <- Σ_i (n_i/Σn)·w_i.
Travels: all parameters, both ways, and n_i. BatchNorm's buffers stay on the client.
Predicts: the logits of the global model, scored when it arrives, before local training.
Differs from the references: PFLlib and HtFLlib do the same; Flower's own FedAvg and FedProto's repository
average the BatchNorm buffers too. ``weighting="uniform"`` is the latter's unweighted mean.
"""

from __future__ import annotations

from pbfl_flwr.config import Settings
from pbfl_flwr.methods.sharing import SharedWeights


def build(settings: Settings) -> SharedWeights:
    """Return the method."""
    return SharedWeights.configured("fedavg", settings, keeps_nothing=True)
