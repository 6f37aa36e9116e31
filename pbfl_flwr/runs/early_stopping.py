"""The best round, and early stopping: a run ends after ``patience`` rounds without a better score.

Both depend only on the recorded rounds, so a resumed run ends at the same round as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pbfl_flwr.runs.records import RoundRecord, Scores

Score = tuple[bool, float]
"""Whether it is on validation data, and the accuracy; any score on validation data exceeds all on test data."""


def score_of(scores: Scores, predictor: str) -> Score | None:
    """Return the predictor's weighted accuracy in a round or its final scoring, None if there is none.

    It is on validation data if there is any (validation-share), else on test data. With few clients per round, a round
    may lack validation data that others have; its accuracy on test data is not comparable with theirs.
    """
    for on_validation, accuracies in ((True, scores.validation), (False, scores.accuracy)):
        if predictor in accuracies:
            return on_validation, accuracies[predictor].weighted
    return None


def scores_by_round(history: Iterable[RoundRecord], predictor: str) -> dict[int, Score]:
    """Return round -> score of the rounds that have one, in ascending order."""
    scores = ((record.round, score_of(record, predictor)) for record in history)
    return {number: score for number, score in scores if score is not None}


def best_round(scores: Mapping[int, Score]) -> int | None:
    """Return the round with the best score, the first of equals; None if no round has a score."""
    return max(scores, key=lambda number: scores[number]) if scores else None


def patience_exhausted(scores: Mapping[int, Score], latest: int, patience: int) -> bool:
    """Return whether the run must end after its latest round: ``patience`` rounds after the best (first of equals).

    A run without scores continues, as does one with patience 0.
    """
    best = best_round(scores) if patience else None
    return best is not None and latest - best >= patience


def early_stop_warning(scores: Mapping[int, Score], moment: str, patience: int) -> str:
    """Return the warning of the round after which a run ends early.

    It names the round as tables do: if clients are scored before training, the scores are those of the previous round.

    Args:
        scores: of the rounds so far, at least one.
        moment: when clients are scored, "before" or "after" training.
        patience: of the run.
    """
    best = best_round(scores)
    assert best is not None
    data = "validation data" if scores[best][0] else "test data"
    length = "1 round" if patience == 1 else f"{patience} rounds"
    since = best - 1 if moment == "before" else best
    return f"no better score on {data} for {length}, since round {since}: the run ends early (patience)"
