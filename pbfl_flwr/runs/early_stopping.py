"""The best round, and early stopping: a run ends after ``patience`` rounds without a better accuracy.

Both depend only on the recorded rounds, so a resumed run ends at the same round as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

from pbfl_flwr.errors import PbflError
from pbfl_flwr.runs.records import Accuracies, Accuracy, RoundRecord

Place = TypeVar("Place")
StopsOn = Literal["validation", "test"]
"""The data by which a run with ``patience`` ends."""


class Score(NamedTuple):
    """An accuracy of a round or its final scoring.

    Attributes:
        validated: whether it is on validation data (``validation-share``), not on test data.
        clients: number of clients that have it.
        accuracy: weighted by samples, or another statistic of tables.
        answered: number of clients that have one by any predictor.
        final: whether it is of the final scoring.
    """

    validated: bool
    clients: int
    accuracy: float
    answered: int
    final: bool = False


def score_on(scores: Accuracies, on: StopsOn, predictor: str) -> Score | None:
    """Return the predictor's score on this data in a round or its final scoring, None if there is none."""
    accuracies = scores.validation if on == "validation" else scores.accuracy
    found = accuracies.get(predictor)
    if found is None:
        return None
    return Score(on == "validation", found.clients, found.weighted, answered(accuracies))


def answered(accuracies: Mapping[str, Accuracy]) -> int:
    """Return how many clients have an accuracy by any predictor; there must be one."""
    return max(accuracy.clients for accuracy in accuracies.values())


def all_scores(history: Iterable[RoundRecord], predictor: str) -> dict[tuple[int, bool], Score]:
    """Return (round, whether it is its final scoring) -> score, of those that have one, in ascending order.

    It is on validation data if there is any, else on test data.
    """
    scores = {}
    for record in history:
        for scored in (record, record.final):
            if scored is None:
                continue
            score = score_on(scored, "validation", predictor) or score_on(scored, "test", predictor)
            if score is not None:
                final = scored is record.final
                scores[record.round, final] = score._replace(final=final)
    return scores


def scores_on(history: Iterable[RoundRecord], on: StopsOn, predictor: str) -> dict[int, Score]:
    """Return round -> score on this data of the rounds that have one, in ascending order."""
    found = {record.round: score_on(record, on, predictor) for record in history}
    return {number: score for number, score in found.items() if score is not None}


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


def best(scores: Mapping[Place, Score]) -> Place | None:
    """Return the place of the highest accuracy, the first of equals; None if there is no score.

    Any on validation data exceeds all on test data: with few clients per round, a round may lack validation data that
    others have. Of the others, rounds before which no round had an accuracy of as many clients as later ones do not
    count: a client that has not trained yet has none by its own prototypes, so the first rounds of partial
    participation cover only a few. The final scoring asks all clients, where a round may ask a sample: those by which
    its answers exceed every round's are not counted. Later scores do not change how two rounds compare.

    Args:
        scores: in the order of the rounds.
    """
    most: dict[bool, int] = {}
    most_answered: dict[bool, int] = {}
    ranks: dict[Place, tuple[bool, int, float]] = {}
    for place, (validated, clients, accuracy, answers, final) in scores.items():
        answers_before = most_answered.get(validated, 0)
        counted = clients - max(0, answers - answers_before) if final else clients
        most[validated] = max(most.get(validated, 0), counted)
        most_answered[validated] = max(answers_before, answers)
        ranks[place] = validated, most[validated], accuracy
    return max(ranks, key=lambda place: ranks[place], default=None)


def patience_exhausted(scores: Mapping[int, Score], latest: int, patience: int) -> bool:
    """Return whether the run must end after its latest round: ``patience`` rounds after the best (first of equals).

    A run without scores continues, as does one with patience 0.
    """
    at = best(scores) if patience else None
    return at is not None and latest - at >= patience


def early_stop_warning(scores: Mapping[int, Score], on: StopsOn, moment: str, patience: int) -> str:
    """Return the warning of the round after which a run ends early.

    It names the round as tables do: if clients are scored before training, the accuracies are those of the previous
    round.

    Args:
        scores: of the rounds so far, at least one.
        on: what data they are on.
        moment: when clients are scored, "before" or "after" training.
        patience: of the run.
    """
    at = best(scores)
    assert at is not None
    length = "1 round" if patience == 1 else f"{patience} rounds"
    since = at - 1 if moment == "before" else at
    return f"no better accuracy on {on} data for {length}, since round {since}: the run ends early (patience)"
