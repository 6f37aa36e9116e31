"""What came of a phase: its replies decoded, checked and sorted by client, and who failed and why."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from pbfl_flwr.errors import LONGEST, pointed, printable
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.messages.traffic import Traffic, weigh
from pbfl_flwr.flower.server.late_replies import OverdueReply
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Mixtures, Payload, Prototypes, RejectedPayload, WeightsAndPrototypes
from pbfl_flwr.task import Task


@dataclass(frozen=True)
class Phase:
    """What was sent in a phase and is waited for.

    Flower fills in the ids of messages when it sends, on these very objects; they are read when replies come.
    """

    messages: list[tuple[Message, int]]  # with the client each one went to
    training: set[int]
    down: dict[int, Traffic]
    scalars_down: int
    started: float
    names: dict[int, str] = field(default_factory=dict)  # of the clients that have one
    number: int = 0  # of the round
    absent: dict[int, str] = field(default_factory=dict)  # who was not asked, and why
    malicious: frozenset[int] = frozenset()  # who lies on purpose

    def called(self, client: int) -> str:
        """How a person calls a client: its name, or its number."""
        return self.names.get(client, str(client))

    def honest(self, reports: Mapping[int, Report]) -> dict[int, Report]:
        """Return the reports without those of malicious clients: what accuracies are taken over."""
        return {client: report for client, report in reports.items() if client not in self.malicious}

    def unanswered(self, replies: Iterable[Message]) -> dict[str, OverdueReply]:
        """Return the questions that have no answer yet, by message id."""
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        return {
            question.metadata.message_id: OverdueReply(client, self.number, client in self.training)
            for question, client in self.messages
            if question.metadata.message_id not in answered
        }


class Uploads(Mapping[int, Payload]):
    """Uploads that were found valid, in ascending client order, decoded each time one is asked for.

    So the server holds the bytes that Flower handed over and one upload at a time beside them.
    """

    def __init__(self, records: Mapping[int, ArrayRecord], kind: type[Payload], task: Task) -> None:
        self._records, self._kind, self._task = dict(sorted(records.items())), kind, task

    def __getitem__(self, client: int) -> Payload:
        return wire.decode(self._records[client], self._kind, self._task, again=True)

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


@dataclass(frozen=True)
class Late:
    """An upload of an earlier round: which one, what it counts, and why nothing if so."""

    round: int
    weight: float
    reason: str = ""


@dataclass
class Outcome:
    """What came of a phase.

    Attributes:
        uploads: what is aggregated, by client.
        reports: of the clients that did what they were asked.
        failures: why the others did not.
        late: uploads of earlier rounds, also those that count nothing.
        up: bytes that came, also of what was rejected or came too late to count.
        scalars_up: numbers that carry information.
        classes: class -> how many rounds late its latest upload is, 0 for one of this round; None where uploads have no
            classes.
    """

    uploads: Mapping[int, Payload] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    late: dict[int, Late] = field(default_factory=dict)
    up: dict[int, Traffic] = field(default_factory=dict)
    scalars_up: int = 0
    classes: dict[int, int] | None = None

    @property
    def trained(self) -> list[int]:
        """The clients that trained in this round and whose uploads are aggregated."""
        return [client for client in self.uploads if client in self.reports]

    @property
    def shares(self) -> dict[int, float]:
        """What late uploads count."""
        return {client: self.late[client].weight for client in self.uploads if client not in self.reports}


@dataclass(frozen=True)
class _Answer:
    report: Report
    upload: Payload | None
    traffic: Traffic


@dataclass(frozen=True)
class _Rejected:
    reason: str
    traffic: Traffic


@dataclass(frozen=True)
class _Reader:
    """Decodes and validates replies."""

    method: Method[Any, Any, Any]
    state: Payload
    task: Task
    max_bytes: int
    classes: int

    def weigh(self, reply: Message) -> Traffic | _Rejected:
        """Return a reply's bytes, or why they cannot be counted."""
        try:
            return weigh(reply)
        except Exception as error:  # the boundary, as below
            return _Rejected(f"upload rejected: {rejection_reason(error)}", Traffic())

    def read(self, reply: Message, training: bool, traffic: Traffic | _Rejected) -> _Answer | _Rejected:
        """Return what a reply of so many bytes holds, or why it is rejected."""
        if isinstance(traffic, _Rejected):
            return traffic
        try:
            report, upload = _report_of(reply, self.max_bytes, self.classes), None
            if training:
                upload = _upload_of(reply, self.method, self.state, self.task)
            return _Answer(report, upload, traffic)
        except Exception as error:  # the boundary: whatever a client sends must not end the others' run
            return _Rejected(f"upload rejected: {rejection_reason(error)}", traffic)


@dataclass
class _Intake:
    """Sorts what was read into what is aggregated, what failed, and what came too late.

    Attributes:
        phase: what was sent.
        task: what all clients agree on.
        streams: whether uploads are decoded again when their turn comes, and not held until then.
        stale_weight: 0 leaves uploads of earlier rounds out.
        outcome: so far.
    """

    phase: Phase
    task: Task
    streams: bool
    stale_weight: float
    outcome: Outcome = field(default_factory=Outcome)
    _uploads: dict[int, Payload] = field(default_factory=dict)
    _records: dict[int, ArrayRecord] = field(default_factory=dict)
    _fresh: set[int] = field(default_factory=set)  # classes of which something of this round came

    def take(self, client: int, reply: Message, found: _Answer | _Rejected) -> None:
        """Take what a client answered in time, which may be its upload of an earlier round."""
        outcome, number = self.outcome, self.phase.number
        self._count(client, found.traffic)
        if isinstance(found, _Rejected):
            outcome.failures[client] = found.reason
            return
        answered = found.report.round or number
        if found.upload is None or answered == number:
            outcome.reports[client] = found.report
            if found.upload is not None:
                self._keep(client, reply, found.upload, 0)
        elif self.stale_weight == 0 or answered > number:
            outcome.failures[client] = f"answered with its upload of round {answered}, asked for {number}"
        else:
            self._keep_late(client, reply, found, answered)

    def take_late(self, overdue: OverdueReply, reply: Message, found: _Answer | _Rejected) -> None:
        """Take what came of a client's debt, after its round."""
        self._count(overdue.client, found.traffic)
        of = overdue.round if isinstance(found, _Rejected) else found.report.round or overdue.round
        if of > overdue.round:
            found = _Rejected(
                f"answered with its upload of round {of}, asked for {overdue.round}", found.traffic
            )
        self._keep_late(overdue.client, reply, found, min(of, overdue.round))

    def close(self, kind: type[Payload]) -> None:
        """Hand the uploads over, which are of this kind, in ascending client order."""
        if self.streams:
            self.outcome.uploads = Uploads(self._records, kind, self.task)
        else:
            self.outcome.uploads = dict(sorted(self._uploads.items()))

    def _count(self, client: int, traffic: Traffic) -> None:
        self.outcome.up[client] = self.outcome.up.get(client, Traffic()) + traffic

    def _keep(self, client: int, reply: Message, upload: Payload, age: int) -> None:
        outcome, fresh = self.outcome, self._fresh
        outcome.scalars_up += upload.scalars()
        if len(fresh) < self.task.num_classes and (held := _classes(upload, self.task)) is not None:
            known = outcome.classes = outcome.classes or {}
            known.update({label: age for label in held if known.get(label, age + 1) > age})
            fresh.update(held if age == 0 else ())
        if self.streams:
            self._records[client] = wire.payload_in(reply.content)
        else:
            self._uploads[client] = upload

    def _keep_late(self, client: int, reply: Message, found: _Answer | _Rejected, server_round: int) -> None:
        outcome, weight, age = self.outcome, 0.0, self.phase.number - server_round
        if isinstance(found, _Rejected):
            reason = found.reason
        elif client in outcome.reports or client in outcome.late:
            reason = "a newer one came"
        elif self.stale_weight == 0:
            reason = "stale-weight is 0"
        else:
            weight, reason = self.stale_weight**age, ""
            if found.upload is not None:
                self._keep(client, reply, found.upload, age)
        outcome.late.setdefault(client, Late(server_round, weight, reason))


def rejection_reason(error: Exception) -> str:
    """Return in one line why a client's answer is refused; of what our checks did not foresee, where it was raised."""
    if isinstance(error, RejectedPayload):
        return printable(str(error)[:LONGEST])
    return pointed(error)


def read(
    replies: list[Message],
    phase: Phase,
    method: Method[Any, Any, Any],
    state: Payload,
    task: Task,
    max_bytes: int = wire.MAX_BYTES,
    late: Sequence[tuple[OverdueReply, Message]] = (),
    stale_weight: float = 0.0,
    classes: int = 0,
) -> Outcome:
    """Decode and validate every reply; a bad one costs its own client only.

    An upload of an earlier round, in an answer that came late or in one that a client gave instead of training, counts
    stale_weight^age, unless the client sent one of this round as well.

    Args:
        replies: as Flower hands them over, in any order.
        phase: what was sent.
        method: decodes and validates uploads.
        state: of the server, before aggregation.
        task: what all clients agree on.
        max_bytes: of one reply; larger ones are refused unread.
        late: answers to earlier rounds, the newest first.
        stale_weight: 0 leaves uploads of earlier rounds out.
        classes: K, where reports must count by class; 0: those counts are not looked at.
    """
    reader = _Reader(method, state, task, max_bytes, classes)
    intake = _Intake(phase, task, method.streams(), stale_weight)
    by_client = wire.ordered(replies, {m.metadata.message_id: client for m, client in phase.messages})
    # All are weighed before one is decoded: a processor keeps the code of one task at hand, not of both.
    weighed = {client: reader.weigh(reply) for client, reply in by_client.items()}
    for _, client in phase.messages:
        reply = by_client.get(client)
        if reply is None:
            waited = time.perf_counter() - phase.started
            intake.outcome.failures[client] = f"no answer within {waited:.0f} s"
        elif reply.has_error():
            intake.outcome.failures[client] = error_reason(reply)
        else:
            intake.take(client, reply, reader.read(reply, client in phase.training, weighed[client]))
    intake.outcome.failures |= phase.absent
    for overdue, reply in late:
        if overdue.training and not reply.has_error():
            intake.take_late(overdue, reply, reader.read(reply, True, reader.weigh(reply)))
    intake.close(method.up)
    return intake.outcome


def _classes(upload: Payload, task: Task) -> list[int] | None:
    """Return the classes that an upload brings something for, None if it is not made of classes."""
    table = upload.prototypes if isinstance(upload, WeightsAndPrototypes) else upload
    if isinstance(table, Prototypes):  # in a dense upload, rows of absent classes are sent as zeros
        found = table.present & (table.values != 0).any(dim=1)
    elif isinstance(table, Mixtures):
        found = table.present(task.num_classes)
    else:
        return None
    labels: list[int] = found.nonzero().flatten().tolist()
    return labels


def _upload_of(reply: Message, method: Method[Any, Any, Any], state: Payload, task: Task) -> Payload:
    upload: Payload = wire.decode(wire.payload_in(reply.content), method.up, task)
    method.validate(upload, state, task)
    return upload


def _report_of(reply: Message, max_bytes: int, classes: int) -> Report:
    record = reply.content.get(wire.METRICS) if reply.has_content() else None
    if not isinstance(record, MetricRecord):
        raise RejectedPayload("its report is missing")
    wire.check_content(reply.content, max_bytes)
    return Report.from_record(record, classes)


def error_reason(reply: Message) -> str:
    """Return the readable line of an error reply: ours as it is, of a traceback the last line."""
    if worker_died(reply):
        return "its simulation worker died"
    text = reply.error.reason or ""
    lines = [said for line in text.splitlines() if (said := printable(line).strip())]
    if not lines:
        return f"error code {reply.error.code}"
    return (lines[-1] if "Traceback" in text else "; ".join(lines))[:LONGEST]


def worker_died(reply: Message) -> bool:
    """Whether Ray lost the process that ran the client; Flower keeps such a worker in its pool for ever."""
    text = reply.error.reason or ""
    return "ray.exceptions." in text and (
        "ActorDied" in text or "ActorUnavailable" in text or "RayActorError" in text
    )
