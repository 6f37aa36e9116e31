"""The replies of a phase, decoded and validated; an invalid one only affects its own client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from pbfl_flwr.errors import LONGEST, format_exception, printable
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import TOTALS, Report, Requested
from pbfl_flwr.flower.messages.traffic import Traffic, weigh
from pbfl_flwr.flower.server.exchange import LateReply, OverdueReply, Phase
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Payload, RejectedPayload, Serializable, Upload
from pbfl_flwr.payloads.contract import Sizes
from pbfl_flwr.payloads.plausibility import NO_LIMITS, Plausibility
from pbfl_flwr.runs.records import LateUpload
from pbfl_flwr.task import Task


class Uploads(Mapping[int, Payload]):
    """Valid uploads in ascending client order, decoded at each access.

    So the server holds the received bytes and only one decoded upload at a time.
    """

    def __init__(self, records: Mapping[int, ArrayRecord], kind: type[Payload], task: Task) -> None:
        self._records, self._kind, self._task = dict(sorted(records.items())), kind, task

    def __getitem__(self, client: int) -> Payload:
        return wire.decode(self._records[client], self._kind, self._task, again=True)

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


@dataclass
class Outcome:
    """The result of a phase.

    Attributes:
        uploads: client -> upload to aggregate.
        reports: of the clients that completed their task.
        failures: client -> reason, for the others.
        late: uploads of earlier rounds, including those of weight 0.
        up: bytes received, including rejected and late replies.
        scalars_up: numbers that carry information.
        classes: class -> age in rounds of its latest upload, 0 for one of this round; None if uploads are not by class.
    """

    uploads: Mapping[int, Payload] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    late: dict[int, LateUpload] = field(default_factory=dict)
    up: dict[int, Traffic] = field(default_factory=dict)
    scalars_up: int = 0
    classes: dict[int, int] | None = None

    @property
    def trained(self) -> list[int]:
        """The clients that trained in this round and whose uploads are aggregated."""
        return [client for client in self.uploads if client in self.reports]

    @property
    def shares(self) -> dict[int, float]:
        """Client -> weight of its late upload."""
        return {client: self.late[client].weight for client in self.uploads if client not in self.reports}


@dataclass(frozen=True)
class _ValidReply:
    report: Report
    upload: Upload | None
    traffic: Traffic


@dataclass(frozen=True)
class _RejectedReply:
    reason: str
    traffic: Traffic


@dataclass(frozen=True)
class _Reader:
    """Decodes and validates replies."""

    method: Method[Any, Any, Any]
    state: Serializable
    task: Task
    max_bytes: int
    requested: Requested

    def weigh(self, reply: Message) -> Traffic | _RejectedReply:
        """Return the size of a reply, or a rejection if it cannot be determined."""
        try:
            return weigh(reply)
        except Exception as error:  # trust boundary, as below
            return _RejectedReply(f"upload rejected: {rejection_reason(error)}", Traffic())

    def read(
        self, reply: Message, training: bool, traffic: Traffic | _RejectedReply
    ) -> _ValidReply | _RejectedReply:
        """Return the decoded reply, whose size is ``traffic``, or a rejection."""
        if isinstance(traffic, _RejectedReply):
            return traffic
        try:
            report, upload = _report_of(reply, self.max_bytes, self.requested), None
            if training:
                upload = _upload_of(reply, self.method, self.state, self.task)
            return _ValidReply(report, upload, traffic)
        except Exception as error:  # trust boundary: no client's reply may end the run
            return _RejectedReply(f"upload rejected: {rejection_reason(error)}", traffic)


@dataclass(frozen=True)
class _Accepted:
    """A valid upload: its encoding, the payload unless the method streams, and what the outcome needs of it."""

    encoded: ArrayRecord
    payload: Payload | None
    age: int
    scalars: int
    classes: list[int] | None
    sizes: Sizes
    reported: int


@dataclass
class _Intake:
    """Sorts decoded replies into uploads to aggregate, failures, and late uploads.

    Attributes:
        phase: the messages sent.
        task: what all clients agree on.
        streams: whether uploads are decoded again during aggregation instead of being kept.
        stale_weight: base of a late upload's weight; 0 excludes late uploads.
        plausibility: limits that apply once all uploads are known.
        outcome: the result so far.
    """

    phase: Phase
    task: Task
    streams: bool
    stale_weight: float
    plausibility: Plausibility
    outcome: Outcome = field(default_factory=Outcome)
    _accepted: dict[int, _Accepted] = field(default_factory=dict)

    def add(self, client: int, reply: Message, content: _ValidReply | _RejectedReply) -> None:
        """Add a reply that arrived in time; it may hold the client's upload of an earlier round."""
        outcome, number = self.outcome, self.phase.number
        self._count(client, content.traffic)
        if isinstance(content, _RejectedReply):
            outcome.failures[client] = content.reason
            return
        uploaded = content.report.round or number
        if content.upload is None or uploaded == number:
            outcome.reports[client] = content.report
            if content.upload is not None:
                self._accept(client, reply, content.report, content.upload, 0)
        elif self.stale_weight == 0 or uploaded > number:
            outcome.failures[client] = f"sent its upload of round {uploaded} instead of round {number}"
        else:
            self._accept_late(client, reply, content, uploaded)

    def add_late(self, overdue: OverdueReply, reply: Message, content: _ValidReply | _RejectedReply) -> None:
        """Add a reply that arrived after the deadline of its round."""
        self._count(overdue.client, content.traffic)
        uploaded = (
            overdue.round if isinstance(content, _RejectedReply) else content.report.round or overdue.round
        )
        if uploaded > overdue.round:
            content = _RejectedReply(
                f"sent its upload of round {uploaded} instead of round {overdue.round}", content.traffic
            )
        self._accept_late(overdue.client, reply, content, min(uploaded, overdue.round))

    def close(self, kind: type[Payload]) -> None:
        """Drop implausible uploads; set the outcome's uploads, of type ``kind``, in ascending client order."""
        self._drop_implausible()
        outcome, uploads = self.outcome, dict(sorted(self._accepted.items()))
        for upload in uploads.values():
            outcome.scalars_up += upload.scalars
            if upload.classes is not None:
                ages = outcome.classes = outcome.classes or {}
                ages.update({label: min(upload.age, ages.get(label, upload.age)) for label in upload.classes})
        if self.streams:
            records = {client: upload.encoded for client, upload in uploads.items()}
            outcome.uploads = Uploads(records, kind, self.task)
        else:
            outcome.uploads = {client: u.payload for client, u in uploads.items() if u.payload is not None}

    def _drop_implausible(self) -> None:
        outcome, accepted = self.outcome, self._accepted
        sizes = {client: upload.sizes for client, upload in accepted.items()}
        reported = {client: upload.reported for client, upload in accepted.items()}
        for client, fault in self.plausibility.implausible(sizes, reported).items():
            reason = f"upload rejected: {fault}"
            if accepted.pop(client).age:
                outcome.late[client] = outcome.late[client].model_copy(
                    update={"weight": 0.0, "reason": reason}
                )
            else:
                del outcome.reports[client]
                outcome.failures[client] = reason

    def _count(self, client: int, traffic: Traffic) -> None:
        self.outcome.up[client] = self.outcome.up.get(client, Traffic()) + traffic

    def _accept(self, client: int, reply: Message, report: Report, upload: Upload, age: int) -> None:
        self._accepted[client] = _Accepted(
            wire.payload_in(reply.content),
            None if self.streams else upload,
            age,
            upload.scalars(),
            upload.classes(self.task),
            upload.sizes(),
            report.num_train,
        )

    def _accept_late(
        self, client: int, reply: Message, content: _ValidReply | _RejectedReply, server_round: int
    ) -> None:
        outcome, weight, age = self.outcome, 0.0, self.phase.number - server_round
        if isinstance(content, _RejectedReply):
            reason = content.reason
        elif client in outcome.reports or client in outcome.late:
            reason = "a newer one arrived"
        elif self.stale_weight == 0:
            reason = "stale-weight is 0"
        else:
            weight, reason = self.stale_weight**age, ""
            if content.upload is not None:
                self._accept(client, reply, content.report, content.upload, age)
        late = LateUpload(client=client, round=server_round, weight=weight, reason=reason)
        outcome.late.setdefault(client, late)


def rejection_reason(error: Exception) -> str:
    """Return in one line why a reply is rejected; for unexpected exceptions also where they were raised."""
    if isinstance(error, RejectedPayload):
        return printable(str(error)[:LONGEST])
    return format_exception(error)


def read(
    replies: list[Message],
    phase: Phase,
    method: Method[Any, Any, Any],
    state: Serializable,
    task: Task,
    max_bytes: int = wire.MAX_BYTES,
    late: Sequence[LateReply] = (),
    stale_weight: float = 0.0,
    requested: Requested = TOTALS,
    plausibility: Plausibility = NO_LIMITS,
) -> Outcome:
    """Decode and validate every reply; an invalid one only affects its own client.

    An upload of an earlier round, in a late reply or sent again instead of training, gets the weight stale_weight^age,
    unless the client also sent one of this round.

    Args:
        replies: in any order.
        phase: the messages sent.
        method: provides the upload type and its validation.
        state: of the server, before aggregation.
        task: what all clients agree on.
        max_bytes: limit for one reply; larger ones are rejected without decoding.
        late: late replies to earlier rounds, newest first.
        stale_weight: 0 excludes uploads of earlier rounds.
        requested: what reports must hold beside totals.
        plausibility: limits of the uploads' sizes, by default none.
    """
    reader = _Reader(method, state, task, max_bytes, requested)
    intake = _Intake(phase, task, method.streams(), stale_weight, plausibility)
    by_client = wire.ordered(replies, {m.metadata.message_id: client for m, client in phase.messages})
    # All sizes are determined before decoding starts: alternating between both tasks is slower (instruction cache).
    sizes = {client: reader.weigh(reply) for client, reply in by_client.items()}
    for _, client in phase.messages:
        reply = by_client.get(client)
        if reply is None:
            waited = time.perf_counter() - phase.started
            intake.outcome.failures[client] = f"no answer within {waited:.0f} s"
        elif reply.has_error():
            intake.outcome.failures[client] = error_reason(reply)
        else:
            intake.add(client, reply, reader.read(reply, client in phase.training, sizes[client]))
    intake.outcome.failures |= phase.absent
    for overdue, reply in late:
        if overdue.training and not reply.has_error():
            intake.add_late(overdue, reply, reader.read(reply, True, reader.weigh(reply)))
    intake.close(method.up)
    return intake.outcome


def _upload_of(reply: Message, method: Method[Any, Any, Any], state: Serializable, task: Task) -> Upload:
    upload: Upload = wire.decode(wire.payload_in(reply.content), method.up, task)
    method.validate(upload, state, task)
    return upload


def _report_of(reply: Message, max_bytes: int, requested: Requested) -> Report:
    record = reply.content.get(wire.METRICS) if reply.has_content() else None
    if not isinstance(record, MetricRecord):
        raise RejectedPayload("its report is missing")
    wire.check_content(reply.content, max_bytes)
    return Report.from_record(record, requested)


def error_reason(reply: Message) -> str:
    """Return an error reply as one line; of a traceback, its last line."""
    if worker_died(reply):
        return "its simulation worker died"
    text = reply.error.reason or ""
    lines = [clean for line in text.splitlines() if (clean := printable(line).strip())]
    if not lines:
        return f"error code {reply.error.code}"
    return (lines[-1] if "Traceback" in text else "; ".join(lines))[:LONGEST]


def worker_died(reply: Message) -> bool:
    """Return whether Ray lost the client's worker process; Flower never removes such a worker from its pool."""
    text = reply.error.reason or ""
    return "ray.exceptions." in text and (
        "ActorDied" in text or "ActorUnavailable" in text or "RayActorError" in text
    )
