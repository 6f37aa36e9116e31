"""FedL2G: clients learn the guiding vector of each class that, one step ahead, helps their own loss most.

Zhang et al., "Adaptive Guidance for Local Training in Heterogeneous Federated Learning", 2024.

Round: each client receives a guiding vector v_c of every class, and keeps a few batches aside as its quiz, the same in
all rounds. On the others it minimises L = CE + MSE(u, v_y), u its features (FedL2G-f) or logits (FedL2G-l). Then it
looks one step of SGD ahead, θ' = θ - η·∇L on a random batch, and sends g_c = ∂CE(quiz; θ')/∂v_c; its network stays
where it was. The server makes v_c <- v_c - η_s·mean of the g_c. In the first rounds, the warm-up, nobody trains.
Travels: up g_c of the classes in that batch, down all v_c.
Predicts: the logits of the client's own model.
Differs from the paper: with fewer samples than a batch and the quiz, the quiz is what a batch leaves, or half of less
than a batch. The step ahead is plain SGD, whatever the optimizer.
Differs from the references: the quiz is drawn at random; under batch-order = "fixed" (protocol "htfl") it is the first
samples, as there. Norms of gradients are bounded by 100, the server's too, as there.
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
from pbfl_flwr.data import Shard
from pbfl_flwr.method import Client, Method, Round, Update
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.task import Task
from pbfl_flwr.training.look_ahead import look_ahead, some_batches
from pbfl_flwr.training.loop import Loss, classification, fit, forward, rate_factor
from pbfl_flwr.training.optimizers import param_group

BOUND = 100.0  # of the norm of every gradient


class Config(Group):
    """Settings ``fedl2g.*``."""

    form: Literal["features", "logits"] = Field("features", description="guided: FedL2G-f or FedL2G-l")
    server_learning_rate: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="η_s, of the guiding vectors; auto: 100 for features, 0.1 for logits"
    )
    warm_up_rounds: int = Field(50, ge=0, description="first rounds, in which clients do not train")
    study_batches: int = Field(1, ge=1, description="batches of the step ahead")
    quiz_batches: int = Field(1, ge=1, description="batches kept aside to judge the step ahead")


@dataclass(frozen=True)
class Guidance(Prototypes):
    """A vector of each class, or its gradient: (K, d) for features, (K, K) for logits."""

    @classmethod
    def widths(cls, task: Task) -> tuple[int, int]:
        """Return the smallest and the largest allowed width."""
        return 1, max(task.feature_dim, task.num_classes)


@dataclass(frozen=True)
class FedL2G(Method[Guidance, Guidance, Guidance]):
    """See the module."""

    config: Config
    rate: float
    name: str = "fedl2g"

    state = Guidance
    down = Guidance
    up = Guidance

    def init(self, task: Task, seed: int) -> Guidance:
        """Return standard normal vectors."""
        width = task.feature_dim if self.config.form == "features" else task.num_classes
        with seeds.seeded(seed):
            return Guidance(torch.randn(task.num_classes, width), torch.ones(task.num_classes).bool())

    def local_update(self, client: Client, down: Guidance) -> Update[Guidance]:
        """Train towards the vectors, after the warm-up, and send their gradient a step ahead."""
        vectors, config = down.values.to(client.device, copy=True), self.config

        def guided(model: SplitModel) -> Loss:
            def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
                features, logits = forward(model, inputs)
                output = features if config.form == "features" else logits
                distance = nn.functional.mse_loss(output, vectors[labels])
                return {"ce": nn.functional.cross_entropy(logits, labels), "guidance": distance}

            return loss

        quiz, study = self._parts(client)
        client = replace(client, data=replace(client.data, train=study))
        groups = [param_group(client.model, max_grad_norm=BOUND)]
        warming = client.round <= config.warm_up_rounds
        report = fit(client, guided(client.model), param_groups=groups, epochs=0 if warming else None)
        studied = some_batches(client, study, config.study_batches)
        asked = some_batches(client, quiz, config.quiz_batches)
        if not studied or not asked:
            return Update(Guidance.empty(*vectors.shape), report.optimizer, report.metrics())
        rate = client.training.learning_rate * rate_factor(client.training, client.round)
        learnt, judged, vectors = (guided, studied), (classification, asked), vectors.requires_grad_()
        gradient, quizzed = look_ahead(client.model, learnt, judged, rate, vectors)
        metrics = {"loss.quiz": float(quizzed)} | ({} if warming else report.metrics())
        rows = gradient.cpu()
        return Update(Guidance(rows, rows.any(dim=1)), report.optimizer, metrics)

    def _parts(self, client: Client) -> list[Shard]:
        """Return the samples of the quiz and all others."""
        shard, size, n = client.data.train, client.training.batch_size, len(client.data.train)
        order = torch.arange(n)
        if client.training.batch_order != "fixed":
            order = torch.randperm(n, generator=seeds.generator(client.seed, "quiz", client.key))
        quiz = min(self.config.quiz_batches * size, n - size) if n > size else n // 2
        parts = order.to(shard.labels.device).split([quiz, n - quiz])
        return [Shard(shard.inputs[part], shard.labels[part]) for part in parts]

    def aggregate(self, state: Guidance, uploads: Mapping[int, Guidance], round_info: Round) -> Guidance:
        """One step of SGD along each class's mean gradient."""
        if not uploads:
            return state
        mean = aggregation.mean(uploads.values()).values
        share = min(1.0, BOUND / (float(mean.norm()) + 1e-6))
        return replace(state, values=state.values - self.rate * share * mean)

    def validate(self, upload: Guidance, state: Guidance, task: Task) -> None:
        """Check that rows are as wide as the vectors."""
        if upload.values.shape != state.values.shape:
            raise RejectedPayload(f"{upload.values.shape[1]} wide, expected {state.values.shape[1]}")

    def warnings(self, num_rounds: int, state: Guidance | None = None) -> list[str]:
        """Warn before a run in which nobody trains."""
        warm = self.config.warm_up_rounds
        nobody = f"fedl2g.warm-up-rounds = {warm}: no client trains within the run's {num_rounds} rounds"
        return [nobody] if state is None and num_rounds <= warm else []

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """Σ_i (K_i + K)·width."""
        width = task.feature_dim if self.config.form == "features" else task.num_classes
        return float(sum(width * (classes + task.num_classes) for classes in class_counts))


def build(settings: Settings) -> FedL2G:
    """Return the method."""
    config = parse_section(Config, settings)
    published = 100.0 if config.form == "features" else 0.1
    return FedL2G(config, published if config.server_learning_rate == "auto" else config.server_learning_rate)
