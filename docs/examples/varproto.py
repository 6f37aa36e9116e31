"""Prototypes with variances: moving averages on the server, and pseudo-features drawn from them on the clients.

Round: each client minimises CE + λ·mean over B of (1 - cos(z, c_y))·‖z - c_y‖²/d + CE(head(z'), y'), with z = f(x) and,
for every step, B pseudo-features z' ~ N(c_y', v_y') of classes y' that have a prototype. It sends mean and variance of
its features of each class. The server averages both over the holders and moves c and v by the share 1 - m.
Travels: up K_i·2d, down K·2d numbers a client.
Predicts: the class of the nearest global prototype; logits are scored beside it.

A method outside of the package, with a payload of its own; docs/add-a-method.md says how it is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Nearest, Predictor, Round, Update, head_scores
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.prototypes.class_means import ClassSums
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import each_feature, fit, forward


class Config(Group):
    """What ``method-settings`` may say."""

    weight: float = Field(1.0, ge=0, description="λ, weight of the prototype regularisation")
    momentum: float = Field(0.5, ge=0, lt=1, description="m, share of a prototype that stays in a round")


@dataclass(frozen=True)
class Moments(Prototypes):
    """Mean and variance of the features of each class, side by side: values (K, 2·d)."""

    @classmethod
    def widths(cls, task: Task) -> tuple[int, int]:
        """Return the smallest and the largest width of a row that arrives."""
        return 2 * task.feature_dim, 2 * task.feature_dim

    @property
    def means(self) -> Tensor:
        """c, (K, d)."""
        return self.values.tensor_split(2, dim=1)[0]

    @property
    def variances(self) -> Tensor:
        """v, (K, d)."""
        return self.values.tensor_split(2, dim=1)[1]


@dataclass(frozen=True)
class VarProto(Method[Moments, Moments, Moments]):
    """See the module."""

    weight: float
    momentum: float

    name = "varproto"
    state = Moments
    down = Moments
    up = Moments
    primary_predictor = "global"
    predicts = ("head", "global")

    def init(self, task: Task, seed: int) -> Moments:
        """No class has a prototype yet."""
        return Moments.empty(task.num_classes, 2 * task.feature_dim)

    def local_update(self, client: Client, down: Moments) -> Update[Moments]:
        """Train on samples and on pseudo-features, then describe the features of each class."""
        model, device, size = client.model, client.device, client.training.batch_size
        means, deviations, known = (t.to(device) for t in (down.means, down.variances.sqrt(), down.present))
        classes, random = down.present.nonzero().flatten(), client.generator("pseudo-features")

        def draw() -> tuple[Tensor, ...]:
            if not len(classes):
                return ()
            labels = classes[torch.randint(len(classes), (size,), generator=random)].to(device)
            noise = torch.randn(size, means.shape[1], generator=random).to(device)
            return means[labels] + deviations[labels] * noise, labels

        def loss(inputs: Tensor, labels: Tensor, *drawn: Tensor) -> dict[str, Tensor]:
            z, logits = forward(model, inputs)
            c = means[labels]
            weights = (1 - F.cosine_similarity(z, c)) * known[labels]
            terms = {"ce": F.cross_entropy(logits, labels)}
            terms["regularizer"] = self.weight * (weights * (z - c).square().mean(dim=1)).mean()
            if drawn:
                terms["pseudo"] = F.cross_entropy(model.head(drawn[0]), drawn[1])
            return terms

        report = fit(client, loss, draw=draw)
        return Update(moments_of(client), report.optimizer, report.metrics())

    def aggregate(self, state: Moments, uploads: Mapping[int, Moments], round_info: Round) -> Moments:
        """Move every class that somebody sent towards the mean of its holders."""
        if not uploads:
            return state
        fresh = aggregation.mean(uploads.values())
        stays = self.momentum * (state.present & fresh.present) + 1.0 * ~fresh.present  # (K,)
        values = stays.unsqueeze(1) * state.values + (1 - stays).unsqueeze(1) * fresh.values
        return Moments(values, state.present | fresh.present)

    def predictors(self, client: Client, down: Moments) -> dict[str, Predictor]:
        """The head and, from round 2 on, the nearest global prototype."""
        nearest: dict[str, Predictor] = {"global": Nearest(down.means, down.present)}
        return {"head": head_scores, **(nearest if down.num_present else {})}

    def validate(self, upload: Moments, state: Moments, task: Task) -> None:
        """No variance is negative."""
        if bool((upload.variances < 0).any()):
            raise RejectedPayload("a variance is negative")


def moments_of(client: Client) -> Moments:
    """Return mean and variance of the client's features of each class, in evaluation mode."""
    sums, squares = (ClassSums(client.task.num_classes, client.task.feature_dim, client.device) for _ in "12")
    for features, labels in each_feature(client, client.data.train):
        sums.add(features, labels)
        squares.add(features.square(), labels)
    means, present, _ = sums.means()
    variances = (squares.means()[0] - means.square()).clamp_min(0)
    return Moments(torch.cat([means, variances], dim=1), present)


def build(settings: Settings) -> VarProto:
    """Return the method."""
    config = parse_section(Config, settings)
    return VarProto(config.weight, config.momentum)
