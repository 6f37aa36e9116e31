"""The interface that every method implements: both halves of a round, and how it predicts, in one module.

::

    server   init(task) ----> state --broadcast--> Down
    client                                          |-> local_update(client, down) -> Up, memory
                                                    |-> predictors(client, down) -> {name: features, logits -> scores}
    server   state <--------- aggregate(state, uploads, round_info)

State is passed in and returned, never through file names, globals or mutation. The only object changed in place is
``client.model``, the network into which the client's own weights were copied for this update; the caller stores it
afterwards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.config import EvaluationSettings, Scalar, TrainingSettings
from pbfl_flwr.config.keys import Moment as Moment
from pbfl_flwr.data import ClientData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.payloads import Payload, Serializable, Upload
from pbfl_flwr.task import Task
from pbfl_flwr.util.cuda_graph import Recordings

StateT = TypeVar("StateT", bound=Serializable)
DownT = TypeVar("DownT", bound=Payload)
UpT = TypeVar("UpT", bound=Upload)
UpT_co = TypeVar("UpT_co", bound=Payload, covariant=True)


@dataclass(frozen=True, eq=False)
class WithInputs:
    """A predictor that reads inputs too, since another network than the client's own takes part.

    Attributes:
        scores: (inputs (B, ...), normalised and on the client's device, features (B, d), logits (B, K)) -> finite
            scores (B, K).
    """

    scores: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, inputs: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        """Return the scores (B, K)."""
        return self.scores(inputs, features, logits)


Predictor = Callable[..., Tensor]
"""(features (B, d), logits (B, K)) -> finite scores (B, K); the class with the highest score is predicted.

A sample's scores must not depend on the rest of its batch: its size is a device's choice, and a GPU's last one is
filled up with more of the shard. One that is a :class:`WithInputs` gets the inputs as well. What it reads must not be
changed in place: the other predictors read the same tensors.
"""

EXCLUDED = -1e30
"""Score of a class that may not be predicted: finite, because scores must be finite."""


@dataclass(frozen=True)
class Round:
    """The server's view of the current round.

    Attributes:
        number: of the round, from 1.
        task: what all clients agree on.
        num_clients: M, all clients that have joined so far, whether or not they answered. If devices join a running
            federation (``min-clients``), ids may be larger.
        seed: the run's seed.
        expected: number of clients the configuration is for, including those that may still join; None means M.
    """

    number: int
    task: Task
    num_clients: int
    seed: int = 0
    expected: int | None = None

    @property
    def configured_clients(self) -> int:
        """Number of clients for settings that depend on it, regardless of how many have joined."""
        return self.expected or self.num_clients


@dataclass(frozen=True)
class Client:
    """A client during one update: its data, its network, and its memory.

    Attributes:
        id: 0..M-1, stable over the run.
        round: the server's round number, from 1.
        task: what all clients agree on.
        model: this client's network on its device; ``features(x)`` and ``head(features)``.
        data: its training, test and validation shards.
        training: settings of the local training.
        evaluation: settings of the evaluation.
        seed: the run's seed; use :meth:`generator` rather than this.
        memory: tensors, on the CPU, that the method kept from this client's last participation; empty at first.
        name: "" unless the client has one; its seeds then depend on the name and not on who else takes part.
        recordings: where ``cuda-graphs`` records its training steps.
    """

    id: int
    round: int
    task: Task
    model: SplitModel
    data: ClientData
    training: TrainingSettings = field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    seed: int = 0
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    name: str = ""
    recordings: Recordings = field(default_factory=Recordings, repr=False, compare=False)

    @property
    def key(self) -> int | str:
        """What this client's seeds depend on: its name, or its id if it has none."""
        return self.name or self.id

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.model.parameters()).device

    def generator(self, purpose: str) -> torch.Generator:
        """Return a CPU random generator seeded by run, client, round and purpose only."""
        return seeds.generator(self.seed, purpose, self.key, self.round)


@dataclass(frozen=True)
class Update(Generic[UpT_co]):
    """The result of a client's local update.

    Attributes:
        payload: sent to the server.
        memory: kept on the client until its next participation (safetensors on its disk).
        metrics: numbers for the round's log, e.g. the mean of every loss term.
    """

    payload: UpT_co
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Method(ABC, Generic[StateT, DownT, UpT]):
    """A federated learning method. Subclasses are immutable: they hold settings, never state.

    A subclass gives ``name``, ``state``, ``down``, ``up`` and ::

        init, local_update, aggregate

    and may override, where the default in brackets is not right, ::

        broadcast                 the payload for one client                        [the state]
        install                   the broadcast into the network, before scoring    [nothing]
        predictors                how a client predicts                             [its head]
        validate                  one upload against the state                      [anything of type up]
        check                     task and architectures before round 1             [of same_architecture]
        streams                   whether aggregate reads one upload at a time      [no]
        resumed                   the state with which to resume                    [the state]
        network                   the complete network on the server                [none]
        auxiliary_architectures   networks that every client builds besides its own [none]
        report, warnings          metrics and warnings for the round's log          [none]
        server_device             where the server's half computes                  [cpu]
        paper_scalars             the papers' cost                                  [undefined]

    Attributes:
        name: its name in METHODS.
        state, down, up: types of the server's state, the broadcast and the upload.
        primary_predictor: the predictor the paper reports.
        predicts: all names that :meth:`predictors` may return; besides those of
            :data:`pbfl_flwr.config.PREDICTORS` a method may have some of its own.
        moment: when the paper scores a client, relative to its local training.
        same_architecture: whether all clients need the same network.
        keeps_nothing: whether the broadcast is all of a client's network but its buffers, so that a client with neither
            buffers nor memory needs no state of its own.
        unit_features: whether the head expects features of unit length.
        uses: keys of the groups ``prototypes`` and ``privacy`` that it honours, of those that not every method does
            (:class:`pbfl_flwr.config.parsing.Concerns`); the others are refused.
    """

    name: str
    state: type[StateT]
    down: type[DownT]
    up: type[UpT]
    primary_predictor: str = "head"
    predicts: tuple[str, ...] = ("head",)
    moment: Moment = "after"
    same_architecture: bool = False
    keeps_nothing: bool = False
    unit_features: bool = False
    uses: frozenset[str] = frozenset()

    @abstractmethod
    def init(self, task: Task, seed: int) -> StateT:
        """Return the server's state before round 1."""

    def broadcast(self, state: StateT, client: int) -> DownT:
        """Return the payload for one client; by default the state itself.

        Raises:
            TypeError: if the state is not of type ``down`` and the subclass does not override this.
        """
        if not isinstance(state, self.down):
            raise TypeError(
                f"{type(self).__name__} must override broadcast() to turn its state into {self.down.__name__}"
            )
        return state

    def resumed(self, state: StateT) -> StateT:
        """Return the state with which to resume from a checkpoint; clients may have lost their memory since."""
        return state

    @abstractmethod
    def local_update(self, client: Client, down: DownT) -> Update[UpT]:
        """Train the client's network in place and return the upload and the new memory.

        The broadcast must not be changed: other clients of the process get the same tensors.
        """

    @abstractmethod
    def aggregate(self, state: StateT, uploads: Mapping[int, UpT], round_info: Round) -> StateT:
        """Return the new state; ``uploads`` come in ascending client order and are already validated.

        The old state and the uploads must not be changed. If the method :meth:`streams`, an upload is decoded at each
        access and not kept.
        """

    @property
    def server_device(self) -> str:
        """The type of device on which the server's half computes; that it is there is checked before round 1."""
        return "cpu"

    def streams(self) -> bool:
        """Whether :meth:`aggregate` reads one upload at a time, so that only a few are in memory."""
        return False

    def install(self, client: Client, down: DownT) -> None:
        """Copy the broadcast into the client's network, for scoring before local training."""

    def predictors(self, client: Client, down: DownT) -> dict[str, Predictor]:
        """Return the predictors available now, by name; ``predicts`` lists all possible names."""
        return {"head": head_scores}

    def auxiliary_architectures(self) -> tuple[str, ...]:
        """Return the architectures of networks that every client builds besides its own; by default none."""
        return ()

    def network(self, state: StateT) -> Mapping[str, Tensor]:
        """Return the parameters of the complete network on the server, by name; empty if there is none."""
        return {}

    def validate(self, upload: UpT, state: StateT, task: Task) -> None:
        """Check one upload against the state.

        Raises:
            RejectedPayload: if it cannot be aggregated; the text says why.
        """

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check before round 1 that the method fits the task and the clients' architectures.

        Raises:
            PbflError: naming the method, what was found and what it needs.
        """
        different = sorted(set(architectures))
        if self.same_architecture and len(different) > 1:
            raise PbflError(
                f"method '{self.name}' averages weights and needs one architecture on all clients, "
                f"found {', '.join(different)}; set models to one of them, which on a device its own model replaces"
            )

    def report(self, state: StateT) -> dict[str, float]:
        """Return the server's metrics for the round's log."""
        return {}

    def warnings(self, num_rounds: int, state: StateT | None = None) -> list[str]:
        """Return warnings; empty if there are none.

        Args:
            num_rounds: of the run.
            state: after a round, about whose server's half the warnings are; None before the run, about its settings.
        """
        return []

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float | None:
        """Return the papers' cost: scalars per round, both directions, summed over all clients; None if undefined.

        Args:
            task: gives K and d.
            class_counts: K_i of every client, before the train/test split.
        """
        return None


def settings_in(method: object) -> dict[str, Scalar]:
    """Return the settings of a method as it was built, where it has decided what "auto" stands for.

    These are the attributes in its repr that are numbers, texts or booleans, and those of groups among them, under
    ``<group>.<attribute>``; none for a method that is no dataclass.
    """
    if isinstance(method, BaseModel):
        attributes = dict(method)
    elif is_dataclass(method):
        attributes = {one.name: getattr(method, one.name) for one in fields(method) if one.repr}
    else:
        return {}
    settings: dict[str, Scalar] = {}
    for name, value in attributes.items():
        if isinstance(value, (bool, int, float, str)):
            finite = not isinstance(value, float) or math.isfinite(value)
            settings[name] = value if finite else str(value)  # JSON has no infinity
        settings |= {f"{name}.{inner}": setting for inner, setting in settings_in(value).items()}
    return settings


def resolved_moment(settings: EvaluationSettings, method: Method[Any, Any, Any]) -> Moment:
    """Return when clients are scored: as configured, else the method's default."""
    return method.moment if settings.evaluate_moment == "auto" else settings.evaluate_moment


def head_scores(features: Tensor, logits: Tensor) -> Tensor:
    """Predictor ``head``: the logits."""
    return logits


@dataclass(frozen=True, eq=False)
class Nearest:
    """Predictor by the nearest prototype.

    Attributes:
        prototypes: (K, d).
        candidates: (K,) bool, the classes that may be predicted.
    """

    prototypes: Tensor
    candidates: Tensor

    def __call__(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return negative squared distances (B, K), EXCLUDED for classes that are not candidates."""
        table = self.prototypes.to(features.device, features.dtype)
        distance = torch.cdist(
            features, table, compute_mode="donot_use_mm_for_euclid_dist"
        ).square()  # (B, K)
        return torch.where(
            self.candidates.to(features.device), -distance, torch.full_like(distance, EXCLUDED)
        )
