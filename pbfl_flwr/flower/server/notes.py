"""Notes on a round for the user; they are written to its line of rounds.jsonl and to the log."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pbfl_flwr.flower.server.replies import Outcome, Phase


def upload_notes(outcome: Outcome) -> list[str]:
    """Return notes on the clients that trained: classes held back, no training steps, clipped entries."""
    return [*_held_back(outcome), *_idle(outcome), *_clipped(outcome)]


def lost_state(phase: Phase, outcome: Outcome, before: Mapping[int, int]) -> list[str]:
    """Return a note on clients that report fewer trained rounds than the server counted: their stored state is lost.

    Args:
        phase: the messages sent.
        outcome: the result of the phase.
        before: client -> rounds trained in, as last reported.
    """
    found = [
        phase.client_label(client)
        for client, report in outcome.reports.items()
        if client in before and report.participations < before[client] + (client in phase.training)
    ]
    return [f"client {', '.join(found)} lost its state and starts from scratch"] if found else []


def missing_classes(labels: Sequence[str], ages: Sequence[int] | None) -> list[str]:
    """Return a note on classes that no client has uploaded for exactly 10, 100 or 1,000 rounds.

    Args:
        labels: names of the classes.
        ages: see :func:`pbfl_flwr.flower.server.round_records.updated_ages`.
    """
    found = [label for label, age in zip(labels, ages or [], strict=False) if age in (10, 100, 1000)]
    return [f"no client sent these classes for 10 rounds or more: {', '.join(found)}"] if found else []


def not_scored(predictor: str, method: str, scored: Collection[str]) -> list[str]:
    """Return a note if no client was scored with the configured predictor.

    Args:
        predictor: as configured.
        method: the method's name.
        scored: the predictors with scores.
    """
    if not scored or predictor in scored:
        return []
    return [
        f"predictor = '{predictor}': method '{method}' has no scores of it, so there is no best round; there are "
        f"scores of {', '.join(scored)}"
    ]


def _held_back(outcome: Outcome) -> list[str]:
    found = [(outcome.reports[client].metrics or {}).get("held-back", 0) for client in outcome.trained]
    if not any(found):
        return []
    return [
        f"classes held back for having fewer samples than min-class-count: {sum(found):.0f}, on "
        f"{sum(classes > 0 for classes in found)} of {len(found)} clients"
    ]


def _idle(outcome: Outcome) -> list[str]:
    found = [client for client in outcome.trained if (outcome.reports[client].metrics or {}).get("idle")]
    if not found:
        return []
    return [
        f"made no training step, too few samples (batch-size, drop-last; BatchNorm needs two): client "
        f"{', '.join(map(str, found))}"
    ]


def _clipped(outcome: Outcome) -> list[str]:
    found = [(outcome.reports[client].metrics or {}).get("secure-clipped", 0) for client in outcome.trained]
    return [f"{sum(found):.0f} entries of uploads were clipped to ±secure-range"] if any(found) else []
