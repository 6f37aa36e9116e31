"""Early stopping: a run ends after ``patience`` rounds without a better score.

The decision depends only on the recorded rounds, so a resumed run ends at the same round as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Score = tuple[bool, float]
"""Whether it is on validation data, and the accuracy; any score on validation data exceeds all on test data."""


def score_of(entry: Mapping[str, Any], primary_predictor: str) -> Score | None:
    """Return the primary predictor's weighted accuracy of a round or of its final scoring, None if there is none.

    It is on validation data if there is any (validation-share), else on test data. With few clients per round, a round
    may lack validation data that others have; its accuracy on test data is not comparable with theirs.
    """
    for data in ("validation", "accuracy"):
        if primary_predictor in (scored := entry.get(data) or {}):
            return data == "validation", float(scored[primary_predictor]["weighted"])
    return None


def best_round_line(history: Sequence[Mapping[str, Any]], primary_predictor: str) -> Mapping[str, Any] | None:
    """Return the line of the round with the best score, the first of equals; None if no round has a score.

    Args:
        history: lines of rounds.jsonl.
        primary_predictor: the predictor that is reported.
    """
    scored = [(score, line) for line in history if (score := score_of(line, primary_predictor)) is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def patience_exhausted(
    history: Sequence[Mapping[str, Any]], primary_predictor: str, patience: int
) -> Mapping[str, Any] | None:
    """Return the line of the best round if the run must end after its latest round, None if it continues.

    Args:
        history: lines of rounds.jsonl.
        primary_predictor: the predictor that is reported; a run continues as long as it has not been scored.
        patience: rounds allowed after the best one (the first of equals); 0 disables early stopping.
    """
    if not patience or (best := best_round_line(history, primary_predictor)) is None:
        return None
    return best if history[-1]["round"] - best["round"] >= patience else None


def early_stop_note(best: Mapping[str, Any], patience: int) -> str:
    """Return the note on the round after which a run ends early.

    Args:
        best: line of the best round. The note gives its ``accuracy_of_round``, as tables do: if clients are scored
            before training, its scores are those of the previous round.
        patience: of the run.
    """
    data = "validation data" if best.get("validation") else "test data"
    length = "1 round" if patience == 1 else f"{patience} rounds"
    since = best["accuracy_of_round"]
    return f"no better score on {data} for {length}, since round {since}: the run ends early (patience)"
