"""A run's accuracies, the clients they cover, and the notes that tables print about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pbfl_flwr.config import PREDICTORS


@dataclass(frozen=True)
class Scores:
    """A predictor's accuracies over a run.

    Attributes:
        last: (round, statistics) of the last round.
        best: (round, statistics) of the round with the highest test accuracy, sample-weighted by default.
        chosen: (round, statistics) on the test data in the round with the highest sample-weighted accuracy on the
            clients' validation samples; None without validation samples.
        other: (round, statistics) of the last evaluation at the other moment (both-moments), over the clients that
            trained; None if there was none.
    """

    last: tuple[int, Mapping[str, float]]
    best: tuple[int, Mapping[str, float]]
    chosen: tuple[int, Mapping[str, float]] | None = None
    other: tuple[int, Mapping[str, float]] | None = None


def series(rounds: Sequence[Mapping[str, Any]], on: str = "accuracy") -> list[tuple[int, Mapping[str, Any]]]:
    """Return (round, predictor -> statistics) in round order.

    Args:
        rounds: entries of rounds.jsonl. If clients are scored before their training, an entry has the accuracy of the
            previous round (round 0: the initial models), and the last entry has that of the last round as "final".
        on: "accuracy" (on test data) or "validation".
    """
    found = [(entry["accuracy_of_round"], entry.get(on, {})) for entry in rounds]
    if rounds and "final" in rounds[-1]:
        found.append((rounds[-1]["round"], rounds[-1]["final"].get(on, {})))
    return found


def client_series(
    rounds: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]]
) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (round of the accuracies, every client's counters) in round order.

    Args:
        rounds: entries of rounds.jsonl; entries of clients.jsonl for other rounds are ignored.
        clients: entries of clients.jsonl. As in :func:`series`, "final" is used only in the last entry: an extended
            run may have an earlier one, and the entry after it has the same round's accuracies.
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
        rounds: entries of rounds.jsonl.
        by: the statistic that selects the best round.
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
    """Return [(round, statistics)] of a predictor at the other moment.

    If clients are scored after training, this is the broadcast before it, whose round is the previous one; else the
    model after training, whose round is the entry's.
    """
    return [
        (2 * entry["round"] - 1 - entry["accuracy_of_round"], entry["other"][name])
        for entry in rounds
        if name in entry.get("other", {})
    ]


def majority_lines(shares: Iterable[float | None], who: str = "a client") -> list[str]:
    """Return a sentence on the accuracy of always predicting a client's majority class; empty if unknown.

    Args:
        shares: result of :meth:`RunDirectory.majority` for every run; different values are listed together.
        who: the kind of client, for the sentence.
    """
    known = dict.fromkeys(f"{100 * share:.2f}" for share in sorted(s for s in shares if s is not None))
    said = f"Always predicting {who}'s most frequent training class: {', '.join(known)} %, sample-weighted."
    return [said] if known else []


def accuracy_name(by: str) -> str:
    """Return the name of the accuracies in a table.

    Args:
        by: the requested predictor; empty means each run's headline.
    """
    return f"accuracy by {by}" if by else "headline accuracy"


def titled(title: str, by: str) -> str:
    """Return the title of a table with the requested predictor ``by``, if any."""
    return f"{title}, by {by}" if by else title


def unscored_lines(rows: Iterable[tuple[str, str]], consequence: str = "") -> list[str]:
    """Return a sentence per predictor on the rows that have no accuracy.

    Args:
        rows: (label, predictor) of the rows without accuracy.
        consequence: text after the predictor's name.
    """
    found: dict[str, list[str]] = {}
    for label, predictor in rows:
        found.setdefault(predictor, []).append(label)
    return [f"Never scored by {name}{consequence}: {', '.join(labels)}." for name, labels in found.items()]


def other_moment(about: Mapping[str, Any]) -> str:
    """Return the moment at which a run's headline accuracy is not scored, from its run.json."""
    return "after training" if about["moment"] == "before" else "before training"


def label_names(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the K class names from a run's run.json; class numbers if clients gave no names."""
    member = about["clients"][0]
    names = member.get("labels") or range(member["task"]["num_classes"])
    return tuple(" ".join(str(name).split()) for name in names)


def participants(about: Mapping[str, Any]) -> int:
    """Return the number of clients in a run's rounds, without new clients, from its run.json."""
    return len(about["clients"]) - int(about["configuration"].get("new-clients", 0))


def honest(about: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids of the clients that a run's accuracies can cover: participants that are not malicious."""
    numbers = sorted(int(member["client"]) for member in about["clients"])
    return frozenset(numbers[: participants(about)]) - frozenset(about.get("malicious", []))


def partial_coverage(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Scores]]]) -> dict[str, str]:
    """Return predictor -> "n of M clients" for predictors whose accuracies do not cover all honest clients.

    Args:
        runs: (run.json, predictor -> scores) of each run of a row.
    """
    found: dict[str, set[int]] = {}
    total = 0
    for about, scored in runs:
        total = max(total, len(honest(about)))
        for name, score in scored.items():
            points = [point[1] for point in (score.last, score.best, score.chosen) if point is not None]
            found.setdefault(name, set()).update(int(at["clients"]) for at in points)
    return {name: f"{span(numbers)} of {total}" for name, numbers in found.items() if min(numbers) < total}


def coverage_lines(rows: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a sentence on the accuracies of a table that cover only some of the clients; empty if all cover all.

    Args:
        rows: label and result of :func:`partial_coverage`; the sentence names labels only if rows differ.
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
    return [f"Accuracies that do not cover all participating clients: {'; '.join(parts)}."] if parts else []


def span(numbers: Iterable[int]) -> str:
    """Return "n", or "lowest–highest" of several different numbers."""
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"
