"""FedTGP: the global prototypes are trained on the server, with an adaptive margin.

Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and
Model Heterogeneity in Federated Learning", AAAI 2024.

Round: the client's half is FedProto's. The server trains a generator (an embedding of the classes through two
linear layers) for S epochs over all uploaded prototypes: cross-entropy over -(distance + δ·[own class]), where the
margin δ = min(max_j min_k |Q_j - Q_k|, τ) is computed each round from the class means Q of the uploads.
Travels: up K_i·d, down K·d numbers a client.
Predicts: the class of the nearest trained prototype.
Differs from the paper: its printed margin (equation 9) is the largest distance of any two Q (fedtgp.margin =
"farthest"), the released code's the largest nearest-neighbour gap. The printed regularisation is a norm between class
means with λ = 0.1 (regularizer-form="l2"), the code's the mean square over the batch with λ = 10, as in FedProto.
Differs from the reference: classes that nobody ever sent are excluded from prediction and regularisation
(fedtgp.absent="keep" is the reference); the square root of a distance is clamped, where the reference can give NaN.
HtFLlib collects prototypes with the network as stored before the round's training: collect="before", which
protocol "htfl" sets; otherwise the trained network is used, as in the paper.
With PPA or APS each upload is first rescaled to the features' scale, by (K/n)·|N_j|, μ·|N_j| or μ (aps-mean).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pbfl_flwr.config import USUAL_RATE, Auto, Group, Settings, parse_section
from pbfl_flwr.prototypes.pipeline import Pipeline, pipeline
from pbfl_flwr.prototypes.stages import Stages
from pbfl_flwr.prototypes.trainable import Margin, ServerTraining


class Config(Group):
    """Settings ``fedtgp.*``, also used by TinyProto-FT."""

    server_epochs: int = Field(100, ge=1, le=100_000, description="S, server epochs per round")
    server_batch_size: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto", description="prototypes per batch on the server; auto: batch-size"
    )
    server_learning_rate: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto",
        description="learning rate of the server's SGD; auto: learning-rate with optimizer sgd, else 0.01",
    )
    margin_cap: float = Field(100.0, gt=0, description="τ, upper bound of the margin")
    margin: Margin = Field(
        "nearest",
        description="largest distance of a class to its nearest other class (nearest, code), or between any two "
        "classes (farthest, paper)",
    )
    absent: Literal["exclude", "keep"] = Field(
        "exclude",
        description="classes that no client has ever sent: keep their prototype, or exclude it from prediction "
        "and regularisation",
    )
    server_device: Literal["cpu", "cuda"] = Field(
        "cpu", description="where the server trains: on its CPU, or on a GPU that it sees (other rounding)"
    )


def server_training(config: Config, settings: Settings) -> ServerTraining:
    """Return the settings of the server's training with every "auto" resolved."""
    batch, rate = config.server_batch_size, config.server_learning_rate
    same = settings.training.learning_rate if settings.training.optimizer == "sgd" else USUAL_RATE
    return ServerTraining(
        epochs=config.server_epochs,
        batch_size=settings.training.batch_size if batch == "auto" else batch,
        learning_rate=same if rate == "auto" else rate,
        margin_cap=config.margin_cap,
        margin=config.margin,
        absent=config.absent,
        device=config.server_device,
    )


def build(settings: Settings) -> Pipeline:
    """Return the method."""
    training = server_training(parse_section(Config, settings), settings)
    return pipeline(settings, "fedtgp", Stages(), server_training=training)
