"""Titles over tables and sentences under them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def majority_lines(shares: Iterable[float | None], who: str = "a client") -> list[str]:
    """Return a sentence on the accuracy of always predicting a client's majority class; empty if unknown.

    Different accuracies of several runs are listed together.
    """
    known = dict.fromkeys(f"{100 * share:.2f}" for share in sorted(s for s in shares if s is not None))
    sentence = (
        f"Always predicting {who}'s most frequent training class: {', '.join(known)} %, sample-weighted."
    )
    return [sentence] if known else []


def accuracy_name(by: str) -> str:
    """Return the name of the accuracies in a table, by the requested predictor; empty: each run's primary predictor."""
    return f"accuracy by {by}" if by else "primary predictor's accuracy"


def titled(title: str, by: str) -> str:
    """Return the title of a table with the requested predictor ``by``, if any."""
    return f"{title}, by {by}" if by else title


def unscored_lines(rows: Iterable[tuple[str, str]], consequence: str = "") -> list[str]:
    """Return a sentence per predictor on the rows (label, predictor) that have no accuracy."""
    by_predictor: dict[str, list[str]] = {}
    for label, predictor in rows:
        by_predictor.setdefault(predictor, []).append(label)
    return [
        f"Never scored by {name}{consequence}: {', '.join(labels)}." for name, labels in by_predictor.items()
    ]


def coverage_lines(rows: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a sentence on the accuracies of a table that cover only some of the clients; empty if all cover all.

    Rows are a label with predictor -> number of clients; labels are named only if rows differ.
    """
    by_text: dict[str, list[str]] = {}
    for label, few in rows:
        text = ", ".join(f"{name} over {numbers}" for name, numbers in few.items())
        by_text.setdefault(text, []).append(label)
    parts = [
        text if len(labels) == len(rows) else f"{', '.join(labels)}: {text}"
        for text, labels in by_text.items()
        if text
    ]
    return [f"Accuracies that do not cover all participating clients: {'; '.join(parts)}."] if parts else []
