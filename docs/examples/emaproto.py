"""FedProto with a memory on the server: global prototypes are moving averages. Training is a plain PyTorch loop.

Round: each client minimises CE + λ·mean over B·d of (f(x) - c_y)², then sends its class means. The server makes
c_j <- m·c_j + (1 - m)·mean over the holders of class j; a new class starts from that mean.
Travels: up K_i·d, down K·d numbers a client.
Predicts: the class of the nearest global prototype; logits are scored beside it.

A method outside of the package; docs/add-a-method.md says how it is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch.nn import functional as F

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Nearest, Predictor, Round, Update, head_scores
from pbfl_flwr.models.contract import has_batch_norm
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.prototypes.class_means import class_sums_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import take


class Config(Group):
    """What ``method-settings`` may say."""

    weight: float = Field(10.0, ge=0, description="λ, weight of the prototype regularisation")
    momentum: float = Field(0.5, ge=0, lt=1, description="m, share of a prototype that stays in a round")


@dataclass(frozen=True)
class EmaProto(Method[Prototypes, Prototypes, Prototypes]):
    """See the module."""

    weight: float
    momentum: float

    name = "emaproto"
    state = Prototypes
    down = Prototypes
    up = Prototypes
    primary_predictor = "global"
    predicts = ("head", "global")

    def init(self, task: Task, seed: int) -> Prototypes:
        """No class has a prototype yet."""
        return Prototypes.empty(task.num_classes, task.feature_dim)

    def local_update(self, client: Client, down: Prototypes) -> Update[Prototypes]:
        """Train in a plain loop, then average the features of each class."""
        model, data, settings = client.model, client.data, client.training
        prototypes, known = down.values.to(client.device), down.present.to(client.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
        order, losses = client.generator("batches"), list[float]()
        model.train()
        for _ in range(settings.local_epochs):
            for rows in torch.randperm(len(data.train), generator=order).split(settings.batch_size):
                if len(rows) == 1 and has_batch_norm(model):
                    continue  # it has no variance over one sample
                x, y = take(data, data.train, rows.to(data.train.labels.device), client.device)
                z = model.features(x)
                away = ((z - prototypes[y]).square().mean(dim=1) * known[y]).mean()
                loss = F.cross_entropy(model.head(z), y) + self.weight * away
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        means, present, _ = class_sums_of(client).means()
        metrics = {"loss.all": sum(losses) / len(losses)} if losses else {"idle": 1.0}
        return Update(Prototypes(means, present), metrics=metrics)

    def aggregate(
        self, state: Prototypes, uploads: Mapping[int, Prototypes], round_info: Round
    ) -> Prototypes:
        """Move every class that somebody sent towards the mean of its holders."""
        if not uploads:
            return state
        fresh = aggregation.mean(uploads.values())
        stays = self.momentum * (state.present & fresh.present) + 1.0 * ~fresh.present  # (K,)
        values = stays.unsqueeze(1) * state.values + (1 - stays).unsqueeze(1) * fresh.values
        return Prototypes(values, state.present | fresh.present)

    def predictors(self, client: Client, down: Prototypes) -> dict[str, Predictor]:
        """The head and, from round 2 on, the nearest global prototype."""
        nearest: dict[str, Predictor] = {"global": Nearest(down.values, down.present)}
        return {"head": head_scores, **(nearest if down.num_present else {})}

    def validate(self, upload: Prototypes, state: Prototypes, task: Task) -> None:
        """Rows are d wide."""
        if upload.values.shape[1] != task.feature_dim:
            raise RejectedPayload(f"rows are {upload.values.shape[1]} wide, expected {task.feature_dim}")


def build(settings: Settings) -> EmaProto:
    """Return the method."""
    config = parse_section(Config, settings)
    return EmaProto(config.weight, config.momentum)
