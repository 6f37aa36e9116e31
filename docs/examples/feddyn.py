"""FedDyn: every client's loss is bent by the gradient that the client remembers.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.

Round: each client copies the global weights w, minimises cross-entropy - <g_i, w_i> + (α/2)·‖w_i - w‖² and keeps
g_i <- g_i - α·(w_i - w), zero at first. The server makes h <- h - (α/M)·Σ_i (w_i - w) and w <- mean_i w_i - h/α.
Travels: all parameters, both ways. g_i stays on the client, h on the server.
Predicts: the logits of the global model, scored when it arrives, before local training.
Differs from the paper: BatchNorm's buffers stay on the client; the number of samples travels with the weights and is
not used.

A method outside of the package; docs/add-a-method.md says how it is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Moment, Round, Update
from pbfl_flwr.methods.averaging import same_shapes
from pbfl_flwr.methods.sharing import answer, initial, receive, shared_scalars
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import Weights, joined, part_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import classification, fit


class Config(Group):
    """What ``method-settings`` may say."""

    alpha: float = Field(
        0.1, gt=0, description="α, weight of the regularisation towards the received weights"
    )


@dataclass(frozen=True)
class Dynamics:
    """The server's state.

    Attributes:
        weights: w.
        drift: h, with the tensors of w.
    """

    weights: Weights
    drift: Weights

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of both."""
        return joined(weights=self.weights, drift=self.drift)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Dynamics:
        """Rebuild both."""
        return cls(*(Weights.from_tensors(part_of(tensors, part), task) for part in ("weights", "drift")))


@dataclass(frozen=True)
class FedDyn(Method[Dynamics, Weights, Weights]):
    """See the module."""

    architecture: str
    alpha: float

    name = "feddyn"
    state = Dynamics
    down = Weights
    up = Weights
    moment: Moment = "before"
    same_architecture = True

    def init(self, task: Task, seed: int) -> Dynamics:
        """A fresh network and h = 0."""
        weights = initial(self.architecture, task, seed, "all")
        return Dynamics(weights, Weights({name: torch.zeros_like(w) for name, w in weights.tensors.items()}))

    def broadcast(self, state: Dynamics, client: int) -> Weights:
        """Return w."""
        return state.weights

    def install(self, client: Client, down: Weights) -> None:
        """w_i <- w."""
        receive(client, down, "all")

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """Train and remember g_i."""
        self.install(client, down)
        ce = classification(client.model)
        own = dict(client.model.named_parameters())
        received = {name: down.tensors[name].to(client.device) for name in own}
        known = part_of(client.memory, "g")
        gradient = {
            name: known[name].to(client.device) if known else torch.zeros_like(w)
            for name, w in received.items()
        }

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            along = torch.stack([(gradient[name] * w).sum() for name, w in own.items()]).sum()
            distance = torch.stack([(w - received[name]).square().sum() for name, w in own.items()]).sum()
            return {**ce(inputs, labels), "linear": -along, "prox": self.alpha / 2 * distance}

        report = fit(client, loss)
        upload = answer(client, "all")
        kept = {
            f"g.{name}": gradient[name].cpu() - self.alpha * (w - down.tensors[name])
            for name, w in upload.tensors.items()
        }
        return Update(upload, {**kept, **report.optimizer}, report.metrics())

    def aggregate(self, state: Dynamics, uploads: Mapping[int, Weights], round_info: Round) -> Dynamics:
        """First h, then w; both stay if nobody answers."""
        if not uploads:
            return state
        weights, drift = {}, {}
        for name, w in state.weights.tensors.items():
            mean = torch.stack([upload.tensors[name] for upload in uploads.values()]).mean(dim=0)
            share = len(uploads) / round_info.num_clients
            drift[name] = state.drift.tensors[name] - self.alpha * share * (mean - w)
            weights[name] = mean - drift[name] / self.alpha
        return Dynamics(Weights(weights), Weights(drift))

    def validate(self, upload: Weights, state: Dynamics, task: Task) -> None:
        """Every tensor of w, in its shape, and no other."""
        same_shapes(upload, state.weights)

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·|w|."""
        return shared_scalars(self.architecture, task, len(class_counts), "all")


def build(settings: Settings) -> FedDyn:
    """Return the method."""
    return FedDyn(
        architectures(settings.models.models, settings.code)[0], parse_section(Config, settings).alpha
    )
