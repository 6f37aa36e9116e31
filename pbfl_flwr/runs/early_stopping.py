"""The best round, and early stopping: a run ends after ``patience`` rounds without a better score.

Both depend only on the recorded rounds, so a resumed run ends at the same round as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from pbfl_flwr.runs.records import Accuracies, RoundRecord

Place = TypeVar("Place")
Score = tuple[bool, float]
"""Whether it is on validation data, and the accuracy; any score on validation data exceeds all on test data."""
Value = TypeVar("Value", float, Score)


def score_of(scores: Accuracies, predictor: str) -> Score | None:
    """Return the predictor's weighted accuracy in a round or its final scoring, None if there is none.

    It is on validation data if there is any (validation-share), else on test data. With few clients per round, a round
    may lack validation data that others have; its accuracy on test data is not comparable with theirs.
    """
    for on_validation, accuracies in ((True, scores.validation), (False, scores.accuracy)):
        if predictor in accuracies:
            return on_validation, accuracies[predictor].weighted
    return None


def all_scores(history: Iterable[RoundRecord], predictor: str) -> dict[tuple[int, bool], Score]:
    """Return (round, whether it is its final scoring) -> score, of those that have one, in ascending order."""
    scores = {}
    for record in history:
        for scored in (record, record.final):
            if scored is not None and (score := score_of(scored, predictor)) is not None:
                scores[record.round, scored is record.final] = score
    return scores


def scores_by_round(history: Iterable[RoundRecord], predictor: str) -> dict[int, Score]:
    """Return round -> score of the rounds that have one, in ascending order."""
    return {number: score for (number, final), score in all_scores(history, predictor).items() if not final}


def best(scores: Mapping[Place, Value]) -> Place | None:
    """Return the place of the highest score, the first of equals; None if there is no score."""
    return max(scores, key=lambda place: scores[place], default=None)


def patience_exhausted(scores: Mapping[int, Score], latest: int, patience: int) -> bool:
    """Return whether the run must end after its latest round: ``patience`` rounds after the best (first of equals).

    A run without scores continues, as does one with patience 0.
    """
    at = best(scores) if patience else None
    return at is not None and latest - at >= patience


def early_stop_warning(scores: Mapping[int, Score], moment: str, patience: int) -> str:
    """Return the warning of the round after which a run ends early.

    It names the round as tables do: if clients are scored before training, the scores are those of the previous round.

    Args:
        scores: of the rounds so far, at least one.
        moment: when clients are scored, "before" or "after" training.
        patience: of the run.
    """
    at = best(scores)
    assert at is not None
    data = "validation data" if scores[at][0] else "test data"
    length = "1 round" if patience == 1 else f"{patience} rounds"
    since = at - 1 if moment == "before" else at
    return f"no better score on {data} for {length}, since round {since}: the run ends early (patience)"
