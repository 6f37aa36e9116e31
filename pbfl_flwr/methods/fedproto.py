"""FedProto: class means are averaged, features are regularised towards them.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

Round: each client minimises CE + λ·mean over B·d of (f(x) - c_y)², then sends c̄_ij, the mean feature of each
of its classes. The server averages them over the holders of a class, c_j = (1/|N_j|)·Σ_i c̄_ij.
Travels: up K_i·d, down K·d numbers a client; no weights, no counts (rule "mean").
Predicts: the class of the nearest global prototype; logits and nearest local prototype are scored as well.
Differs from the paper: the printed server equation weights by n_ij and divides by |N_j| as well, which shrinks
prototypes |N_j| times (aggregation="weighted-shrunk"; "weighted" is the true weighted mean); every released code
averages uniformly, so that is the default. The printed regularisation is a norm between class means with λ = 1
(regularizer-form="l2"); every released code uses the mean square over the batch, so that is the default, with the λ =
10 of HtFLlib's script, TinyProto and ProtoNorm (PFLlib: 1; FedProto's own code: 1, and 0.1 on CIFAR-10).
Differs from the reference: prototypes are collected after local training, as in the paper's equation;
collect="trajectory" averages the features computed during training, as HtFLlib and PFLlib do. FedProto's own code
averages those of the last epoch, predicts among a client's own classes and initialises clients differently (protocol
"fedproto"). A class that nobody sent in a round keeps its prototype (stale="drop" forgets it, as the references do).
"""

from __future__ import annotations

from pbfl_flwr.config import Settings
from pbfl_flwr.prototypes.pipeline import Pipeline, pipeline
from pbfl_flwr.prototypes.stages import Stages


def build(settings: Settings) -> Pipeline:
    """Return the method."""
    return pipeline(settings, "fedproto", Stages())
