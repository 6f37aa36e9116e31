"""The books of a round: what was sent, what came back, who failed and why, and the lines of the history."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message

from pbfl_flwr.flower import wire
from pbfl_flwr.flower.history import finite, on_validation, summarise
from pbfl_flwr.flower.roster import LONGEST_REASON, reason_of
from pbfl_flwr.method import Method, Moment
from pbfl_flwr.payloads import Payload, RejectedPayload
from pbfl_flwr.task import Task


@dataclass(frozen=True)
class Phase:
    """What was sent in a phase and is waited for.

    Flower fills in the ids of messages when it sends, on these very objects; they are read when replies come.
    """

    messages: list[tuple[Message, int]]  # with the client each one went to
    training: set[int]
    down: dict[int, wire.Traffic]
    scalars_down: int
    started: float
    names: dict[int, str] = field(default_factory=dict)  # of the clients that have one


class Uploads(Mapping[int, Payload]):
    """Uploads that were found valid, in ascending client order, decoded each time one is asked for.

    So the server holds the bytes that Flower handed over and one upload at a time beside them.
    """

    def __init__(self, records: Mapping[int, ArrayRecord], kind: type[Payload], task: Task) -> None:
        self._records, self._kind, self._task = dict(sorted(records.items())), kind, task

    def __getitem__(self, client: int) -> Payload:
        return wire.decode(self._records[client], self._kind, self._task)

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


@dataclass
class Outcome:
    """What came of a phase."""

    uploads: Mapping[int, Payload] = field(default_factory=dict)
    reports: dict[int, wire.Report] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    up: dict[int, wire.Traffic] = field(default_factory=dict)
    scalars_up: int = 0


def read(
    replies: list[Message],
    phase: Phase,
    method: Method[Any, Any, Any],
    state: Any,
    task: Task,
    max_bytes: int = wire.MAX_BYTES,
) -> Outcome:
    """Decode and validate every reply; a bad one costs its own client only.

    Args:
        replies: as Flower hands them over, in any order.
        phase: what was sent.
        method: decodes and validates uploads.
        state: of the server, before aggregation.
        task: what all clients agree on.
        max_bytes: of one reply; larger ones are refused unread.
    """
    uploads: dict[int, Payload] = {}
    records: dict[int, ArrayRecord] = {}
    streams = method.streams()
    by_client = wire.ordered(replies, {m.metadata.message_id: client for m, client in phase.messages})
    outcome = Outcome()
    for _, client in phase.messages:
        reply = by_client.get(client)
        if reply is None:
            waited = time.perf_counter() - phase.started
            outcome.failures[client] = f"no answer within {waited:.0f} s"
            continue
        if reply.has_error():
            outcome.failures[client] = reason_of(reply)
            continue
        upload: Payload | None = None
        try:
            report = _report_of(reply, max_bytes)
            if client in phase.training:
                upload = _upload_of(reply, method, state, task)
            scalars = upload.scalars() if upload is not None else 0
            traffic = wire.weigh(reply)
        except RejectedPayload as error:
            outcome.failures[client] = f"upload rejected: {error}"[:LONGEST_REASON]
        except Exception as error:  # the boundary: whatever a client sends must not end the others' run
            frame = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_REASON]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            outcome.failures[client] = f"upload rejected: {said} ({where})"
        else:
            outcome.up[client], outcome.reports[client] = traffic, report
            outcome.scalars_up += scalars
            if upload is not None and streams:
                records[client] = reply.content.array_records[wire.PAYLOAD]
            elif upload is not None:
                uploads[client] = upload
    outcome.uploads = Uploads(records, method.up, task) if streams else uploads
    return outcome


def round_line(
    server_round: int,
    phase: Phase,
    outcome: Outcome,
    method: Method[Any, Any, Any],
    state: Any,
    moment: Moment,
    aggregated: float,
) -> dict[str, Any]:
    """Return a round's line of rounds.jsonl.

    Args:
        server_round: from 1.
        phase: what was sent.
        outcome: what came back.
        method: reports on its state.
        state: of the server, after aggregation.
        moment: when clients were scored.
        aggregated: seconds that the aggregation took.
    """
    trained = [outcome.reports[client] for client in outcome.uploads]
    weights = [report.num_train for report in trained]
    names = sorted({name for report in trained for name in report.metrics or {}})
    metrics = {
        name: _mean([(report.metrics or {}).get(name) for report in trained], weights) for name in names
    }
    reports = list(outcome.reports.values())
    seconds = {name: sum(report.seconds[i] for report in reports) for i, name in enumerate(wire.SPENT)}
    held_out = on_validation(outcome.reports)
    return {
        "round": server_round,
        "accuracy": summarise(outcome.reports),
        **({"validation": summarise(held_out)} if held_out else {}),
        "accuracy_of_round": server_round - 1 if moment == "before" else server_round,
        "test_loss": _mean([report.test_loss for report in reports], [report.num_test for report in reports]),
        "clients": metrics,
        "server": finite(method.report(state)),
        "trained": sorted(outcome.uploads),
        "notes": [*method.notes(state), *_held_back(outcome), *_clipped(outcome)],
        "failures": named(outcome.failures, phase.names),
        "bytes_up": _traffic(outcome.up),
        "bytes_down": _traffic(phase.down),
        "scalars": {"up": outcome.scalars_up, "down": phase.scalars_down},
        "seconds": {"total": 0.0, "aggregate": aggregated, "clients": seconds},
        "peak_mb": max((report.peak_mb for report in reports), default=0.0),
    }


def client_columns(server_round: int, phase: Phase, outcome: Outcome) -> dict[str, Any]:
    """Return a round's line of clients.jsonl: one column a counter, one entry a client."""
    reports = outcome.reports
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
        "test_loss": [report.test_loss for report in reports.values()],
        "metrics": [dict(report.metrics or {}) for report in reports.values()],
        "seconds": [list(report.seconds) for report in reports.values()],
        "bytes_up": [asdict(outcome.up[client]) for client in reports],
        "bytes_down": [asdict(phase.down[client]) for client in reports],
    }


def _held_back(outcome: Outcome) -> list[str]:
    found = [(outcome.reports[client].metrics or {}).get("held-back", 0) for client in outcome.uploads]
    if not any(found):
        return []
    return [
        f"classes held back for having fewer samples than min-class-count: {sum(found):.0f}, on "
        f"{sum(classes > 0 for classes in found)} of {len(found)} clients"
    ]


def _clipped(outcome: Outcome) -> list[str]:
    found = [(outcome.reports[client].metrics or {}).get("secure-clipped", 0) for client in outcome.uploads]
    return [f"{sum(found):.0f} entries of uploads were clipped to ±secure-range"] if any(found) else []


def _upload_of(reply: Message, method: Method[Any, Any, Any], state: Any, task: Task) -> Payload:
    if wire.PAYLOAD not in reply.content.array_records:
        raise RejectedPayload("its payload is missing")
    upload: Payload = wire.decode(reply.content.array_records[wire.PAYLOAD], method.up, task)
    method.validate(upload, state, task)
    return upload


def _report_of(reply: Message, max_bytes: int) -> wire.Report:
    if not reply.has_content() or wire.METRICS not in reply.content.metric_records:
        raise RejectedPayload("its report is missing")
    wire.check_content(reply.content, max_bytes)
    return wire.Report.from_record(reply.content.metric_records[wire.METRICS])


def _traffic(per_client: Mapping[int, wire.Traffic]) -> dict[str, int]:
    return asdict(sum(per_client.values(), wire.Traffic()))


def named(failures: Mapping[int, str], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return failures as the history writes them: number, name where there is one, reason."""
    return [
        {"client": client, **({"name": names[client]} if client in names else {}), "reason": reason}
        for client, reason in failures.items()
    ]


def _mean(values: list[float | None], weights: list[int]) -> float | None:
    """Return the weighted mean of what is there; None if nothing is, since JSON knows no NaN."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in pairs)
    if not total:
        return None
    mean = math.fsum(value * weight for value, weight in pairs) / total
    return mean if math.isfinite(mean) else None
