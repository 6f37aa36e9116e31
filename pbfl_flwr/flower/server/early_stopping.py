"""When a run ends before num-server-rounds: it has gone on for ``patience`` rounds without a better score.

It follows from the rounds alone, so that a run that was killed and resumed ends where it would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Score = tuple[bool, float]
"""Whether it is of validation data, and the accuracy: any score on them outdoes all on test data."""


def score_of(entry: Mapping[str, Any], headline: str) -> Score | None:
    """Return the score by weighted headline accuracy of a round or of its last scoring, None where there is none.

    Of validation data if there are some (validation-share), else of test data. Where few clients take part, a round may
    lack validation data that others have; its accuracy on test data is not to be compared with theirs.
    """
    for data in ("validation", "accuracy"):
        if headline in (scored := entry.get(data) or {}):
            return data == "validation", float(scored[headline]["weighted"])
    return None


def best_round_line(history: Sequence[Mapping[str, Any]], headline: str) -> Mapping[str, Any] | None:
    """Return the line of the round with the best score, of equals the first; None while there is none.

    Args:
        history: lines of rounds.jsonl.
        headline: the predictor that is reported.
    """
    scored = [(score, line) for line in history if (score := score_of(line, headline)) is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def patience_exhausted(
    history: Sequence[Mapping[str, Any]], headline: str, patience: int
) -> Mapping[str, Any] | None:
    """Return the line of the best round of a run that is to end after the last one, None if it is to go on.

    Args:
        history: lines of rounds.jsonl.
        headline: the predictor that is reported; as long as it was not scored a run goes on.
        patience: rounds that may follow the best one, of equals the first; 0 ends none.
    """
    if not patience or (best := best_round_line(history, headline)) is None:
        return None
    return best if history[-1]["round"] - best["round"] >= patience else None


def early_stop_note(best: Mapping[str, Any], patience: int) -> str:
    """Return what is noted of the round after which a run ends so.

    Args:
        best: line of the best round, which is called as in the tables: where clients are scored before they train, its
            scores are those of the round before it.
        patience: of the run.
    """
    data = "validation data" if best.get("validation") else "test data"
    length = "1 round" if patience == 1 else f"{patience} rounds"
    since = best["accuracy_of_round"]
    return f"no better score on {data} for {length}, since round {since}: the run ends here (patience)"
