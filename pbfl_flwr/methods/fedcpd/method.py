"""FedCPD: FedRep with distillation from the client's own earlier feature maps, and with global prototypes.

Jin et al., "FedCPD: Personalized Federated Learning with Prototype-Enhanced Representation and Memory Distillation",
IJCAI 2025.

Round: each client copies the global body θ, trains its head φ_i on cross-entropy (body frozen), then its body (head
frozen) on CE + α·‖z - P_y‖² + β·(InfoNCE over cosine(z, P)/τ) + γ·L_fd, where L_fd compares attention and feature maps,
fused across layers, with those of its own body at the end of its last participation. It sends body and class means;
the server averages both, θ <- Σ_i (n_i/Σn)·θ_i and P_j <- the mean over the holders of class j.
Travels: body and K_i·d numbers up, body and K·d numbers down. Head, attention, fusion and the earlier body stay.
Predicts: the logits of the received body under the client's own head, scored before local training.
Differs from the paper: what it leaves open is a setting. Weights α = 0.002, β = 0.1 (the largest tried that stay about
0.2 points from FedRep in rounds 21 to 30 of Fashion-MNIST), γ = 1 and τ = 0.5; L_fd is the mean over a map's elements,
summed over layers (Algorithm 1 overwrites it layer by layer) that have spatial maps. The head phase uses cross-entropy
only, since no other term depends on the head. "K iterations, alternating" (Section 3.1) is read as in Algorithm 1 and
FedRep: one phase after the other.
fedcpd.base="fedavg" is its Figure 2c, the same losses on FedAvg: body and head are averaged and trained at once.
Differs from the reference: no code was published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.config.keys import Stale
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method, Moment, Round, Update
from pbfl_flwr.methods.averaging import Part, Weighting, average, copies, weighting_of
from pbfl_flwr.methods.fedcpd.attention import (
    MapDistillation,
    MapMemory,
    check_maps,
    convolutional,
    map_channels,
)
from pbfl_flwr.methods.fedcpd.losses import alignment_loss, contrast
from pbfl_flwr.methods.fedrep import HeadThenBody
from pbfl_flwr.methods.sharing import answer, check_both, initial, receive, shared_scalars, to_be_equal
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.registry import architectures, without_weights
from pbfl_flwr.payloads import Prototypes, WeightsAndPrototypes, part_of
from pbfl_flwr.prototypes.aggregation import keep_stale, mean
from pbfl_flwr.prototypes.class_means import class_sums_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import Loss, fit, forward
from pbfl_flwr.training.optimizers import param_group


class Config(Group):
    """Settings ``fedcpd.*``; a weight of 0 disables its component; with all three at 0 the method is its base."""

    base: Literal["fedrep", "fedavg"] = Field(
        "fedrep",
        description="method that the losses are added to; with fedavg the head is averaged too (Figure 2c)",
    )
    align_weight: float = Field(
        0.002, ge=0, description="α, weight of the alignment with the class's global prototype"
    )
    contrast_weight: float = Field(
        0.1, ge=0, description="β, weight of the contrastive loss with the global prototypes"
    )
    distill_weight: float = Field(
        1.0, ge=0, description="γ, weight of distilling feature maps from the client's previous body"
    )
    temperature: float = Field(0.5, gt=0, description="τ, temperature of the contrastive loss")
    map_reduction: Literal["mean", "sum"] = Field(
        "mean", description="how a feature map's squared error is reduced over its elements"
    )
    fusion_width: int = Field(64, ge=1, le=4096, description="number of channels in the multi-level fusion")
    head_epochs: int = Field(1, ge=0, description="τ_h, epochs of the head phase")


@dataclass(frozen=True)
class FedCPD(Method[WeightsAndPrototypes, WeightsAndPrototypes, WeightsAndPrototypes]):
    """See the module."""

    architecture: str
    config: Config = field(default_factory=Config)
    weighting: Weighting = "samples"
    stale: Stale = "keep"
    name: str = "fedcpd"
    moment: Moment = "before"

    state = WeightsAndPrototypes
    down = WeightsAndPrototypes
    up = WeightsAndPrototypes
    uses = frozenset({"stale"})
    same_architecture = True

    @property
    def part(self) -> Part:
        """The part of the network that is averaged."""
        return "body" if self.config.base == "fedrep" else "all"

    # Client -----------------------------------------------------------------------------------------------

    def install(self, client: Client, down: WeightsAndPrototypes) -> None:
        """Body <- θ."""
        receive(client, down.weights, self.part)

    def local_update(self, client: Client, down: WeightsAndPrototypes) -> Update[WeightsAndPrototypes]:
        """Body <- θ, head phase, body phase, class means; keep the body and L_fd's modules for the next time."""
        self.install(client, down)
        distillation = self._distillation(client)
        earlier_stages = part_of(client.memory, "teacher")
        teacher = None
        if distillation is not None and earlier_stages:
            teacher = MapMemory(client.model.stages, earlier_stages, distillation.attention)
        loss = self._loss(client, down.prototypes, distillation, teacher)
        extra_modules = [distillation] if teacher and distillation else []
        if self.config.base == "fedrep":
            phases = HeadThenBody(self.config.head_epochs)
            head = phases.head_phase(client)
            report = head.then(phases.body_phase(client, loss, extra_modules))
        else:
            param_groups = [param_group(network) for network in (client.model, *extra_modules)]
            report = fit(client, loss, param_groups=param_groups, extra_modules=extra_modules)
        memory = dict(report.optimizer)
        if distillation is not None:
            stages = client.model.stages
            memory |= {f"teacher.{name}": tensor for name, tensor in copies(stages.state_dict()).items()}
            memory |= {f"distillation.{name}": t for name, t in copies(distillation.state_dict()).items()}
        upload = WeightsAndPrototypes(answer(client, self.part), self._prototypes(client))
        return Update(upload, memory, report.metrics())

    def _loss(
        self,
        client: Client,
        prototypes: Prototypes,
        distillation: MapDistillation | None,
        teacher: MapMemory | None,
    ) -> Loss:
        """L_ce + α·L_align + β·L_pcl + γ·L_fd, without terms that are disabled or lack prototypes or a teacher."""
        config, model = self.config, client.model
        values, present = prototypes.values.to(client.device), prototypes.present.to(client.device)
        has_prototypes = prototypes.num_present > 0

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            terms: dict[str, Tensor] = {}
            if teacher is None or distillation is None:
                features, logits = forward(model, inputs)
            else:
                maps, features = model.maps_and_features(inputs)
                logits = model.head(features)
                difference = distillation(
                    convolutional(maps), *teacher(inputs), config.map_reduction == "sum"
                )
                terms["memory"] = config.distill_weight * difference
            if config.align_weight and has_prototypes:
                terms["align"] = config.align_weight * alignment_loss(features, labels, values, present)
            if config.contrast_weight and has_prototypes:
                cosines = contrast(features, labels, values, present, config.temperature)
                terms["contrast"] = config.contrast_weight * cosines
            return {"ce": nn.functional.cross_entropy(logits, labels), **terms}

        return loss

    def _distillation(self, client: Client) -> MapDistillation | None:
        """Return L_fd's attention and fusion modules in the state this client left them; None if γ = 0."""
        config = self.config
        if not config.distill_weight:
            return None
        module = MapDistillation(
            map_channels(client.model, client.task),
            width=config.fusion_width,
            seed=seeds.derive(client.seed, "fedcpd", client.key),
        )
        if state := part_of(client.memory, "distillation"):
            module.load_state_dict(state)
        return module.to(client.device)

    def _prototypes(self, client: Client) -> Prototypes:
        """Class means of the trained body; empty if α = β = 0, where they are not needed."""
        if not (self.config.align_weight or self.config.contrast_weight):
            return Prototypes.empty(client.task.num_classes, client.task.feature_dim)
        values, present, _ = class_sums_of(client).means()
        return Prototypes(values, present)

    # Server -----------------------------------------------------------------------------------------------

    def init(self, task: Task, seed: int) -> WeightsAndPrototypes:
        """A newly initialised body; no class has a prototype."""
        body = initial(self.architecture, task, seed, self.part)
        return WeightsAndPrototypes(body, Prototypes.empty(task.num_classes, task.feature_dim))

    def aggregate(
        self, state: WeightsAndPrototypes, uploads: Mapping[int, WeightsAndPrototypes], round_info: Round
    ) -> WeightsAndPrototypes:
        """Average bodies by samples and prototypes over holders; a class that nobody sent keeps its prototype."""
        if not uploads:
            return state
        weights = average(state.weights, {i: up.weights for i, up in uploads.items()}, self.weighting)
        fresh = mean(up.prototypes for up in uploads.values())
        return WeightsAndPrototypes(weights, keep_stale(state.prototypes, fresh, mode=self.stale)[0])

    def validate(self, upload: WeightsAndPrototypes, state: WeightsAndPrototypes, task: Task) -> None:
        """Check the body's tensors and the prototypes' width d."""
        check_both(upload, state.weights, task)

    # Both -------------------------------------------------------------------------------------------------

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that there is one architecture (any classifier on FedRep), with feature maps if γ > 0."""
        super().check(task, to_be_equal([self.architecture, *architectures], self.part))
        if not self.config.distill_weight:
            return
        model = build_model(without_weights(self.architecture), task, 0)
        if not map_channels(model, task):
            raise PbflError(
                f"method 'fedcpd' distils feature maps, which model '{self.architecture}' does not have; allowed "
                "are convolutional models with stages, or fedcpd.distill-weight = 0"
            )
        check_maps(self.architecture, model, task)

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·|θ| + Σ_i (K_i + K)·d."""
        cost = shared_scalars(self.architecture, task, len(class_counts), self.part)
        if self.config.align_weight or self.config.contrast_weight:
            cost += sum(classes + task.num_classes for classes in class_counts) * task.feature_dim
        return cost


def build(settings: Settings) -> FedCPD:
    """Return the method."""
    return FedCPD(
        architectures(settings.models.models, settings.code)[0],
        parse_section(Config, settings),
        weighting_of(settings, "samples"),
        settings.prototypes.stale,
    )
