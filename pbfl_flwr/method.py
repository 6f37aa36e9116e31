"""The contract that every method follows: a page with both halves of a round.

::

    server   init(task) ----> state --broadcast--> Down
    client                                          |-> local_update(client, down) -> Up, memory
    server   state <--------- aggregate(state, uploads, at)

State goes in and comes out; nothing passes by file name, global or mutation. The one thing that is changed in
place is ``client.model``, the network into which the client's own weights were copied for this update; the
caller stores it afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.config import EvaluationSettings, TrainingSettings
from pbfl_flwr.data import ClientData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models import SplitModel
from pbfl_flwr.payloads import Payload, Reveal, Upload
from pbfl_flwr.task import Task

StateT = TypeVar("StateT", bound=Payload)
DownT = TypeVar("DownT", bound=Payload)
UpT = TypeVar("UpT", bound=Upload)
UpT_co = TypeVar("UpT_co", bound=Payload, covariant=True)

Moment = Literal["after", "before"]
Predictor = Callable[[Tensor, Tensor], Tensor]
"""(features (B, d), logits (B, K)) -> finite scores (B, K); the class with the highest score is predicted."""

EXCLUDED = -1e30
"""Score of a class that is no candidate: finite, so that nothing downstream meets an infinity."""


@dataclass(frozen=True)
class Round:
    """Where the federation stands, for the server's half.

    Attributes:
        number: 1 for the first round.
        task: what all clients agree on.
        num_clients: M, all clients of the federation so far, whether they answered or not. Where devices join a run
            that is under way (``min-clients``), ids may be larger.
        seed: the run's seed.
        shares: client -> s_i < 1 of uploads that came too late for their own round; see :meth:`Method.streams`.
        expected: how many clients the configuration is for, those that may still join with them; None: M.
    """

    number: int
    task: Task
    num_clients: int
    seed: int = 0
    shares: Mapping[int, float] = field(default_factory=dict)
    expected: int | None = None

    @property
    def configured_clients(self) -> int:
        """The clients that a constant of the configuration is meant for, whoever has joined."""
        return self.expected or self.num_clients

    def shares_of(self, uploads: Iterable[int]) -> list[float] | None:
        """Return s_i of every upload, 1 for those in time; None if all are."""
        return [self.shares.get(client, 1.0) for client in uploads] if self.shares else None


@dataclass(frozen=True)
class Client:
    """A client during one update: its data, its own network, what it kept from last time.

    Attributes:
        id: 0..M-1, stable over the run.
        round: number of the server's round, from 1.
        task: what all clients agree on.
        model: this client's network on its device; ``features(x)`` and ``head(features)``.
        data: its shards.
        training: settings of the local training.
        evaluation: settings of the evaluation.
        seed: the run's seed; use :meth:`generator` rather than this.
        memory: what the method kept at this client's last participation; empty at first.
        name: of a client that has one; its seeds then depend on it and not on who else takes part.
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

    @property
    def key(self) -> int | str:
        """What seeds that are this client's own depend on: its name, or its number."""
        return self.name or self.id

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.model.parameters()).device

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator that depends on run, client, round and purpose alone."""
        return seeds.generator(self.seed, purpose, self.key, self.round)


@dataclass(frozen=True)
class Update(Generic[UpT_co]):
    """What a client's half gives back.

    Attributes:
        payload: travels to the server.
        memory: stays on the client until its next participation (safetensors on its disk).
        metrics: what the round's log shows, e.g. the mean of every loss term.
    """

    payload: UpT_co
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Method(ABC, Generic[StateT, DownT, UpT]):
    """One method of federated learning. Subclasses are immutable: parameters in, no state inside.

    Attributes:
        name: its name in METHODS.
        state, down, up: the payload types of the server's state and of what travels.
        headline: the predictor the paper reports.
        predicts: the names that :meth:`predictors` may ever return.
        moment: when the paper scores a client, relative to its local training.
        same_architecture: whether every client must have the same network.
        unit_features: whether the head reads features of unit length.
        protects_uploads: whether the settings of the group ``privacy`` apply to what its clients send.
        replayable: whether all steps of its :func:`pbfl_flwr.training.fit` are alike, so that one recording serves
            them: the same operations on the same tensors whatever the batch holds. Nothing is drawn or counted in
            Python, no number decides anything, no shape depends on one, and what is kept is written in place.
    """

    name: str
    state: type[StateT]
    down: type[DownT]
    up: type[UpT]
    headline: str = "head"
    predicts: tuple[str, ...] = ("head",)
    moment: Moment = "after"
    same_architecture: bool = False
    unit_features: bool = False
    protects_uploads: bool = False
    replayable: bool = False

    @abstractmethod
    def init(self, task: Task, seed: int) -> StateT:
        """Return the server's state before round 1."""

    def broadcast(self, state: StateT, client: int) -> DownT:
        """Return what travels to one client; by default the state itself.

        Raises:
            TypeError: if the state is no such payload and the method does not say how it becomes one.
        """
        if not isinstance(state, self.down):
            raise TypeError(f"{type(self).__name__} must say how its state becomes {self.down.__name__}")
        return state

    def resumed(self, state: StateT) -> StateT:
        """Return the state of a checkpoint as a run goes on with it; clients may have lost what they held since."""
        return state

    @abstractmethod
    def local_update(self, client: Client, down: DownT) -> Update[UpT]:
        """Train the client's network in place and return what travels and what stays."""

    @abstractmethod
    def aggregate(self, state: StateT, uploads: Mapping[int, UpT], at: Round) -> StateT:
        """Return the new state; ``uploads`` come in ascending client order and are already validated.

        The old state and the uploads are left as they are. If the method :meth:`streams`, an upload is decoded each
        time it is asked for and not kept.
        """

    def streams(self) -> bool:
        """Whether :meth:`aggregate` is a sum over the uploads, weighed by ``at.shares``.

        Such a method goes through them one after the other, so that a few at a time are held in memory, and can count
        a late upload for less (``stale-weight``).
        """
        return False

    def install(self, client: Client, down: DownT) -> None:
        """Put what was broadcast into the client's network, for scoring before local training."""

    def predictors(self, client: Client, down: DownT) -> dict[str, Predictor]:
        """Return the predictions that can be made now, by name; all names that can come stand in ``predicts``."""
        return {"head": head_scores}

    def beside(self) -> tuple[str, ...]:
        """Return the names of the networks that every client builds beside its own; by default none."""
        return ()

    def network(self, state: StateT) -> Mapping[str, Tensor]:
        """Return the parameters of the network that the server holds whole, by their names; empty if it holds none."""
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
                f"found {', '.join(different)}; set models to one of them"
            )

    def reveals(self) -> tuple[Reveal, ...]:
        """Return what an upload tells the server, under this method's settings; by default what its type says."""
        return self.up.reveals

    def report(self, state: StateT) -> dict[str, float]:
        """Return what the log of a round says about the server's half."""
        return {}

    def remedy(self, client: Client) -> str:
        """Return what else helps a client whose upload has numbers without bounds; empty if nothing is known."""
        return ""

    def forewarnings(self, num_rounds: int) -> list[str]:
        """Return what a person should hear before a run of so many rounds begins; empty if all is well."""
        return []

    def notes(self, state: StateT) -> list[str]:
        """Return what a person should hear about the server's half of a round; empty if all is well."""
        return []

    def paper_scalars(
        self, task: Task, class_counts: Sequence[int], parameters: Sequence[tuple[int, int]]
    ) -> float | None:
        """Return the papers' cost: scalars a round, both directions, summed over all clients; None if none counts it.

        Args:
            task: K and d.
            class_counts: K_i of every client, before the train/test split.
            parameters: (body, head) parameters of every client's network.
        """
        return None


def resolved_moment(settings: EvaluationSettings, method: Method[Any, Any, Any]) -> Moment:
    """Return when clients are scored: what the configuration says, else the method's own habit."""
    return method.moment if settings.evaluate_moment == "auto" else settings.evaluate_moment


def head_scores(features: Tensor, logits: Tensor) -> Tensor:
    """Predictor ``head``: the logits."""
    return logits


@dataclass(frozen=True, eq=False)
class Nearest:
    """A predictor by the nearest prototype.

    Attributes:
        prototypes: (K, d).
        candidates: (K,) bool, the classes that may be predicted.
    """

    prototypes: Tensor
    candidates: Tensor

    def __call__(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return negative squared distances (B, K), EXCLUDED for classes that are no candidates."""
        table = self.prototypes.to(features.device, features.dtype)
        distance = torch.cdist(
            features, table, compute_mode="donot_use_mm_for_euclid_dist"
        ).square()  # (B, K)
        return torch.where(
            self.candidates.to(features.device), -distance, torch.full_like(distance, EXCLUDED)
        )
