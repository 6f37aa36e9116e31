"""FedGen: the classifier is averaged, and trained on features from a generator that the server trains.

Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, in the form that
shares the classifier only.

Round: each client copies the global head φ and minimises CE(g(f(x)), y) + CE(g(G(ŷ, ε)), ŷ) over body and head, ŷ
drawn from the labels of all clients; G is not changed. The server averages the heads and trains G for S steps of Adam
on CE(Σ_i (n_i/Σn)·g_i(G(ŷ, ε)), ŷ); heads are linear, so that sum is the averaged head.
Travels: down the head, the generator and the federation's label counts; up the head, n_i and the client's label
counts, which the server thus learns.
Predicts: the logits of the client's own body under the head that was just broadcast, before local training.
Differs from the paper: no diversity term, no distillation from the generator, no annealing, and in G's loss clients
are weighted by n_i instead of their share of each label, as in HtFLlib; the paper shares the whole network.
Differs from the reference: training of the generator and its optimiser continues from round to round, and clients use
the generator once it was trained. HtFLlib's present code never saves it, so that clients only ever see the initial one
(fedgen.persist = false does the same from the second round on, when the label counts are known). The rate 0.1 of its
scripts is unstable for a generator that is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Moment, Round, Update
from pbfl_flwr.methods.averaging import Weighting, average, same_shapes, weighting_of
from pbfl_flwr.methods.generative.generators import (
    FeatureGenerator,
    GenerativeState,
    GeneratorBroadcast,
    Shape,
    initial_state,
    sampler,
    train_generator,
)
from pbfl_flwr.methods.sharing import answer, check_heads, initial, receive
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import Magnitudes, Weights, class_counts, joined, part_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import complete_batches, fit, forward


class Config(Group):
    """Settings ``fedgen.*``."""

    noise_dim: int = Field(32, ge=1, le=65_536, description="dimension of the noise ε")
    hidden_dim: int = Field(512, ge=1, le=65_536, description="width of the generator's hidden layer")
    server_steps: int = Field(100, ge=1, le=1_000_000, description="S, Adam steps of the server per round")
    server_learning_rate: float = Field(0.005, gt=0, description="learning rate of the server's Adam")
    persist: bool = Field(
        True, description="keep the trained generator; false: clients always get the initial one"
    )


@dataclass(frozen=True)
class LabelledHead:
    """A client's upload.

    Attributes:
        weights: its head and n_i.
        label_counts: (K,) int64 n_ij.
    """

    weights: Weights
    label_counts: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the head under ``weights.`` and the counts; see :class:`pbfl_flwr.payloads.Payload`."""
        return {**joined(weights=self.weights), "label-counts": self.label_counts}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> LabelledHead:
        """Rebuild the payload; see :class:`pbfl_flwr.payloads.Payload`."""
        return cls(
            Weights.from_tensors(part_of(tensors, "weights"), task),
            class_counts(tensors, "label-counts", task),
        )

    def scalars(self) -> int:
        """Return the head's scalars; the papers do not count label counts."""
        return self.weights.scalars()

    def classes(self, task: Task) -> None:
        """Return None: the head is not organised by class."""
        return None

    def magnitudes(self) -> Magnitudes:
        """Return the head's sizes, and the larger of n_i and the sum of the n_ij."""
        head = self.weights.magnitudes()
        return replace(head, samples=max(head.samples, int(self.label_counts.sum())))


@dataclass(frozen=True)
class FedGen(Method[GenerativeState, GeneratorBroadcast, LabelledHead]):
    """See the module."""

    config: Config
    architecture: str
    shape: Shape
    batch_size: int
    weighting: Weighting = "samples"
    name: str = "fedgen"
    moment: Moment = "before"

    state = GenerativeState
    down = GeneratorBroadcast
    up = LabelledHead

    def init(self, task: Task, seed: int) -> GenerativeState:
        """Return a newly initialised head and generator."""
        head = initial(self.architecture, task, seed, "head")
        return initial_state(
            head, self.shape, task, seeds.derive(seed, "generator"), used=not self.config.persist
        )

    def broadcast(self, state: GenerativeState, client: int) -> GeneratorBroadcast:
        """Head, generator, label counts."""
        return state.taught

    def install(self, client: Client, down: GeneratorBroadcast) -> None:
        """Head <- φ."""
        receive(client, down.weights, "head")

    def local_update(self, client: Client, down: GeneratorBroadcast) -> Update[LabelledHead]:
        """Train on cross-entropy over the client's samples and over generated features."""
        self.install(client, down)
        draw = sampler(self.shape, client, down, client.training.batch_size)

        def loss(inputs: Tensor, labels: Tensor, *generated: Tensor) -> dict[str, Tensor]:
            terms = {"ce": nn.functional.cross_entropy(forward(client.model, inputs)[1], labels)}
            if generated:
                features, targets = generated
                scores: Tensor = client.model.head(features)
                terms["generated"] = nn.functional.cross_entropy(scores, targets)
            return terms

        report = fit(client, loss, draw=draw)
        labels = complete_batches(client).labels.cpu()
        upload = LabelledHead(answer(client, "head"), labels.bincount(minlength=client.task.num_classes))
        return Update(upload, report.optimizer, report.metrics())

    def aggregate(
        self, state: GenerativeState, uploads: Mapping[int, LabelledHead], round_info: Round
    ) -> GenerativeState:
        """Average the heads, then train the generator against the average."""
        heads = {client: upload.weights for client, upload in uploads.items()}
        head = average(state.taught.weights, heads, self.weighting)
        clients = {**state.clients, **{client: upload.label_counts for client, upload in uploads.items()}}
        counts = torch.stack([*clients.values()]).sum(0) if clients else state.taught.label_counts
        taught = replace(state.taught, weights=head, label_counts=counts)
        if not self.config.persist or not bool(counts.any()):
            return replace(state, taught=taught, clients=clients)
        random = seeds.generator(round_info.seed, "fedgen", round_info.number)

        def loss(network: FeatureGenerator) -> Tensor:
            features, labels, _ = network.draw(counts, max(2, self.batch_size), random)  # two for BatchNorm
            logits = nn.functional.linear(features, head.tensors["head.weight"], head.tensors["head.bias"])
            return nn.functional.cross_entropy(logits, labels)

        network = self.shape.load(round_info.task, state.generator.tensors)
        generator, mean_loss = train_generator(
            state.generator, network, loss, self.config.server_steps, self.config.server_learning_rate
        )
        return GenerativeState(
            replace(taught, generator=Weights(generator.tensors)), generator, clients, mean_loss
        )

    def validate(self, upload: LabelledHead, state: GenerativeState, task: Task) -> None:
        """Check that names and shapes of the tensors are those of the head."""
        same_shapes(upload.weights, state.taught.weights)

    def report(self, state: GenerativeState) -> dict[str, float]:
        """The generator's loss."""
        return state.report()

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that all heads are linear."""
        check_heads(self.name, task, [self.architecture, *architectures])

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """M·(2·|φ| + |Θ|), |φ| = K·d + K."""
        return float(
            len(class_counts) * (2 * task.num_classes * (task.feature_dim + 1) + self.shape.parameters(task))
        )


def build(settings: Settings) -> FedGen:
    """Return the method."""
    config = parse_section(Config, settings)
    return FedGen(
        config,
        architectures(settings.models.models, settings.code)[0],
        Shape(config.noise_dim, config.hidden_dim),
        settings.training.batch_size,
        weighting_of(settings, "samples"),
    )
