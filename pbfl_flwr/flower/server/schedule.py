"""Which rounds of a run are scored, and after which one it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pbfl_flwr.config import Settings
from pbfl_flwr.method import Moment
from pbfl_flwr.runs.early_stopping import Score, patience_exhausted


@dataclass(frozen=True)
class Schedule:
    """The rounds of a run, numbered from 1.

    Attributes:
        num_rounds: at most.
        moment: when clients are scored, relative to their training.
        every: N, ``evaluate-every``.
        patience: rounds without a better accuracy after which the run ends; 0 means never.
    """

    num_rounds: int
    moment: Moment
    every: int = 1
    patience: int = 0

    def is_scored(self, number: int) -> bool:
        """Return whether clients are scored in a round: if the round whose accuracy it is is due, and in the last.

        If they are scored before their training, it is the accuracy of the round before; the last round's comes after
        it.
        """
        if self.moment == "before":
            return (number - 1) % self.every == 0
        return number % self.every == 0 or number == self.num_rounds

    def ends_early(self, scores: Mapping[int, Score], number: int) -> bool:
        """Return whether the run must end after this round; only a round in which clients are scored can tell."""
        return self.is_scored(number) and patience_exhausted(scores, number, self.patience)

    def last_round(self, scores: Mapping[int, Score], done: int) -> int:
        """Return the round after which the run ends, according to the ``done`` rounds so far."""
        return done if self.ends_early(scores, done) else self.num_rounds


def schedule_of(settings: Settings, moment: Moment) -> Schedule:
    """Return the schedule of a run that scores at this moment."""
    run = settings.run
    return Schedule(run.num_server_rounds, moment, settings.evaluation.evaluate_every, run.patience)
