"""FedMRL: a small shared network and the client's own are fused, and both classify nested parts of the result.

Yi, Yu, Ren, Wang, Wang, Li, "Federated Model Heterogeneous Matryoshka Representation Learning", NeurIPS 2024.

Round: each client receives the shared network a, whose features are only s wide, and trains it with its own network w_i
and a private linear map P (d + s to d): z = P·[a(x), w_i(x)], L = CE(head_i(z), y) + CE(head_a(z_1..z_s), y), one step
of all three on every batch. The server averages, a <- Σ_i (n_i/Σn)·a_i.
Travels: all parameters of a, both ways, and n_i; BatchNorm's buffers, P and w_i stay.
Predicts: head_i(z) with the a that has just arrived, before local training.
Differs from the paper: the code's momentum and weight decay are the run's settings; it averages buffers too.
Differs from the references: HtFLlib averages without weights, and never stores P: every round starts from the initial
map, with which clients are scored as well. Protocol "htfl" does both (weighting = "uniform", fedmrl.keep-map = "no").
Its shared network is the clients' first one with features averaged to s; for its CNN that is cnn4-512.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.config import Auto, Group, Settings, parse_section
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Moment, Predictor, Update, WithInputs, resolved_moment
from pbfl_flwr.methods.averaging import Weighting, copies, parameters_of, weighting_of
from pbfl_flwr.methods.mutual import (
    auxiliary_network,
    auxiliary_scalars,
    buffers_of,
    check_auxiliary,
    one_architecture,
)
from pbfl_flwr.methods.sharing import AveragedWeights, initial
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.payloads import Weights, part_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit
from pbfl_flwr.training.optimizers import param_group


class Config(Group):
    """Settings ``fedmrl.*``."""

    auxiliary: str = Field("cnn4", description="architecture of the shared network, the same on all clients")
    width: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto", description="s, width of the shared network's features, at most d; auto: a quarter of d"
    )
    keep_map: Literal["auto", "yes", "no"] = Field(
        "auto", description="whether a client keeps its map P; no: every round starts from the initial one"
    )


@dataclass(frozen=True)
class FedMRL(AveragedWeights):
    """See the module."""

    auxiliary: str
    width: int
    keep_map: bool = True
    weighting: Weighting = "samples"
    moment: Moment = "before"
    name: str = "fedmrl"

    def init(self, task: Task, seed: int) -> Weights:
        """Return a newly initialised shared network."""
        return initial(self.auxiliary, replace(task, feature_dim=self.width), seed, "all")

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """Train the client's network, the shared one and the map on both losses."""
        model, shared, projection = client.model, self._shared(client, down.tensors), self._map(client)

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            z = projection(torch.cat([shared.features(inputs), model.features(inputs)], dim=1))
            return {
                "ce": nn.functional.cross_entropy(model.head(z), labels),
                "shared-ce": nn.functional.cross_entropy(shared.head(z[:, : self.width]), labels),
            }

        groups = [param_group(module) for module in (model, shared, projection)]
        report = fit(client, loss, param_groups=groups, extra_modules=[shared])
        upload = Weights(parameters_of(shared), len(client.data.train.labels))
        memory = {**buffers_of(shared), **report.optimizer}
        if self.keep_map:
            memory |= {f"map.{name}": tensor for name, tensor in copies(projection.state_dict()).items()}
        if resolved_moment(client.evaluation, self) == "after":
            memory |= {f"shared.{name}": tensor for name, tensor in upload.tensors.items()}
        return Update(upload, memory, report.metrics())

    def predictors(self, client: Client, down: Weights) -> dict[str, Predictor]:
        """Return the fused logits; scored after local training, with the shared network that the client trained."""
        after = resolved_moment(client.evaluation, self) == "after"
        trained = part_of(client.memory, "shared") if after else {}
        shared, projection = self._shared(client, trained or down.tensors).eval(), self._map(client)

        def scores(inputs: Tensor, features: Tensor, logits: Tensor) -> Tensor:
            fused: Tensor = client.model.head(projection(torch.cat([shared.features(inputs), features], 1)))
            return fused

        return {"head": WithInputs(scores)}

    def _shared(self, client: Client, tensors: Mapping[str, Tensor]) -> SplitModel:
        inside = replace(client, task=replace(client.task, feature_dim=self.width))
        return auxiliary_network(self.auxiliary, inside, tensors)

    def _map(self, client: Client) -> nn.Linear:
        """Return P from memory, else newly initialised from the run's seed, like all networks."""
        with seeds.seeded(client.seed):
            projection = nn.Linear(client.task.feature_dim + self.width, client.task.feature_dim)
        if kept := part_of(client.memory, "map"):
            projection.load_state_dict(kept)
        return projection.to(client.device)

    def auxiliary_architectures(self) -> tuple[str, ...]:
        """The shared network."""
        return (self.auxiliary,)

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that the shared network is not wider than the clients', and accepts the task's inputs."""
        if self.width > task.feature_dim:
            raise PbflError(f"fedmrl.width = {self.width}: must be at most feature-dim, {task.feature_dim}")
        check_auxiliary("fedmrl.auxiliary", self.auxiliary, replace(task, feature_dim=self.width))

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·(|θ_a| + |φ_a|)."""
        shared = auxiliary_scalars(self.auxiliary, replace(task, feature_dim=self.width))
        return float(2 * len(class_counts) * shared)


def build(settings: Settings) -> FedMRL:
    """Return the method."""
    config, htfl = parse_section(Config, settings), settings.run.protocol == "htfl"
    return FedMRL(
        one_architecture("fedmrl.auxiliary", config.auxiliary, settings.code),
        max(1, settings.models.feature_dim // 4) if config.width == "auto" else config.width,
        not htfl if config.keep_map == "auto" else config.keep_map == "yes",
        weighting_of(settings, "uniform" if htfl else "samples"),
    )
