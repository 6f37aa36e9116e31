"""What a round gives to think about, in words: they stand in its line, in the log and on the screen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pbfl_flwr.flower.server.replies import Outcome, Phase


def of_uploads(outcome: Outcome) -> list[str]:
    """Say of the clients that trained what they held back, could not do, or had to clip."""
    return [*_held_back(outcome), *_idle(outcome), *_clipped(outcome)]


def forgotten(phase: Phase, outcome: Outcome, before: Mapping[int, int]) -> list[str]:
    """Say which clients have trained less often than the server has seen: another disk, or none any more.

    Args:
        phase: what was sent.
        outcome: what came back.
        before: client -> rounds it had trained in when it was last heard of.
    """
    found = [
        phase.called(client)
        for client, report in outcome.reports.items()
        if client in before and report.participations < before[client] + (client in phase.training)
    ]
    return [f"client {', '.join(found)} lost its state and begins anew"] if found else []


def unheard_of(labels: Sequence[str], ages: Sequence[int] | None) -> list[str]:
    """Say of classes that nobody has sent for 10, 100, 1,000 rounds, once each.

    Args:
        labels: names of the classes.
        ages: see :func:`pbfl_flwr.flower.server.round_records.updated_ages`.
    """
    found = [label for label, age in zip(labels, ages or [], strict=False) if age in (10, 100, 1000)]
    return [f"nobody sent these classes for 10 rounds or more: {', '.join(found)}"] if found else []


def not_scored(wanted: str, method: str, scored: Collection[str]) -> list[str]:
    """Say that nobody was scored as ``predictor`` asks.

    Args:
        wanted: the predictor.
        method: the method's name.
        scored: the predictors that there are.
    """
    if not scored or wanted in scored:
        return []
    return [
        f"predictor = '{wanted}': method '{method}' was not scored so and no round is best; there are "
        f"{', '.join(scored)}"
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
        f"made no training step, for want of samples (batch-size, drop-last; BatchNorm needs two): client "
        f"{', '.join(map(str, found))}"
    ]


def _clipped(outcome: Outcome) -> list[str]:
    found = [(outcome.reports[client].metrics or {}).get("secure-clipped", 0) for client in outcome.trained]
    return [f"{sum(found):.0f} entries of uploads were clipped to ±secure-range"] if any(found) else []
