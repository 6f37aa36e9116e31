"""Local: every client trains alone.

Round: each client runs E epochs of SGD on cross-entropy over its own data; its model persists. The server only
records results. A baseline that shows whether a federation helps.
Travels: nothing.
Predicts: the logits of the client's own model.
Differs from the reference: nothing known; the references sample clients twice a round, which has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pbfl_flwr.config import Settings
from pbfl_flwr.method import Client, Method, Round, Update
from pbfl_flwr.payloads import Nothing
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import classification, fit


@dataclass(frozen=True)
class Local(Method[Nothing, Nothing, Nothing]):
    """See the module."""

    name: str = "local"

    state = Nothing
    down = Nothing
    up = Nothing

    def init(self, task: Task, seed: int) -> Nothing:
        """Return nothing."""
        return Nothing()

    def local_update(self, client: Client, down: Nothing) -> Update[Nothing]:
        """Train on cross-entropy."""
        report = fit(client, classification(client.model))
        return Update(Nothing(), report.optimizer, report.metrics())

    def aggregate(self, state: Nothing, uploads: Mapping[int, Nothing], round_info: Round) -> Nothing:
        """Return the state unchanged."""
        return state

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """Nothing travels."""
        return 0.0


def build(settings: Settings) -> Local:
    """Return the method."""
    return Local()
