"""FedPA: averaged weights, class prototypes and an adversarial feature generator.

Jiang et al., "FedPA: Generator-Based Heterogeneous Federated Prototype Adversarial Learning", IEEE Transactions on
Dependable and Secure Computing 2024. Its text was unavailable; the reference is the repository FedPA (threeStoneLei1).

Round: in round t = 0, 1, ... each client copies the weights w and minimises CE(g(z), y) + a_t·CE(g(G(ŷ, ε)), ŷ) +
b_t·mean over B·d of (z - P_y)², z = f(x), a_t = max(1e-4, 25·0.98^t), b_t = max(0.15, 5·0.98^t), the last two terms
from t = 1 on. It sends w_i and the class means of the features computed in training. The server averages both by
samples and trains G by Adam on a_t·Σ_k mean_b[ω_k,y·CE(g_k(G(y, ε)), y)] - 0.15·MSE(G, P_y) + Div, which pushes
generated features away from the previous round's prototypes and from each other.
Travels: down w, G and P; up w_i, class means and n_ij, which the server thus learns.
Predicts: the logits of the locally trained network; published scores cannot be those of the averaged one.
Differs from the reference: a round is local-epochs instead of 20 batches (fedpa.local-steps); class means are weighted
by the samples actually used, where in the code a class that was held but not drawn counts as zeros; clients query G
only for classes it was trained on, in every batch, where the code stops after 20 per round; a class without a prototype
adds no term. Features have the architecture's own range; G ends in a ReLU (fedpa.generator-output), as the CNN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.config.keys import Stale
from pbfl_flwr.method import Client, Method, Round, Update
from pbfl_flwr.methods.averaging import Weighting, average, weighting_of
from pbfl_flwr.methods.generative.generators import (
    FeatureGenerator,
    GenerativeState,
    GeneratorBroadcast,
    Shape,
    initial_state,
    sampler,
    train_generator,
)
from pbfl_flwr.methods.sharing import answer, check_both, check_heads, initial, receive, shared_scalars
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import (
    Magnitudes,
    Prototypes,
    Weights,
    WeightsAndPrototypes,
)
from pbfl_flwr.prototypes import aggregation, regularizer
from pbfl_flwr.prototypes.class_means import ClassSums
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit, forward
from pbfl_flwr.training.optimizers import param_group


class Config(Group):
    """Settings ``fedpa.*``."""

    noise_dim: int = Field(64, ge=1, le=65_536, description="dimension of the noise ε")
    hidden_dim: int = Field(512, ge=1, le=65_536, description="width of the generator's hidden layer")
    generator_output: Literal["relu", "linear"] = Field(
        "relu", description="activation of the generator's output layer"
    )
    server_steps: int = Field(50, ge=1, le=1_000_000, description="Adam steps of the server per round")
    server_learning_rate: float = Field(
        1e-4, gt=0, description="learning rate of the server's Adam in the first round"
    )
    server_weight_decay: float = Field(0.01, ge=0, description="weight decay of the server's Adam")
    server_rate_decay: float = Field(
        0.98, gt=0, le=1, description="factor on the server's learning rate per round"
    )
    client_rate_decay: float = Field(
        0.99, gt=0, le=1, description="factor on the clients' learning-rate per round"
    )
    local_steps: int = Field(
        0, ge=0, description="training batches per round, instead of local-epochs; 0 is off"
    )
    adversarial_weight: float = Field(
        0.15, ge=0, description="weight of the term that pushes generated features away from the prototypes"
    )


def generation_weight(t: int) -> float:
    """Return a_t = max(1e-4, 25·0.98^t), t = 0 in the first round."""
    return max(1e-4, 25 * 0.98**t)


def prototype_weight(t: int) -> float:
    """Return b_t = max(0.15, 5·0.98^t)."""
    return max(0.15, 5 * 0.98**t)


def teaching_weights(counts: Tensor) -> Tensor:
    """Return ω (M, K) = (1 + n_kc)/Σ_k (1 + n_kc) for counts (M, K): each client's weight in G's loss, per class."""
    ones = 1 + counts.double()
    return (ones / ones.sum(0)).to(torch.float32)


def diversity(features: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
    """Return Div = exp(-mean over pairs of d_ε·d_h): near 1 if different noise gives the same features.

    d_ε is the mean squared, d_h the mean absolute difference of a pair; pairs with the same label count as zero.
    """
    apart = (labels.unsqueeze(0) != labels.unsqueeze(1)).to(features.dtype)  # (B, B)
    lengths = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist")
    noises = lengths.square() / noise.shape[1]
    distances = torch.cdist(features, features, p=1) / features.shape[1]
    return (-(noises * distances * apart)).mean().exp()


def generator_loss(
    features: Tensor,
    labels: Tensor,
    noise: Tensor,
    *,
    heads: Sequence[tuple[Tensor, Tensor]],
    teaching: Tensor,
    table: Prototypes | None,
    generation: float,
    adversarial: float,
) -> Tensor:
    """Return the generator's loss on a batch of its features; see the module.

    Args:
        features: (B, d) G(y, ε).
        labels: (B,) y.
        noise: (B, noise_dim) ε.
        heads: (weight, bias) of every uploaded network.
        teaching: (M, K) ω.
        table: P of the previous round, (K, d); None before the second round.
        generation: a_t.
        adversarial: weight of the distance to prototypes.
    """
    total = diversity(features, noise, labels)
    for (weight, bias), omega in zip(heads, teaching, strict=True):
        logits = nn.functional.linear(features, weight, bias)
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        total = total + generation * (omega[labels] * each).mean()
    if table is None or not bool((has_prototype := table.present[labels]).any()):
        return total
    away = nn.functional.mse_loss(features[has_prototype], table.values[labels[has_prototype]])
    return total - adversarial * away


def linear_head_of(weights: Weights) -> tuple[Tensor, Tensor]:
    """Return weight (K, d) and bias (K,) of the head among a network's tensors, with or without dropout before it."""
    head = {name.rpartition(".")[2]: t for name, t in weights.tensors.items() if name.startswith("head.")}
    return head["weight"], head["bias"]


class Upload(WeightsAndPrototypes):
    """Weights and prototypes; n_ij counts a sample in every epoch in which it was drawn."""

    def magnitudes(self) -> Magnitudes:
        """Return those of both; the report does not bound the number of samples."""
        return replace(super().magnitudes(), once=False)


@dataclass(frozen=True)
class FedPA(Method[GenerativeState, GeneratorBroadcast, Upload]):
    """See the module."""

    config: Config
    architecture: str
    shape: Shape
    batch_size: int
    weighting: Weighting = "samples"
    stale: Stale = "keep"
    name: str = "fedpa"
    same_architecture: bool = True

    state = GenerativeState
    down = GeneratorBroadcast
    up = Upload
    uses = frozenset({"stale"})

    def init(self, task: Task, seed: int) -> GenerativeState:
        """Return newly initialised weights and generator, which is not sent yet, and no prototypes."""
        nobody = Prototypes.empty(task.num_classes, task.feature_dim)
        weights = initial(self.architecture, task, seed, "all")
        seed = seeds.derive(seed, "generator")
        return initial_state(weights, self.shape, task, seed, used=False, prototypes=nobody)

    def broadcast(self, state: GenerativeState, client: int) -> GeneratorBroadcast:
        """Return weights, generator, the classes it was trained on, and prototypes."""
        return state.taught

    def install(self, client: Client, down: GeneratorBroadcast) -> None:
        """w_i <- w."""
        receive(client, down.weights, "all")

    def network(self, state: GenerativeState) -> Mapping[str, Tensor]:
        """Return w."""
        return state.taught.weights.tensors

    def local_update(self, client: Client, down: GeneratorBroadcast) -> Update[Upload]:
        """Train on cross-entropy over samples and generated features, and prototype regularisation."""
        self.install(client, down)
        K, d, t = client.task.num_classes, client.task.feature_dim, client.round - 1
        draw = sampler(self.shape, client, down, client.training.batch_size, by_batch=False)
        table = down.prototypes or Prototypes.empty(K, d)
        values, present = table.values.to(client.device), table.present.to(client.device)
        has_prototypes = table.num_present > 0
        a, b = generation_weight(t), prototype_weight(t)
        sums = ClassSums(K, d, client.device)

        def loss(inputs: Tensor, labels: Tensor, *generated: Tensor) -> dict[str, Tensor]:
            z, logits = forward(client.model, inputs)
            sums.add(z, labels)
            terms = {"ce": nn.functional.cross_entropy(logits, labels)}
            if generated:
                features, targets = generated
                scores: Tensor = client.model.head(features)
                terms["generated"] = a * nn.functional.cross_entropy(scores, targets)
            if has_prototypes:
                terms["regularizer"] = b * regularizer.prototype_regularizer(
                    z, labels, values, present, form="mse"
                )
            return terms

        steps = self.config.local_steps or None
        rate = client.training.learning_rate * self.config.client_rate_decay**t
        param_groups = [param_group(client.model, rate)]
        report = fit(client, loss, param_groups=param_groups, draw=draw, epochs=steps, max_steps=steps)
        upload = Upload(answer(client, "all"), Prototypes(*sums.means()))
        return Update(upload, report.optimizer, report.metrics())

    def aggregate(
        self, state: GenerativeState, uploads: Mapping[int, Upload], round_info: Round
    ) -> GenerativeState:
        """Average weights and prototypes, then train the generator against the clients' heads."""
        if not any(upload.prototypes.num_present for upload in uploads.values()):
            return state
        old = state.taught
        weights = average(old.weights, {i: up.weights for i, up in uploads.items()}, self.weighting)
        fresh = aggregation.weighted(upload.prototypes for upload in uploads.values())
        table, _ = aggregation.keep_stale(old.prototypes, fresh, mode=self.stale)
        network = self.shape.load(round_info.task, state.generator.tensors)
        heads = [linear_head_of(upload.weights) for upload in uploads.values()]
        counts = [n for upload in uploads.values() if (n := upload.prototypes.counts) is not None]
        teaching = teaching_weights(torch.stack(counts))
        random = seeds.generator(round_info.seed, "fedpa", round_info.number)
        config, t = self.config, round_info.number - 1

        def loss(network: FeatureGenerator) -> Tensor:
            features, labels, noise = network.draw(fresh.present.long(), max(2, self.batch_size), random)
            return generator_loss(
                features,
                labels,
                noise,
                heads=heads,
                teaching=teaching,
                table=old.prototypes,
                generation=generation_weight(t),
                adversarial=config.adversarial_weight,
            )

        rate = config.server_learning_rate * config.server_rate_decay**t
        generator, mean_loss = train_generator(
            state.generator, network, loss, config.server_steps, rate, config.server_weight_decay
        )
        generated = torch.maximum(old.label_counts, fresh.present.long())
        taught = GeneratorBroadcast(weights, Weights(generator.tensors), generated, table)
        return replace(state, taught=taught, generator=generator, loss=mean_loss)

    def validate(self, upload: Upload, state: GenerativeState, task: Task) -> None:
        """Check the network's tensors, and that rows of width d come with counts."""
        check_both(upload, state.taught.weights, task, counted=True)

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that there is one architecture, with a linear head."""
        super().check(task, [self.architecture, *architectures])
        check_heads(self.name, task, [self.architecture, *architectures])

    def report(self, state: GenerativeState) -> dict[str, float]:
        """The generator's loss."""
        return state.report()

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·|w| + M·|G| + Σ_i [(K_i + K)·d + K_i]; the last K_i are the counts."""
        M, K, d = len(class_counts), task.num_classes, task.feature_dim
        scalars = shared_scalars(self.architecture, task, M, "all") + M * self.shape.parameters(task)
        return scalars + sum((classes + K) * d + classes for classes in class_counts)


def build(settings: Settings) -> FedPA:
    """Return the method."""
    config = parse_section(Config, settings)
    return FedPA(
        config,
        architectures(settings.models.models, settings.code)[0],
        Shape(config.noise_dim, config.hidden_dim, config.generator_output == "relu"),
        settings.training.batch_size,
        weighting_of(settings, "samples"),
        settings.prototypes.stale,
    )
