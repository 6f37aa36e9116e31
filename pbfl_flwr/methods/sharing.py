"""Shared code of methods whose server averages weights.

::

    server   w ----------------------------------------------------------> every client
    client   shared part of the network <- w, train, send the shared part and n_i
    server   w <- Σ_i (n_i/Σn)·w_i   (or the unweighted mean)

Such a method is defined by the part of the network that is shared (all, body, stages or head) and by how a client
trains, :meth:`SharedWeights.train`. The rest of a client's network, including BatchNorm's buffers,
stays on the client and persists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from pbfl_flwr.config import Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method, Moment, Round, Update
from pbfl_flwr.methods.averaging import (
    Part,
    Weighting,
    average,
    copies,
    copy_into,
    same_shapes,
    shared_parameters,
    weighting_of,
)
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.registry import ModelName, architectures, without_weights
from pbfl_flwr.payloads import RejectedPayload, Weights, WeightsAndPrototypes
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import FitReport, classification, fit
from pbfl_flwr.util.user_code import UserCode, is_external


def receive(client: Client, received: Weights, part: Part) -> None:
    """Copy the broadcast weights into the shared part of the client's network."""
    copy_into(shared_parameters(client.model, part), received.tensors)


def answer(client: Client, part: Part) -> Weights:
    """Return copies of the shared part, and n_i."""
    return Weights(copies(shared_parameters(client.model, part)), len(client.data.train.labels))


def initial(architecture: str, task: Task, seed: int, part: Part) -> Weights:
    """Return the shared part of a newly initialised network, pretrained if its name has a label.

    Args:
        architecture: the network's name.
        task: what all clients agree on.
        seed: of the run.
        part: the part.
    """
    name = without_weights(architecture) if part == "head" else architecture  # only bodies can be pretrained
    return Weights(copies(shared_parameters(build_model(name, task, seed), part)))


def check_heads(method: str, task: Task, models: Sequence[str], *, linear: bool = True) -> None:
    """Check that heads can be exchanged between all architectures.

    A client's own code that is not this process's own is not looked at: the client checks it itself in the handshake,
    and its uploads are checked like all others.

    Args:
        method: its name.
        task: with d and K.
        models: architectures of the server and of the clients.
        linear: whether the head must be one linear layer from d to K, not just the same everywhere.

    Raises:
        PbflError: naming the method, the architecture and the tensors of its head.
    """
    names = [name for name in dict.fromkeys(models) if isinstance(name, UserCode) or not is_external(name)]
    if not any(is_external(name) or ModelName.parse(name).widths for name in names):
        return  # all heads are one linear layer
    found = {name: _built(name, task) for name in names}
    shapes = {
        name: {key: tuple(tensor.shape) for key, tensor in shared_parameters(model, "head").items()}
        for name, model in found.items()
    }
    expected = next(iter(shapes.values()))
    if linear:
        expected = {"head.weight": (task.num_classes, task.feature_dim), "head.bias": (task.num_classes,)}
    for name, shapes_of_head in shapes.items():
        if shapes_of_head != expected:
            raise PbflError(
                f"method '{method}' exchanges classifiers and needs the classifier {_tensors(expected)} in every "
                f"model, found {_tensors(shapes_of_head)} in '{name}'"
            )
        if linear and is_external(name) and not _is_linear(found[name], task):
            raise PbflError(
                f"method '{method}' exchanges classifiers and needs a linear one in every model; that of '{name}' "
                "computes something else than features·weightᵀ + bias"
            )


def _built(name: str, task: Task) -> SplitModel:
    # On "meta", without memory: a client may name layers of any width.
    with nullcontext() if is_external(name) else torch.device("meta"):
        return build_model(without_weights(name), task, 0)


def _is_linear(model: SplitModel, task: Task) -> bool:
    """Whether a classifier with the tensors of a linear layer computes, but for dropout, what one does."""
    sent = shared_parameters(model, "head")
    weight, bias = sent["head.weight"], sent["head.bias"]
    features = torch.randn(8, task.feature_dim, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        linear = nn.functional.linear(features, weight, bias)
        return torch.allclose(model.head.eval()(features), linear, rtol=1e-3, atol=1e-4)


def _tensors(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def to_be_equal(models: Sequence[str], part: Part) -> Sequence[str]:
    """Return the part of each architecture's name that must be the same everywhere: no classifier if it is private.

    Args:
        models: names of architectures.
        part: the part that travels.
    """
    if part == "all":
        return models
    return [str(replace(ModelName.parse(name), widths=())) for name in models]


def check_both(upload: WeightsAndPrototypes, weights: Weights, task: Task, *, counted: bool = False) -> None:
    """Check that an upload has the tensors of these weights, and class vectors of width d.

    Args:
        upload: of a client.
        weights: of the server's state.
        task: with d.
        counted: whether the vectors must come with n_ij.

    Raises:
        RejectedPayload: naming what is wrong.
    """
    same_shapes(upload.weights, weights)
    if (width := upload.prototypes.values.shape[1]) != task.feature_dim:
        raise RejectedPayload(f"prototypes are {width} wide, expected {task.feature_dim}")
    if counted and upload.prototypes.counts is None:
        raise RejectedPayload("prototypes lack their counts")


def shared_scalars(architecture: str, task: Task, num_clients: int, part: Part) -> float:
    """Return 2·M·|shared part|: down and up, all clients, biases counted.

    Args:
        architecture: the network's name.
        task: what all clients agree on.
        num_clients: M.
        part: the part.
    """
    shared = shared_parameters(build_model(without_weights(architecture), task, 0), part)
    return float(2 * num_clients * sum(parameter.numel() for parameter in shared.values()))


class AveragedWeights(Method[Weights, Weights, Weights]):
    """The server's half of a method whose state, broadcast and uploads are weights of one network or a part of it.

    Attributes:
        weighting: how the average is weighted.
    """

    weighting: Weighting

    state = Weights
    down = Weights
    up = Weights

    def aggregate(self, state: Weights, uploads: Mapping[int, Weights], round_info: Round) -> Weights:
        """Average the uploads."""
        return average(state, uploads, self.weighting)

    def streams(self) -> bool:
        """True: it is a weighted sum."""
        return True

    def validate(self, upload: Weights, state: Weights, task: Task) -> None:
        """Check that names and shapes of the tensors are those of the state."""
        same_shapes(upload, state)


@dataclass(frozen=True)
class SharedWeights(AveragedWeights):
    """A method that averages a part of the network.

    Attributes:
        name: its name in METHODS.
        architecture: the network whose initial weights the server starts from.
        part: the part that travels.
        weighting: how the average is weighted.
        moment: when the reference scores a client; "before" is with the weights just broadcast.
        same_architecture: False only if the shared part is the same in different networks.
        keeps_nothing: see :class:`pbfl_flwr.method.Method`.
    """

    name: str
    architecture: str
    part: Part
    weighting: Weighting = "samples"
    moment: Moment = "before"
    same_architecture: bool = True
    keeps_nothing: bool = False

    @classmethod
    def configured(cls, name: str, settings: Settings, part: Part = "all", **own: Any) -> Self:
        """Return the method under a run's settings; ``own`` are further attributes."""
        architecture = architectures(settings.models.models, settings.code)[0]
        return cls(name, architecture, part, weighting=weighting_of(settings, "samples"), **own)

    def init(self, task: Task, seed: int) -> Weights:
        """Return the shared part of a newly initialised network."""
        return initial(self.architecture, task, seed, self.part)

    def install(self, client: Client, down: Weights) -> None:
        """Shared part <- w."""
        receive(client, down, self.part)

    def network(self, state: Weights) -> Mapping[str, Tensor]:
        """Return w if the whole network is shared."""
        return state.tensors if self.part == "all" else {}

    def train(self, client: Client, received: Weights) -> FitReport:
        """Train the client's network, which already holds the broadcast weights; by default on cross-entropy."""
        return fit(client, classification(client.model))

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """Shared part <- w, train, send the shared part."""
        self.install(client, down)
        report = self.train(client, down)
        return Update(answer(client, self.part), report.optimizer, report.metrics())

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that the shared part is not empty and the architecture the same (any classifier if it is private)."""
        super().check(task, to_be_equal([self.architecture, *architectures], self.part))
        if not initial(self.architecture, task, 0, self.part).tensors:
            raise PbflError(
                f"method '{self.name}' shares the {self.part} of a network, and '{self.architecture}' has none; "
                "must be 'body' or another model"
            )

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·|shared part|."""
        return shared_scalars(self.architecture, task, len(class_counts), self.part)
