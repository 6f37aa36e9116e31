"""FedProto on the sphere: features are turned towards the global prototypes, whatever their length.

Round: each client minimises CE + λ·mean over B of (1 - cos(f(x), c_y)), then answers the mean feature of each of its
classes, divided by its length. The server averages these over the holders of a class; a class that nobody sends keeps
its prototype.
Travels: up K_i·d, down K·d numbers a client; no weights, no counts.
Predicts: the class of the global prototype with the largest cosine; the logits are scored beside it.

A method outside of the package, made of its stages; docs/add-a-method.md says how it is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Predictor, Round, Update, head_scores
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes.aggregation import keep_stale, mean
from pbfl_flwr.prototypes.class_means import class_sums_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit, forward


class Config(Group):
    """What ``method-settings`` may say."""

    weight: float = Field(1.0, ge=0, description="λ, weight of the prototype regularisation")


@dataclass(frozen=True)
class CosProto(Method[Prototypes, Prototypes, Prototypes]):
    """See the module."""

    weight: float

    name = "cosproto"
    state = Prototypes
    down = Prototypes
    up = Prototypes
    primary_predictor = "global"
    predicts = ("head", "global")

    def init(self, task: Task, seed: int) -> Prototypes:
        """No class has a prototype yet."""
        return Prototypes.empty(task.num_classes, task.feature_dim)

    def broadcast(self, state: Prototypes, client: int) -> Prototypes:
        """The global prototypes."""
        return state

    def local_update(self, client: Client, down: Prototypes) -> Update[Prototypes]:
        """Fit with the prototype regularisation, then upload the directions of the class means."""
        prototypes, present = down.values.to(client.device), down.present.to(client.device)

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            features, logits = forward(client.model, inputs)
            away = 1 - F.cosine_similarity(
                features, prototypes[labels]
            )  # (B,), 1 where there is no prototype
            return {
                "ce": F.cross_entropy(logits, labels),
                "regularizer": self.weight * (away * present[labels]).mean(),
            }

        report = fit(client, loss)
        means, held, _ = class_sums_of(client).means()  # (K, d), (K,)
        return Update(Prototypes(F.normalize(means), held), report.optimizer, report.metrics())

    def aggregate(
        self, state: Prototypes, uploads: Mapping[int, Prototypes], round_info: Round
    ) -> Prototypes:
        """The mean over the holders of a class; what nobody sent stays."""
        if not uploads:
            return state
        kept, _ = keep_stale(state, mean(uploads.values()))
        return kept

    def predictors(self, client: Client, down: Prototypes) -> dict[str, Predictor]:
        """Head, and the largest cosine."""
        if not down.num_present:
            return {"head": head_scores}

        def nearest(features: Tensor, logits: Tensor) -> Tensor:
            cosines = F.normalize(features) @ F.normalize(down.values.to(features)).T  # (B, K)
            return cosines.masked_fill(~down.present.to(features.device), -2.0)  # below every cosine

        return {"head": head_scores, "global": nearest}

    def validate(self, upload: Prototypes, state: Prototypes, task: Task) -> None:
        """Rows of width d, without counts."""
        if upload.values.shape[1] != task.feature_dim or upload.counts is not None:
            raise RejectedPayload(f"expected rows of width {task.feature_dim} without counts")

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """Σ_i (K_i + K)·d."""
        return float(sum(held + task.num_classes for held in class_counts) * task.feature_dim)


def build(settings: Settings) -> CosProto:
    """Return the method."""
    return CosProto(parse_section(Config, settings).weight)
