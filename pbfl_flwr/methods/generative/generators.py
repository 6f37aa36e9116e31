"""Generators of features for labels, trained on the server: G(y, ε) -> (B, d).

Their state is a payload: parameters and BatchNorm statistics, plus the optimiser's moments where training continues
from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client
from pbfl_flwr.methods.averaging import copies
from pbfl_flwr.payloads import Prototypes, Weights, class_counts, joined, part_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.optimizers import Adam, param_group


class FeatureGenerator(nn.Module):
    """[ε, one-hot(y)] -> Linear -> BatchNorm -> ReLU -> Linear -> d; ε is uniform on [0, 1).

    (noise + K)·hidden + 3·hidden + (hidden + 1)·d parameters.

    Args:
        num_classes: K.
        feature_dim: d.
        noise_dim: width of ε.
        hidden_dim: width of the hidden layer.
        positive: end in a ReLU, for non-negative features.
    """

    def __init__(
        self, num_classes: int, feature_dim: int, noise_dim: int, hidden_dim: int, positive: bool = False
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.noise_dim = noise_dim
        self.positive = positive
        self.hidden = nn.Sequential(
            nn.Linear(noise_dim + num_classes, hidden_dim), nn.BatchNorm1d(hidden_dim), nn.ReLU()
        )
        self.output = nn.Linear(hidden_dim, feature_dim)

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Return features (B, d) for labels (B,) and noise (B, noise_dim)."""
        onehot = nn.functional.one_hot(labels, self.num_classes).to(noise.dtype)
        features: Tensor = self.output(self.hidden(torch.cat([noise, onehot], dim=1)))
        return features.relu() if self.positive else features

    def draw(self, counts: Tensor, size: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return features (B, d) on the generator's device, and their labels (B,) and noise (B, noise_dim).

        Labels and noise are drawn on the CPU.

        Args:
            counts: (K,), relative frequencies of the labels.
            size: B.
            random: CPU generator.
        """
        device = self.output.weight.device
        labels = torch.multinomial(counts.double(), size, replacement=True, generator=random).to(device)
        noise = torch.rand(size, self.noise_dim, generator=random).to(device)
        return self(labels, noise), labels, noise


@dataclass(frozen=True)
class Shape:
    """Settings of a generator that clients and server share.

    Attributes:
        noise_dim: width of ε.
        hidden_dim: width of the hidden layer.
        positive: whether features are non-negative.
    """

    noise_dim: int
    hidden_dim: int
    positive: bool = False

    def build(self, task: Task, seed: int = 0) -> FeatureGenerator:
        """Return a newly initialised generator; the global random state is restored."""
        with seeds.seeded(seed):
            return FeatureGenerator(
                task.num_classes, task.feature_dim, self.noise_dim, self.hidden_dim, self.positive
            )

    def load(self, task: Task, tensors: Mapping[str, Tensor]) -> FeatureGenerator:
        """Return the generator with the given tensors, as :func:`tensors_of` returns them.

        Raises:
            PbflError: if names or shapes do not match.
        """
        network = self.build(task)
        expected = {name: tuple(tensor.shape) for name, tensor in tensors_of(network).items()}
        if expected != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise PbflError("the received generator does not have the configured shape")
        network.load_state_dict(dict(tensors), strict=False)  # counters of BatchNorm do not travel
        return network

    def parameters(self, task: Task) -> int:
        """Return |Θ|, parameters without buffers."""
        return sum(parameter.numel() for parameter in self.build(task).parameters())


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters and of BatchNorm's running mean and variance, without its counters."""
    return copies({name: t for name, t in network.state_dict().items() if t.is_floating_point()})


@dataclass(frozen=True)
class GeneratorState:
    """A generator in training.

    Attributes:
        tensors: parameters and BatchNorm statistics, see :func:`tensors_of`.
        moments: Adam's, as ``<parameter>.exp_avg``, ``.exp_avg_sq`` and ``.step``; empty before the first training.
    """

    tensors: Mapping[str, Tensor]
    moments: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        """Whether it has been trained at least once."""
        return bool(self.moments)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        return joined(network=Weights(self.tensors), moments=Weights(self.moments))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> GeneratorState:
        """Rebuild the state of a checkpoint."""
        network = Weights.from_tensors(part_of(tensors, "network"), task)
        return cls(network.tensors, Weights.from_tensors(part_of(tensors, "moments"), task).tensors)


def train_generator(
    state: GeneratorState,
    network: FeatureGenerator,
    loss: Callable[[FeatureGenerator], Tensor],
    steps: int,
    learning_rate: float,
    weight_decay: float = 0.0,
) -> tuple[GeneratorState, float]:
    """Train a generator with Adam, whose moments are kept from round to round; return the new state and the mean loss.

    Args:
        state: not changed.
        network: loaded from the state; changed in place.
        loss: computes the loss of one step, on samples that it draws itself.
        steps: optimiser steps.
        learning_rate: η.
        weight_decay: L2 penalty.

    Raises:
        PbflError: if the loss is not finite.
    """
    named = dict(network.named_parameters())
    earlier_moments = {
        parameter: {key: tensor.clone() for key, tensor in moments.items()}
        for name, parameter in named.items()
        if (moments := part_of(state.moments, name))
    }
    optimizer = Adam([param_group(network)], learning_rate, weight_decay, state=earlier_moments, fused=False)
    network.train()
    total = 0.0
    for _ in range(steps):
        value = loss(network)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        optimizer.step()
        total += float(value.detach())
    if not torch.isfinite(torch.tensor(total)):
        raise PbflError("the server's generator diverged: its loss is not finite; lower its learning rate")
    moments = {
        f"{name}.{key}": tensor.detach().clone()
        for name, parameter in named.items()
        for key, tensor in optimizer.state[parameter].items()
    }
    return GeneratorState(tensors_of(network), moments), total / steps


@dataclass(frozen=True)
class GeneratorBroadcast:
    """What a client receives: weights, and a generator with the distribution of labels to draw.

    Attributes:
        weights: the shared part of the network.
        generator: its tensors, see :func:`tensors_of`; empty while clients are not to use it.
        label_counts: (K,) int64, relative frequencies of the labels to draw.
        prototypes: global prototypes, or None if the method has none.
    """

    weights: Weights
    generator: Weights
    label_counts: Tensor
    prototypes: Prototypes | None = None

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        table = {} if self.prototypes is None else joined(prototypes=self.prototypes)
        sent = joined(weights=self.weights, generator=self.generator)
        return {**sent, **table, "label-counts": self.label_counts}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> GeneratorBroadcast:
        """Rebuild the payload; see :class:`pbfl_flwr.payloads.Payload`."""
        table = part_of(tensors, "prototypes")
        return cls(
            Weights.from_tensors(part_of(tensors, "weights"), task),
            Weights.from_tensors(part_of(tensors, "generator"), task),
            class_counts(tensors, "label-counts", task),
            Prototypes.from_tensors(table, task) if table else None,
        )

    def scalars(self) -> int:
        """Return the scalars of weights, generator and prototypes; the papers do not count label counts."""
        table = 0 if self.prototypes is None else self.prototypes.scalars()
        return self.weights.scalars() + self.generator.scalars() + table


@dataclass(frozen=True)
class GenerativeState:
    """The server's state.

    Attributes:
        taught: the next broadcast.
        generator: the generator in training.
        clients: client -> its label counts, as last reported; empty if the method does not keep them.
        loss: mean loss of the last training.
    """

    taught: GeneratorBroadcast
    generator: GeneratorState
    clients: Mapping[int, Tensor] = field(default_factory=dict)
    loss: float = 0.0

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        counts = {f"client.{client}": tensor for client, tensor in self.clients.items()}
        parts = joined(taught=self.taught, generator=self.generator)
        return {**parts, **counts, "loss": torch.tensor(self.loss, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> GenerativeState:
        """Rebuild the state of a checkpoint."""
        clients = {int(client): counts for client, counts in part_of(tensors, "client").items()}
        return cls(
            GeneratorBroadcast.from_tensors(part_of(tensors, "taught"), task),
            GeneratorState.from_tensors(part_of(tensors, "generator"), task),
            dict(sorted(clients.items())),
            float(tensors["loss"]),
        )

    def report(self) -> dict[str, float]:
        """Return the server's metrics for the log."""
        return {"generator-loss": self.loss} if self.generator.trained else {}


def initial_state(
    weights: Weights, shape: Shape, task: Task, seed: int, *, used: bool, prototypes: Prototypes | None = None
) -> GenerativeState:
    """Return the state before round 1.

    Args:
        weights: the shared part of a newly initialised network.
        shape: of the generator.
        task: K and d.
        seed: of the generator.
        used: whether clients use the generator before its first training.
        prototypes: an empty table, or None if the method has none.
    """
    tensors = tensors_of(shape.build(task, seed))
    nothing = torch.zeros(task.num_classes, dtype=torch.int64)
    return GenerativeState(
        GeneratorBroadcast(weights, Weights(tensors if used else {}), nothing, prototypes),
        GeneratorState(tensors),
    )


Sampler = Callable[[], tuple[Tensor, Tensor]]


def sampler(
    shape: Shape, client: Client, taught: GeneratorBroadcast, size: int, *, by_batch: bool = True
) -> Sampler | None:
    """Return a function that draws ``size`` features (size, d), detached, and labels on the client's device.

    Args:
        shape: of the generator.
        client: provides the device and the random generator.
        taught: the generator, and the distribution of labels to draw.
        size: features per draw.
        by_batch: whether BatchNorm uses the statistics of the drawn batch, as in FedGen's reference, or its running
            statistics, as in FedPA's. A batch of one always uses running statistics.

    Returns:
        None if the client has no generator, or all label counts are 0.
    """
    if not taught.generator.tensors or not bool(taught.label_counts.any()):
        return None
    network = shape.load(client.task, taught.generator.tensors).to(client.device)
    network.train(by_batch and size > 1)
    random = client.generator("generator")

    @torch.no_grad()
    def draw() -> tuple[Tensor, Tensor]:
        features, labels, _ = network.draw(taught.label_counts, size, random)
        return features, labels

    return draw
