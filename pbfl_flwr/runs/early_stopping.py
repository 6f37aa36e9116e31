"""The best round, and early stopping: a run ends after ``patience`` rounds without a better accuracy.

Both depend only on the recorded rounds, so a resumed run ends at the same round as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from pbfl_flwr.errors import PbflError
from pbfl_flwr.runs.records import Accuracies, RoundRecord

Place = TypeVar("Place")
Score = tuple[bool, float]
"""Whether it is on validation data, and the accuracy; any score on validation data exceeds all on test data."""
Value = TypeVar("Value", float, Score)
StopsOn = Literal["validation", "test"]
"""The data by which a run with ``patience`` ends."""


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


def accuracy_on(scores: Accuracies, on: StopsOn, predictor: str) -> float | None:
    """Return the predictor's weighted accuracy on this data in a round, None if there is none."""
    accuracies = scores.validation if on == "validation" else scores.accuracy
    return accuracies[predictor].weighted if predictor in accuracies else None


def accuracies_on(history: Iterable[RoundRecord], on: StopsOn, predictor: str) -> dict[int, float]:
    """Return round -> accuracy on this data of the rounds that have one, in ascending order."""
    found = {record.round: accuracy_on(record, on, predictor) for record in history}
    return {number: accuracy for number, accuracy in found.items() if accuracy is not None}


def check_patience(patience: int, on: StopsOn, *, validated: bool) -> None:
    """Refuse ``patience`` that waits for validation data where no client has any (``validated``).

    Raises:
        PbflError: if it does.
    """
    if patience and on == "validation" and not validated:
        raise PbflError(
            f"patience = {patience}: no client has validation data to stop by; set validation-share, e.g. 0.2, or "
            "patience-on=test"
        )


def best(scores: Mapping[Place, Value]) -> Place | None:
    """Return the place of the highest score, the first of equals; None if there is no score."""
    return max(scores, key=lambda place: scores[place], default=None)


def patience_exhausted(accuracies: Mapping[int, float], latest: int, patience: int) -> bool:
    """Return whether the run must end after its latest round: ``patience`` rounds after the best (first of equals).

    A run without accuracies continues, as does one with patience 0.
    """
    at = best(accuracies) if patience else None
    return at is not None and latest - at >= patience


def early_stop_warning(accuracies: Mapping[int, float], on: StopsOn, moment: str, patience: int) -> str:
    """Return the warning of the round after which a run ends early.

    It names the round as tables do: if clients are scored before training, the accuracies are those of the previous
    round.

    Args:
        accuracies: of the rounds so far, at least one.
        on: what data they are on.
        moment: when clients are scored, "before" or "after" training.
        patience: of the run.
    """
    at = best(accuracies)
    assert at is not None
    length = "1 round" if patience == 1 else f"{patience} rounds"
    since = at - 1 if moment == "before" else at
    return f"no better accuracy on {on} data for {length}, since round {since}: the run ends early (patience)"
