"""FedRep: the body is averaged, the head is private, and they are trained one after the other.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

Round: each client copies the global body θ, runs τ_h epochs of SGD on its head φ_i with the body frozen, then E epochs
on the body with the head frozen, both on cross-entropy. It sends the body; the server averages,
θ <- Σ_i (n_i/Σn)·θ_i.
Travels: the body's parameters, both ways, and n_i. BatchNorm's buffers stay on the client.
Predicts: the logits of the received body under the client's own head, scored before local training.
Differs from the paper: τ_h = 1 as in PFLlib and, by its "one local epoch", FedCPD; the paper uses 10 or more, and
prints the unweighted mean of the bodies (weighting="uniform").
Differs from the references: none from PFLlib's equations. As there, BatchNorm's running statistics are updated in both
phases. Flower's baseline averages them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client
from pbfl_flwr.methods.averaging import Part, shared_parameters
from pbfl_flwr.methods.fedper import Shared, shared_part
from pbfl_flwr.methods.sharing import SharedWeights
from pbfl_flwr.payloads import Weights
from pbfl_flwr.training.loop import FitReport, Loss, classification, fit, fixed_features
from pbfl_flwr.training.optimizers import ParamGroup, param_group


class Config(Group):
    """Settings ``fedrep.*``."""

    head_epochs: int = Field(
        1, ge=0, description="τ_h, epochs that train the head before those that train the body"
    )
    shared: Shared = Field(
        "auto",
        description="body: average the whole body; stages: keep its last hidden layer private too; auto: by protocol",
    )


@dataclass(frozen=True)
class HeadThenBody:
    """FedRep's training: first the private, then the shared parameters.

    Attributes:
        head_epochs: τ_h.
        part: the shared one; the rest is private.
    """

    head_epochs: int = 1
    part: Part = "body"

    def head_phase(self, client: Client) -> FitReport:
        """Train the private part with the shared one frozen; the loss is logged as ``head-ce``.

        If the frozen body's features do not vary between passes, they are computed once.
        """
        shared = {id(parameter) for parameter in shared_parameters(client.model, self.part).values()}
        private = tuple(p for p in client.model.parameters() if id(p) not in shared)
        ce = classification(client.model)
        fixed = fixed_features(client) if self.part == "body" and self.head_epochs else None

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if fixed is None:
                return {"head-ce": ce(inputs, labels)["ce"]}
            return {"head-ce": nn.functional.cross_entropy(client.model.head(inputs), labels)}

        return fit(
            client,
            loss,
            param_groups=[ParamGroup(private)],
            source=fixed,
            epochs=self.head_epochs,
            phase="head",
        )

    def body_phase(
        self,
        client: Client,
        loss: Loss,
        extra_modules: Sequence[nn.Module] = (),
    ) -> FitReport:
        """Train the shared part and companion networks with the private part frozen."""
        shared = ParamGroup(tuple(shared_parameters(client.model, self.part).values()))
        param_groups = [shared, *(param_group(module) for module in extra_modules)]
        return fit(client, loss, param_groups=param_groups, extra_modules=extra_modules, phase="body")


@dataclass(frozen=True)
class FedRep(SharedWeights):
    """See the module."""

    phases: HeadThenBody = field(default_factory=HeadThenBody)

    def train(self, client: Client, received: Weights) -> FitReport:
        """Train both phases on cross-entropy."""
        head = self.phases.head_phase(client)
        return head.then(self.phases.body_phase(client, classification(client.model)))


def build(settings: Settings) -> FedRep:
    """Return the method."""
    config = parse_section(Config, settings)
    part = shared_part(config.shared, settings)
    return FedRep.configured("fedrep", settings, part, phases=HeadThenBody(config.head_epochs, part))
