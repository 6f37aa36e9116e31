"""The records of a round: accuracies over clients, and its lines of rounds.jsonl and clients.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.flower.messages.report import SPENT, Report
from pbfl_flwr.flower.messages.traffic import Traffic
from pbfl_flwr.flower.server import notes
from pbfl_flwr.flower.server.replies import Outcome, Phase
from pbfl_flwr.method import Method, Moment
from pbfl_flwr.payloads import Payload
from pbfl_flwr.runs.directory import finite
from pbfl_flwr.training import class_metrics


def summarise_accuracy(reports: Mapping[int, Report]) -> dict[str, dict[str, Any]]:
    """Return predictor -> accuracy over clients.

    ``weighted`` is correct samples over all samples (as in most published tables), ``mean`` the mean over clients,
    ``std`` their population standard deviation, ``worst`` the mean of the worst decile (at least one client) and
    ``clients`` the number of clients scored with this predictor. Clients without test samples are left out. If all
    clients count by class, the statistics of :func:`pbfl_flwr.training.class_metrics.statistics` are added.
    """
    found: dict[str, dict[str, Any]] = {}
    scored = {i: report for i, report in reports.items() if report.num_test}
    for name in PREDICTORS:
        with_name = [report for report in scored.values() if report.correct and name in report.correct]
        if not with_name:
            continue
        correct = np.array([(report.correct or {})[name] for report in with_name], dtype=float)
        samples = np.array([report.num_test for report in with_name], dtype=float)
        each = np.sort(correct / samples)
        worst = each[: max(1, len(each) // 10)]
        found[name] = {
            "weighted": float(correct.sum() / samples.sum()),
            "mean": float(each.mean()),
            "std": float(each.std()),
            "worst": float(worst.mean()),
            "clients": len(with_name),
        }
        counted = [report.by_class for report in with_name if report.by_class is not None]
        if len(counted) == len(with_name):
            found[name] |= class_metrics.statistics(counted, name)
    return found


def on_validation(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Return the reports that have validation samples, with their validation scores in place of test scores."""
    return {
        client: replace(report, num_test=report.num_validation, correct=report.validation, by_class=None)
        for client, report in reports.items()
        if report.num_validation
    }


def at_the_other_moment(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Return the reports of clients that were scored twice, with the scores at the other moment than the run's."""
    return {
        client: replace(report, correct=report.other, by_class=report.other_by_class)
        for client, report in reports.items()
        if report.other is not None
    }


def updated_ages(
    ages: Sequence[int] | None, classes: Mapping[int, int] | None, num_classes: int
) -> list[int] | None:
    """Return the rounds since each class was last uploaded, -1 if it never was.

    Args:
        ages: after the previous round; None in the first.
        classes: see :class:`~pbfl_flwr.flower.server.replies.Outcome`.
        num_classes: K.
    """
    if classes is None and ages is None:
        return None
    before = ages or [-1] * num_classes
    found = classes or {}
    return [found.get(label, age + 1 if age >= 0 else -1) for label, age in enumerate(before)]


def round_line(
    server_round: int,
    phase: Phase,
    outcome: Outcome,
    method: Method[Any, Any, Any],
    state: Payload,
    moment: Moment,
    aggregated: float,
    ages: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return a round's line of rounds.jsonl.

    Args:
        server_round: from 1.
        phase: the messages sent.
        outcome: the result of the phase.
        method: provides metrics and notes on its state.
        state: of the server, after aggregation.
        moment: when clients were scored.
        aggregated: seconds spent on aggregation.
        ages: rounds since each class was last uploaded; see :func:`updated_ages`.
    """
    trained = [outcome.reports[client] for client in outcome.trained]
    weights = [report.num_train for report in trained]
    names = sorted({name for report in trained for name in report.metrics or {}})
    metrics = {
        name: _mean([(report.metrics or {}).get(name) for report in trained], weights) for name in names
    }
    reports, honest = list(outcome.reports.values()), phase.honest(outcome.reports)
    seconds = {name: sum(report.seconds[i] for report in reports) for i, name in enumerate(SPENT)}
    held_out, twice = on_validation(honest), at_the_other_moment(honest)
    late = [{"client": client, **asdict(item)} for client, item in sorted(outcome.late.items())]
    return {
        "round": server_round,
        "accuracy": summarise_accuracy(honest),
        **({"validation": summarise_accuracy(held_out)} if held_out else {}),
        "accuracy_of_round": server_round - 1 if moment == "before" else server_round,
        **({"other": summarise_accuracy(twice)} if twice else {}),
        "test_loss": _mean(
            [one.test_loss for one in honest.values()], [one.num_test for one in honest.values()]
        ),
        "clients": metrics,
        "server": finite(method.report(state)),
        "trained": outcome.trained,
        **({"late": late} if late else {}),
        **({"ages": ages} if ages is not None else {}),
        "notes": [*method.round_warnings(state), *notes.upload_notes(outcome)],
        "failures": named(outcome.failures, phase.names),
        "bytes_up": _traffic(outcome.up),
        "bytes_down": _traffic(phase.down),
        "scalars": {"up": outcome.scalars_up, "down": phase.scalars_down},
        "seconds": {"total": 0.0, "aggregate": aggregated, "clients": seconds},
        "peak_mb": max((report.peak_mb for report in reports), default=0.0),
        **({"gpu_mb": gpu} if (gpu := max((report.gpu_mb for report in reports), default=0.0)) else {}),
    }


def client_columns(server_round: int, phase: Phase, outcome: Outcome) -> dict[str, Any]:
    """Return a round's line of clients.jsonl: a column for each counter, an entry for each client."""
    reports, twice = outcome.reports, at_the_other_moment(outcome.reports)
    names = {"name": [phase.names.get(client, "") for client in reports]} if phase.names else {}
    return {
        "round": server_round,
        "client": list(reports),
        **names,
        "num_train": [report.num_train for report in reports.values()],
        "num_test": [report.num_test for report in reports.values()],
        "participations": [report.participations for report in reports.values()],
        "correct": [dict(report.correct or {}) for report in reports.values()],
        "num_validation": [report.num_validation for report in reports.values()],
        "validated": [dict(report.validation or {}) for report in reports.values()],
        **({"other": [dict(report.other or {}) for report in reports.values()]} if twice else {}),
        **_counts("by_class", [report.by_class for report in reports.values()]),
        **_counts("other_by_class", [report.other_by_class for report in reports.values()]),
        "test_loss": [report.test_loss for report in reports.values()],
        "metrics": [dict(report.metrics or {}) for report in reports.values()],
        "seconds": [list(report.seconds) for report in reports.values()],
        "bytes_up": [asdict(outcome.up[client]) for client in reports],
        "bytes_down": [asdict(phase.down[client]) for client in reports],
    }


def _counts(column: str, counts: Sequence[class_metrics.ByClass | None]) -> dict[str, list[dict[str, Any]]]:
    """Return the column of counts by class, an entry for each client; no column if no client has counts."""
    if not any(counts):
        return {}
    return {column: [{} if of is None else of.brief() for of in counts]}


def final_scores(phase: Phase, outcome: Outcome) -> dict[str, Any]:
    """Return the entry "final" of the last round's line, from the scoring after the last training."""
    honest = phase.honest(outcome.reports)
    held_out = on_validation(honest)
    return {
        "accuracy": summarise_accuracy(honest),
        "failures": named(outcome.failures, phase.names),
        **({"validation": summarise_accuracy(held_out)} if held_out else {}),
    }


def named(failures: Mapping[int, str], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return failures as entries of rounds.jsonl: number, name if there is one, reason."""
    return [
        {"client": client, **({"name": names[client]} if client in names else {}), "reason": reason}
        for client, reason in failures.items()
    ]


def _traffic(per_client: Mapping[int, Traffic]) -> dict[str, int]:
    return asdict(sum(per_client.values(), Traffic()))


def _mean(values: list[float | None], weights: list[int]) -> float | None:
    """Return the weighted mean of the values that are not None; None if there are none or it is not finite (JSON)."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in pairs)
    if not total:
        return None
    mean = math.fsum(value * weight for value, weight in pairs) / total
    return mean if math.isfinite(mean) else None
