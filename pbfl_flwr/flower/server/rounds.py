"""What a round leaves behind: its records, made once from the plan, the replies and the aggregated state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pbfl_flwr.config import in_order
from pbfl_flwr.flower.messages.report import SPENT, Report
from pbfl_flwr.flower.messages.traffic import NO_BYTES
from pbfl_flwr.flower.server.replies import Replies
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.method import Moment
from pbfl_flwr.payloads import Serializable
from pbfl_flwr.runs.directory import finite
from pbfl_flwr.runs.records import (
    Accuracies,
    Accuracy,
    Bytes,
    ClientsRecord,
    Failure,
    FinalScores,
    RoundRecord,
    Scalars,
    Seconds,
)
from pbfl_flwr.training import class_metrics


@dataclass(frozen=True)
class FinishedRound:
    """A checked round, before it is committed.

    Attributes:
        record: its line of rounds.jsonl.
        clients: its line of clients.jsonl.
        state: of the server after aggregation.
    """

    record: RoundRecord
    clients: ClientsRecord
    state: Serializable


# Scores over clients --------------------------------------------------------------------------------------------


def summarise_accuracy(reports: Mapping[int, Report]) -> dict[str, Accuracy]:
    """Return predictor -> accuracy over clients.

    Clients without test samples are left out. If all clients count by class, the statistics of
    :func:`pbfl_flwr.training.class_metrics.statistics` are added; likewise areas under the ROC curve.
    """
    accuracies: dict[str, Accuracy] = {}
    with_tests = [report for report in reports.values() if report.num_test]
    for name in in_order(name for report in with_tests for name in report.correct or ()):
        with_name = [report for report in with_tests if report.correct and name in report.correct]
        correct = np.array([(report.correct or {})[name] for report in with_name], dtype=float)
        samples = np.array([report.num_test for report in with_name], dtype=float)
        shares = np.sort(correct / samples)
        counted = [report.by_class for report in with_name if report.by_class is not None]
        by_class = class_metrics.statistics(counted, name) if len(counted) == len(with_name) else {}
        accuracies[name] = Accuracy(
            weighted=float(correct.sum() / samples.sum()),
            mean=float(shares.mean()),
            std=float(shares.std()),
            worst=float(shares[: max(1, len(shares) // 10)].mean()),
            clients=len(with_name),
            **by_class,
            **_mean_areas(with_name, name),
        )
    return accuracies


def _mean_areas(reports: Sequence[Report], name: str) -> dict[str, float | None]:
    areas = [report.areas[name] for report in reports if report.areas]
    if len(areas) < len(reports):
        return {}
    samples = [report.num_test for report in reports]
    macro, micro = ([getattr(area, kind) for area in areas] for kind in ("macro", "micro"))
    return {"auc_macro": _mean(macro, samples), "auc_micro": _mean(micro, samples)}


def on_validation(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Return the reports that have validation samples, with their validation scores in place of test scores."""
    return {
        client: replace(
            report, num_test=report.num_validation, correct=report.validation, by_class=None, areas=None
        )
        for client, report in reports.items()
        if report.num_validation
    }


def scores(replies: Replies) -> Accuracies:
    """Return the accuracies over the clients that replied."""
    reports = replies.reports
    return Accuracies(
        accuracy=summarise_accuracy(reports), validation=summarise_accuracy(on_validation(reports))
    )


def updated_ages(
    ages: Sequence[int] | None, classes: Collection[int] | None, num_classes: int
) -> list[int] | None:
    """Return the rounds since each class was last uploaded, -1 if it never was.

    ``ages`` are those after the previous round, None in the first; ``classes`` as in
    :class:`~pbfl_flwr.flower.server.replies.Replies`.
    """
    if classes is None and ages is None:
        return None
    uploaded = classes or ()
    return [
        0 if label in uploaded else age + 1 if age >= 0 else -1
        for label, age in enumerate(ages or [-1] * num_classes)
    ]


# Records ----------------------------------------------------------------------------------------------------


def round_fields(
    replies: Replies,
    moment: Moment,
    server_metrics: Mapping[str, float],
    aggregated: float,
    total: float,
    final: Replies | None = None,
    lost: tuple[Bytes, Bytes] = (NO_BYTES, NO_BYTES),
) -> dict[str, Any]:
    """Return the fields of a RoundRecord, except warnings, ages of classes and joined clients.

    ``aggregated`` and ``total`` are seconds; ``final`` is the scoring after the last training, if there was one;
    ``lost`` are bytes, up and down, of replies to earlier rounds and of failed tries of this one.
    """
    phase = replies.phase
    trained = [replies.reports[client] for client in replies.trained]
    samples = [report.num_train for report in trained]
    names = sorted({name for report in trained for name in report.metrics or {}})
    reports = list(replies.reports.values())
    return {
        "round": phase.number,
        **dict(scores(replies)),
        "accuracy_of_round": phase.number - 1 if moment == "before" else phase.number,
        "test_loss": _mean(
            [report.test_loss if report.correct else None for report in reports],
            [report.num_test for report in reports],
        ),
        "client_metrics": {
            name: _mean([(report.metrics or {}).get(name) for report in trained], samples) for name in names
        },
        "server_metrics": finite(server_metrics),
        "trained": replies.trained,
        "failures": failures(replies),
        "bytes_up": sum(replies.up.values(), lost[0]),
        "bytes_down": sum(phase.down.values(), lost[1]),
        "scalars": Scalars(up=replies.scalars_up, down=phase.scalars_down),
        "seconds": Seconds(
            total=total,
            aggregate=aggregated,
            clients={step: sum(column) for step, column in _seconds(reports).items()},
        ),
        "peak_mb": max((report.peak_mb for report in reports), default=0.0),
        "gpu_mb": max((report.gpu_mb for report in reports), default=0.0),
        "final": final and FinalScores(**dict(scores(final)), failures=failures(final)),
    }


def failures(replies: Replies) -> list[Failure]:
    """Return the clients that did not complete their task, with the reasons."""
    names = replies.phase.names
    return [
        Failure(client=client, name=names.get(client, ""), reason=reason)
        for client, reason in replies.failures.items()
    ]


def clients_record(
    replies: Replies, participations: Mapping[int, int], final: Replies | None = None
) -> ClientsRecord:
    """Return a round's line of clients.jsonl: a column for each counter, an entry for each client.

    ``participations``: client -> rounds trained in before, for clients that keep no count themselves.
    """
    phase, reports = replies.phase, replies.reports
    trained_in = {
        client: report.participations or participations.get(client, 0) + (client in phase.training)
        for client, report in reports.items()
    }
    counted = any(report.by_class for report in reports.values())
    validated = any(report.num_validation for report in reports.values())

    def column(value: Callable[[Report], Any]) -> list[Any]:
        return [value(report) for report in reports.values()]

    return ClientsRecord(
        round=phase.number,
        client=list(reports),
        num_train=column(lambda report: report.num_train),
        num_test=column(lambda report: report.num_test),
        participations=[*trained_in.values()],
        correct=column(lambda report: dict(report.correct or {})),
        num_validation=column(lambda report: report.num_validation) if validated else [],
        correct_validation=column(lambda report: dict(report.validation or {})) if validated else [],
        by_class=column(lambda report: report.by_class.brief() if report.by_class else {}) if counted else [],
        test_loss=column(lambda report: report.test_loss if report.correct else None),
        metrics=column(lambda report: dict(report.metrics or {})),
        seconds=_seconds(reports.values()),
        final=final and clients_record(final, {**participations, **trained_in}),
    )


def _seconds(reports: Collection[Report]) -> dict[str, list[float]]:
    """Return step -> a column with the seconds of each client."""
    return {step: [report.seconds.get(step, 0.0) for report in reports] for step in SPENT}


def _mean(values: list[float | None], weights: list[int]) -> float | None:
    """Return the weighted mean of the values that are not None; None if there are none or it is not finite (JSON)."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in pairs)
    if not total:
        return None
    mean = math.fsum(value * weight for value, weight in pairs) / total
    return mean if math.isfinite(mean) else None


# Warnings ---------------------------------------------------------------------------------------------------


def warnings(
    replies: Replies,
    participations: Mapping[int, int],
    reported: Mapping[int, int],
    ages: Sequence[int] | None,
    roster: Roster,
    keeps_nothing: bool,
) -> list[str]:
    """Return the warnings about a round's clients.

    ``participations``, ``reported`` and ``keeps_nothing`` as in :func:`replaced_states`, ``ages`` as
    :func:`updated_ages` returns them.
    """
    labels = next(iter(roster.clients.values())).labels
    return [
        *upload_warnings(replies),
        *replaced_states(replies, participations, reported, keeps_nothing),
        *missing_classes(labels, ages),
    ]


def upload_warnings(replies: Replies) -> list[str]:
    """Return warnings about the clients that trained: classes held back, no training steps."""
    metrics = {client: replies.reports[client].metrics or {} for client in replies.trained}
    withheld = [reported.get("held-back", 0) for reported in metrics.values()]
    idle = [client for client, reported in metrics.items() if reported.get("idle")]
    warnings = []
    if any(withheld):
        warnings.append(
            f"classes held back for having fewer samples than min-class-count: {sum(withheld):.0f}, on "
            f"{sum(classes > 0 for classes in withheld)} of {len(withheld)} clients"
        )
    if idle:
        warnings.append(
            f"made no training step, too few samples (batch-size, drop-last; BatchNorm needs two): client "
            f"{', '.join(map(str, idle))}"
        )
    return warnings


def replaced_states(
    replies: Replies,
    participations: Mapping[int, int],
    reported: Mapping[int, int],
    keeps_nothing: bool = False,
) -> list[str]:
    """Return warnings about clients whose number of trained rounds does not follow from the one they reported last.

    ``participations``: client -> rounds trained in, as last reported; ``reported``: client -> the round of that report;
    ``keeps_nothing``: clients may keep no count.
    """
    phase = replies.phase
    lost: list[str] = []
    older: list[tuple[str, int, int]] = []
    newer: list[tuple[str, int, int]] = []
    for client, report in replies.reports.items():
        if client not in participations or (keeps_nothing and not report.participations):
            continue
        label, count, trains = phase.client_label(client), report.participations, client in phase.training
        least = participations[client] + trains
        # It counts rounds whose answer was lost, too.
        most = participations[client] + phase.number - reported[client]
        if count < least and count == trains:
            lost.append(label)
        elif count < least:
            older.append((label, count, least))
        elif count > most:
            newer.append((label, count, most))
    notes = [f"client {', '.join(lost)} lost its state and starts from scratch"] if lost else []
    if older:
        labels, counts, expected = _columns(older)
        notes.append(
            f"client {labels} went back to an older state: {counts} rounds trained instead of {expected}"
        )
    if newer:
        labels, counts, expected = _columns(newer)
        notes.append(
            f"client {labels} went on from a state unknown here: {counts} rounds trained instead of at most "
            f"{expected}; a second device may have its key"
        )
    return notes


def changed_data(replies: Replies, samples: Mapping[int, tuple[int, int]]) -> list[str]:
    """Return a warning about clients with other numbers of samples than ``samples``, which they reported last."""
    changed = [
        replies.phase.client_label(client)
        for client, report in replies.reports.items()
        if (now := (report.num_train, report.num_test)) != samples.get(client, now)
    ]
    return [
        f"client {', '.join(changed)} has another number of samples than before: if its split into training and test "
        "samples is drawn, it is another one now, and test samples may have been trained on"
    ] * bool(changed)


def _columns(rows: Sequence[tuple[str, int, int]]) -> list[str]:
    return [", ".join(map(str, column)) for column in zip(*rows, strict=True)]


def missing_classes(labels: Sequence[str], ages: Sequence[int] | None) -> list[str]:
    """Return a warning about classes that no client has uploaded for exactly 10, 100 or 1,000 rounds."""
    missing = [label for label, age in zip(labels, ages or [], strict=False) if age in (10, 100, 1000)]
    return [f"no client sent these classes for 10 rounds or more: {', '.join(missing)}"] if missing else []


def not_scored(predictor: str, method: str, accuracy: Mapping[str, Accuracy]) -> list[str]:
    """Return a warning if clients were scored, but not with the configured predictor."""
    if not accuracy or predictor in accuracy:
        return []
    return [
        f"predictor = '{predictor}': method '{method}' has no scores of it, so there is no best round; there are "
        f"scores of {', '.join(accuracy)}"
    ]
