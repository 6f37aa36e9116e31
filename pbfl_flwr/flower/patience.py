"""When a run ends before num-server-rounds: it has gone on for ``patience`` rounds without a better score.

It follows from the rounds alone, so that a run that was killed and resumed ends where it would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def score_of(entry: Mapping[str, Any], headline: str) -> float | None:
    """Return the weighted headline accuracy of a round or of its last scoring, None where there is none.

    Of validation data if there are some (validation-share), else of test data.
    """
    scored = entry.get("validation") or entry.get("accuracy") or {}
    return float(scored[headline]["weighted"]) if headline in scored else None


def exhausted(history: Sequence[Mapping[str, Any]], headline: str, patience: int) -> int | None:
    """Return the best round of a run that is to end after the last one, None if it is to go on.

    Args:
        history: lines of rounds.jsonl.
        headline: the predictor that is reported; as long as it was not scored a run goes on.
        patience: rounds that may follow the best one, of equals the first; 0 ends none.
    """
    scores = [(score, -line["round"]) for line in history if (score := score_of(line, headline)) is not None]
    if not patience or not scores:
        return None
    best = -max(scores)[1]
    return best if history[-1]["round"] - best >= patience else None


def note_of(best: int, patience: int, *, validated: bool) -> str:
    """Return what is noted of the round after which a run ends so.

    Args:
        best: the round whose score is the best; where clients are scored before their training 0 is before the first.
        patience: how many came after it.
        validated: whether the score is on validation data.
    """
    data, rounds = "validation data" if validated else "test data", "round" if patience == 1 else "rounds"
    return (
        f"no better score on {data} for {patience} {rounds}, since round {best}: the run ends here (patience)"
    )
