"""FedNH: the classifier is spread unit vectors, fixed in training, that the server moves towards clients' class means.

Dai et al., "Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023.

Round: logits are s·(z/‖z‖)·Wᵀ. Each client copies body θ, scale s and W, trains θ and s on cross-entropy with W frozen,
and sends them with μ̂_ij, the normalised mean of its unit features of each class. The server averages θ and s over the
clients and moves the rows: W_j <- normalise(ρ·W_j + (1-ρ)·m_j), m_j = normalise(Σ_i (n_ij/Σ_i n_ij)·μ̂_ij).
Travels: θ, s and W down; θ, s, K_i unit vectors and their counts up.
Predicts: the logits of the received global model, scored before local training.
Differs from the paper: nothing known in the equations. s starts at 20 for resnet*, else at 1, as in its code
(ProtoNorm's starts at 1 for every network); momentum, weight decay and clipping are the run's settings.
Differs from the reference: it sends the vectors multiplied by their counts, here both are sent; a class that nobody
sends keeps its row bit for bit, where the reference divides by a count of 1e-12. If K > d, rows cannot be orthogonal
and are normalised; the code's initialisation leaves them shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.config import Auto, Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Moment, Predictor, Round, Update
from pbfl_flwr.methods.averaging import Weighting, average, copies, copy_into, shared_parameters, weighting_of
from pbfl_flwr.methods.sharing import check_both, check_heads, initial, shared_scalars
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import Prototypes, Weights, WeightsAndPrototypes
from pbfl_flwr.prototypes.aggregation import weighted
from pbfl_flwr.prototypes.class_means import class_sums_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit
from pbfl_flwr.training.optimizers import ParamGroup

SCALE = ".scale"  # name of s in the payload's weights; a network's own names do not begin with a dot


class Config(Group):
    """Settings ``fednh.*``."""

    smoothing: float = Field(
        0.9, ge=0, le=1, description="ρ, share of the old classifier row in its moving average"
    )
    scale: Annotated[float, Field(gt=0, le=1e6)] | Auto = Field(
        "auto", description="s, initial scale of the cosine logits; auto: 20 for resnet*, else 1"
    )


def spread_rows(num_classes: int, feature_dim: int, seed: int) -> Tensor:
    """Return the initial W, unit rows (K, d): orthogonal; equally spaced angles if d = 2; only normalised if K > d."""
    if feature_dim == 2:
        angles = torch.arange(num_classes) * (2 * math.pi / num_classes)
        return torch.stack([angles.cos(), angles.sin()], dim=1)
    rows = torch.empty(num_classes, feature_dim)
    nn.init.orthogonal_(rows, generator=seeds.generator(seed, "fednh"))
    return F.normalize(rows, dim=1)


def move_rows(rows: Tensor, means: Prototypes, smoothing: float) -> Tensor:
    """Return W_j <- normalise(ρ·W_j + (1-ρ)·normalise(m_j)); rows of absent classes are not changed."""
    moved = F.normalize(smoothing * rows + (1 - smoothing) * F.normalize(means.values, dim=1), dim=1)
    return torch.where(means.present[:, None], moved, rows)


def _head(rows: Tensor) -> dict[str, Tensor]:
    return {"head.weight": rows, "head.bias": torch.zeros(len(rows))}


@dataclass(frozen=True)
class FedNH(Method[WeightsAndPrototypes, WeightsAndPrototypes, WeightsAndPrototypes]):
    """See the module.

    In a client's network the head's weight is s·W and its bias 0; it is applied to unit features.
    """

    architecture: str
    smoothing: float = 0.9
    scale: float = 1.0
    weighting: Weighting = "uniform"
    name: str = "fednh"
    moment: Moment = "before"

    state = WeightsAndPrototypes
    down = WeightsAndPrototypes
    up = WeightsAndPrototypes
    same_architecture = True
    unit_features = True

    # Client -----------------------------------------------------------------------------------------------

    def install(self, client: Client, down: WeightsAndPrototypes) -> None:
        """Body <- θ, head <- s·W."""
        network = self.network(down)
        for part in (shared_parameters(client.model, "body"), shared_parameters(client.model, "head")):
            copy_into(part, {name: network[name] for name in part})

    def network(self, state: WeightsAndPrototypes) -> Mapping[str, Tensor]:
        """Return θ, and s·W as the head."""
        body = {name: tensor for name, tensor in state.weights.tensors.items() if name != SCALE}
        return {**body, **_head(state.weights.tensors[SCALE] * state.prototypes.values)}

    def predictors(self, client: Client, down: WeightsAndPrototypes) -> dict[str, Predictor]:
        """Scores of the head on unit features."""
        rows = shared_parameters(client.model, "head")["head.weight"]  # s·W

        def scores(features: Tensor, logits: Tensor) -> Tensor:
            return F.linear(F.normalize(features, dim=1), rows)

        return {"head": scores}

    def local_update(self, client: Client, down: WeightsAndPrototypes) -> Update[WeightsAndPrototypes]:
        """Train body and scale on cross-entropy; send them and the class means of unit features."""
        self.install(client, down)
        body = shared_parameters(client.model, "body")
        scale = nn.Parameter(down.weights.tensors[SCALE].to(client.device, copy=True))  # (1,)
        rows = down.prototypes.values.to(client.device)  # W

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            features: Tensor = client.model.features(inputs)
            logits = scale * F.linear(F.normalize(features, dim=1), rows)
            return {"ce": F.cross_entropy(logits, labels)}

        report = fit(client, loss, param_groups=[ParamGroup((*body.values(), scale))])
        copy_into(shared_parameters(client.model, "head"), _head(scale.detach() * rows))
        values, present, counts = class_sums_of(client, lambda features: F.normalize(features, dim=1)).means()
        sent = Prototypes(F.normalize(values, dim=1), present, counts)
        weights = Weights(copies({**body, SCALE: scale}), len(client.data.train.labels))
        metrics = {**report.metrics(), "scale": float(scale.detach())}
        return Update(WeightsAndPrototypes(weights, sent), report.optimizer, metrics)

    # Server -----------------------------------------------------------------------------------------------

    def init(self, task: Task, seed: int) -> WeightsAndPrototypes:
        """A newly initialised body, s, and spread rows W."""
        body = initial(self.architecture, task, seed, "body").tensors
        rows = spread_rows(task.num_classes, task.feature_dim, seed)
        everywhere = torch.ones(task.num_classes, dtype=torch.bool)
        weights = Weights({**body, SCALE: torch.tensor([self.scale])})
        return WeightsAndPrototypes(weights, Prototypes(rows, everywhere))

    def aggregate(
        self, state: WeightsAndPrototypes, uploads: Mapping[int, WeightsAndPrototypes], round_info: Round
    ) -> WeightsAndPrototypes:
        """Average body and scale; move the rows of W."""
        if not uploads:
            return state
        weights = average(state.weights, {i: up.weights for i, up in uploads.items()}, self.weighting)
        means = weighted(up.prototypes for up in uploads.values())
        rows = move_rows(state.prototypes.values, means, self.smoothing)
        return WeightsAndPrototypes(weights, Prototypes(rows, state.prototypes.present))

    def validate(self, upload: WeightsAndPrototypes, state: WeightsAndPrototypes, task: Task) -> None:
        """Check the body's tensors and s, and that vectors of width d come with counts."""
        check_both(upload, state.weights, task, counted=True)

    # Both -------------------------------------------------------------------------------------------------

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that there is one architecture, with a linear head."""
        super().check(task, [self.architecture, *architectures])
        check_heads(self.name, task, [self.architecture, *architectures])

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·|w| + M·(K·d + K) with |w| = |θ| + K·d + 1, as the reference sends it."""
        M, K, d = len(class_counts), task.num_classes, task.feature_dim
        return shared_scalars(self.architecture, task, M, "body") + 2 * M * (K * d + 1) + M * (K * d + K)


def build(settings: Settings) -> FedNH:
    """Return the method."""
    config, architecture = (
        parse_section(Config, settings),
        architectures(settings.models.models, settings.code)[0],
    )
    usual = 20.0 if architecture.startswith("resnet") else 1.0
    scale = usual if config.scale == "auto" else config.scale
    return FedNH(architecture, config.smoothing, scale, weighting_of(settings, "uniform"))
