"""FML: federated mutual learning with an auxiliary network.

Shen et al., "Federated Mutual Learning", 2020.

Round: each client receives the auxiliary network a ("meme") and trains it together with its own w_i: on every batch
L_w = α·CE(z, y) + (1-α)·KL(p(u) ‖ p(z)) and L_a = β·CE(u, y) + (1-β)·KL(p(z) ‖ p(u)), z = w_i(x), u = a(x), then one
step of each. The server takes the unweighted mean of the a_i.
Travels: all parameters of the auxiliary network, both ways; BatchNorm's buffers and w_i stay.
Predicts: the logits of the client's own model.
Differs from the paper: its code has momentum, weight decay and a falling rate, and averages buffers too; here both
gradients are clipped to norm 10, as in the references (fml.max-grad-norm = 0 is off).
Differs from the references: by default the divergence is summed over classes and gradients stop at the teacher, as
in the paper; protocol "htfl" and "pfl" divide it by K and differentiate through the teacher, so that w_i and a each
minimise L_w + L_a. HtFLlib's default auxiliary network is the clients' first one; published costs are the CNN's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Update
from pbfl_flwr.methods.averaging import Weighting, parameters_of, weighting_of
from pbfl_flwr.methods.mutual import (
    CLIP,
    Conventions,
    auxiliary_network,
    auxiliary_scalars,
    buffers_of,
    check_auxiliary,
    conventions_of,
    one_architecture,
)
from pbfl_flwr.methods.sharing import AveragedWeights, initial
from pbfl_flwr.payloads import Weights
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit, forward
from pbfl_flwr.training.optimizers import param_group


class Config(Group):
    """Settings ``fml.*``."""

    alpha: float = Field(
        0.5, ge=0, le=1, description="α, weight of the cross-entropy in the loss of the client's network"
    )
    beta: float = Field(
        0.5, ge=0, le=1, description="β, weight of the cross-entropy in the loss of the auxiliary network"
    )
    auxiliary: str = Field(
        "cnn4", description="architecture of the auxiliary network, the same on all clients"
    )
    max_grad_norm: float = Field(
        CLIP, ge=0, description="bound on the norm of each of the two gradients; 0 is off"
    )


@dataclass(frozen=True)
class FML(AveragedWeights):
    """See the module."""

    config: Config
    auxiliary: str
    conventions: Conventions
    weighting: Weighting = "uniform"
    name: str = "fml"

    def init(self, task: Task, seed: int) -> Weights:
        """Return a newly initialised auxiliary network."""
        return initial(self.auxiliary, task, seed, "all")

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """Train both networks on the labels and on each other's outputs."""
        model, meme = client.model, auxiliary_network(self.auxiliary, client, down.tensors)
        alpha, beta, divergence = self.config.alpha, self.config.beta, self.conventions.divergence

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            z, u = forward(model, inputs)[1], forward(meme, inputs)[1]
            return {
                "ce": alpha * nn.functional.cross_entropy(z, labels),
                "distillation": (1 - alpha) * divergence(z, u),
                "aux-ce": beta * nn.functional.cross_entropy(u, labels),
                "aux-distillation": (1 - beta) * divergence(u, z),
            }

        clip = self.config.max_grad_norm
        param_groups = [param_group(model, max_grad_norm=clip), param_group(meme, max_grad_norm=clip)]
        report = fit(client, loss, param_groups=param_groups, extra_modules=[meme])
        upload = Weights(parameters_of(meme), len(client.data.train.labels))
        return Update(upload, {**buffers_of(meme), **report.optimizer}, report.metrics())

    def auxiliary_architectures(self) -> tuple[str, ...]:
        """The auxiliary network."""
        return (self.auxiliary,)

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that the auxiliary network accepts the task's inputs."""
        check_auxiliary("fml.auxiliary", self.auxiliary, task)

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·(|θ_a| + |φ_a|)."""
        return float(2 * len(class_counts) * auxiliary_scalars(self.auxiliary, task))


def build(settings: Settings) -> FML:
    """Return the method."""
    config = parse_section(Config, settings)
    return FML(
        config,
        one_architecture("fml.auxiliary", config.auxiliary, settings.code),
        conventions_of(settings),
        weighting_of(settings, "uniform"),
    )
