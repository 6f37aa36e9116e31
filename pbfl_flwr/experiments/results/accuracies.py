"""What a run's accuracies are, over whom they are, and the sentences that go with them below every table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pbfl_flwr.config import PREDICTORS


@dataclass(frozen=True)
class Scores:
    """A predictor's accuracies over the run.

    Attributes:
        last: (round, statistics) of the last round.
        best: (round, statistics) of the round with the highest accuracy, sample-weighted unless asked otherwise.
        chosen: (round, statistics) on the test data of the round with the highest sample-weighted accuracy on the
            clients' validation samples; None where nothing was held out.
        other: (round, statistics) of the last scoring at the other moment (both-moments), over the clients that
            trained; None where there was none.
    """

    last: tuple[int, Mapping[str, float]]
    best: tuple[int, Mapping[str, float]]
    chosen: tuple[int, Mapping[str, float]] | None = None
    other: tuple[int, Mapping[str, float]] | None = None


def series(rounds: Sequence[Mapping[str, Any]], on: str = "accuracy") -> list[tuple[int, Mapping[str, Any]]]:
    """Return (round, predictor -> statistics) in the order of the rounds.

    Args:
        rounds: what rounds.jsonl holds. Where clients are scored before their training, an entry's accuracy is the
            round's before it (round 0: the initial models) and the last entry holds the last round's as "final".
        on: "accuracy" (on test data) or "validation".
    """
    found = [(entry["accuracy_of_round"], entry.get(on, {})) for entry in rounds]
    if rounds and "final" in rounds[-1]:
        found.append((rounds[-1]["round"], rounds[-1]["final"].get(on, {})))
    return found


def client_series(
    rounds: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]]
) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (round of the accuracies, every client's counters) in the order of the rounds.

    Args:
        rounds: what rounds.jsonl holds; what clients.jsonl holds beyond it is left out.
        clients: what clients.jsonl holds; of last scorings the one of the last round, as in :func:`series`: a run that
            was prolonged may have had one earlier, and the round after it has the same round's accuracies.
    """
    numbers = {entry["round"]: entry["accuracy_of_round"] for entry in rounds}
    lines = [line for line in clients if line["round"] in numbers]
    found: list[tuple[int, Mapping[str, Any]]] = [(numbers[line["round"]], line) for line in lines]
    if lines and "final" in lines[-1]:
        found.append((lines[-1]["round"], lines[-1]["final"]))
    return found


def scores(rounds: Sequence[Mapping[str, Any]], by: str = "weighted") -> dict[str, Scores]:
    """Return predictor -> scores.

    Args:
        rounds: what rounds.jsonl holds.
        by: the statistic by which the best round is chosen.
    """
    found = {}
    validated = dict(series(rounds, "validation"))
    for name in PREDICTORS:
        points = [(number, accuracy[name]) for number, accuracy in series(rounds) if name in accuracy]
        held_out = {at: validated[at][name]["weighted"] for at, _ in points if name in validated.get(at, {})}
        chosen = max(held_out, key=lambda at: held_out[at], default=None)
        if points:
            best = max(points, key=lambda point: point[1][by])
            found[name] = Scores(
                points[-1],
                best,
                None if chosen is None else (chosen, dict(points)[chosen]),
                next((point for point in reversed(_other(rounds, name))), None),
            )
    return found


def _other(rounds: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, Mapping[str, float]]]:
    """Return (round, a predictor's statistics) at the other moment: after a round, or of the broadcast before it."""
    return [
        (2 * entry["round"] - 1 - entry["accuracy_of_round"], entry["other"][name])
        for entry in rounds
        if name in entry.get("other", {})
    ]


def majority_lines(shares: Iterable[float | None], who: str = "a client") -> list[str]:
    """Return what the skew of the labels alone scores, in a sentence; none where it is not known.

    Args:
        shares: what :meth:`RunDirectory.majority` says of every run; several partitions are named side by side.
        who: of whom.
    """
    known = dict.fromkeys(f"{100 * share:.2f}" for share in sorted(s for s in shares if s is not None))
    said = (
        f"Always answering {who}'s most frequent training class: {', '.join(known)} %, weighted by samples."
    )
    return [said] if known else []


def accuracy_by(by: str) -> str:
    """Return what the accuracies of a table are called.

    Args:
        by: the predictor that was asked for; nothing is the one that each run reports.
    """
    return f"accuracy by {by}" if by else "headline accuracy"


def titled(title: str, by: str) -> str:
    """Return the title of a table, with the predictor that was asked for; the arguments are those above."""
    return f"{title}, by {by}" if by else title


def unscored_lines(rows: Iterable[tuple[str, str]], consequence: str = "") -> list[str]:
    """Return which rows have no accuracy, in a sentence for each predictor; none where all have one.

    Args:
        rows: label and predictor of those without.
        consequence: what follows for them.
    """
    found: dict[str, list[str]] = {}
    for label, predictor in rows:
        found.setdefault(predictor, []).append(label)
    return [f"Never scored by {name}{consequence}: {', '.join(labels)}." for name, labels in found.items()]


def other_moment(about: Mapping[str, Any]) -> str:
    """Return the moment that is not the headline's of a run, whose run.json is given."""
    return "after training" if about["moment"] == "before" else "before training"


def label_names(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the K names of a run's classes, whose run.json is given; numbers where clients gave none."""
    member = about["clients"][0]
    names = member.get("labels") or range(member["task"]["num_classes"])
    return tuple(" ".join(str(name).split()) for name in names)


def participants(about: Mapping[str, Any]) -> int:
    """Return how many clients take part in the rounds of a run, whose run.json is given."""
    return len(about["clients"]) - int(about["configuration"].get("new-clients", 0))


def honest(about: Mapping[str, Any]) -> frozenset[int]:
    """Return the clients over which a run's accuracies may be: those that take part in the rounds and do not lie."""
    numbers = sorted(int(member["client"]) for member in about["clients"])
    return frozenset(numbers[: participants(about)]) - frozenset(about.get("malicious", []))


def few_clients(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Scores]]]) -> dict[str, str]:
    """Return predictor -> "n of M", over how many clients its accuracies are, where they are not over all of them.

    Args:
        runs: (run.json, predictor -> scores) of each run of a row.
    """
    found: dict[str, set[int]] = {}
    everybody = 0
    for about, scored in runs:
        everybody = max(everybody, len(honest(about)))
        for name, score in scored.items():
            points = [point[1] for point in (score.last, score.best, score.chosen) if point is not None]
            found.setdefault(name, set()).update(int(at["clients"]) for at in points)
    return {
        name: f"{span(numbers)} of {everybody}" for name, numbers in found.items() if min(numbers) < everybody
    }


def few_lines(rows: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return which accuracies of a table are over some of the clients only, in a sentence; none where none are.

    Args:
        rows: label and what :func:`few_clients` says of it; labels stand in the sentence where rows differ.
    """
    told: dict[str, list[str]] = {}
    for label, few in rows:
        said = ", ".join(f"{name} over {numbers}" for name, numbers in few.items())
        told.setdefault(said, []).append(label)
    parts = [
        said if len(labels) == len(rows) else f"{', '.join(labels)}: {said}"
        for said, labels in told.items()
        if said
    ]
    return [f"Accuracies that are not over all clients taking part: {'; '.join(parts)}."] if parts else []


def span(numbers: Iterable[int]) -> str:
    """Return a number, or the lowest and the highest of several."""
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"
