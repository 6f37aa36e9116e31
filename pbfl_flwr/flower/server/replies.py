"""The replies of a phase, decoded and validated; an invalid one only affects its own client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common.constant import ErrorCode

from pbfl_flwr import calls
from pbfl_flwr.config import Settings
from pbfl_flwr.errors import LONGEST, format_exception, printable
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report, Requested, requested
from pbfl_flwr.flower.messages.traffic import weigh
from pbfl_flwr.flower.server.phase import Phase
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Payload, RejectedPayload, Serializable, Upload
from pbfl_flwr.payloads.contract import Magnitudes
from pbfl_flwr.payloads.plausibility import Plausibility
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs.records import Bytes, ClientRecord
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
class Replies:
    """What came back from the messages of a phase.

    Attributes:
        phase: the messages sent.
        messages: as received, in any order.
        uploads: client -> upload to aggregate.
        reports: of the clients that completed their task.
        failures: client -> reason, for the others.
        up: bytes received, including rejected replies.
        scalars_up: numbers that carry information.
        classes: those that were uploaded; None if uploads are not by class.
    """

    phase: Phase
    messages: Sequence[Message] = ()
    uploads: Mapping[int, Payload] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    up: dict[int, Bytes] = field(default_factory=dict)
    scalars_up: int = 0
    classes: frozenset[int] | None = None

    @property
    def trained(self) -> list[int]:
        """The clients that trained in this round and whose uploads are aggregated."""
        return sorted(self.phase.training.intersection(self.reports))


@dataclass(frozen=True)
class ReplyRules:
    """What makes a reply valid.

    Attributes:
        method, task: decode and validate uploads.
        max_bytes: larger replies are rejected without decoding.
        requested: what reports must hold.
        plausibility: limits of the uploads' sizes.
    """

    method: Method[Any, Any, Any]
    task: Task
    max_bytes: int
    requested: Requested
    plausibility: Plausibility

    @classmethod
    def of(
        cls, settings: Settings, method: Method[Any, Any, Any], task: Task, scored: bool = True
    ) -> ReplyRules:
        """Return the rules of a configuration, for rounds in which clients are scored or not."""
        run = settings.run
        scaled = isinstance(method, Pipeline) and method.release.scaled
        limits = Plausibility(run.max_size_ratio, scaled)
        wanted = requested(settings.evaluation, task, method.predicts, scored)
        return cls(method, task, run.max_upload_mb * 2**20, wanted, limits)


@dataclass(frozen=True)
class _Accepted:
    """A valid upload: its encoding, the payload unless the method streams, and what Replies needs of it."""

    encoded: ArrayRecord
    payload: Payload | None
    scalars: int
    classes: list[int] | None
    magnitudes: Magnitudes
    reported: int


@dataclass
class _Intake:
    """Decodes and validates replies, and sorts them into uploads to aggregate and failures."""

    replies: Replies  # the result so far
    rules: ReplyRules
    state: Serializable
    most: int  # bytes of an upload in memory
    _accepted: dict[int, _Accepted] = field(default_factory=dict)

    def add(self, client: int, reply: Message, size: Bytes | Exception) -> None:
        """Add a client's reply, unless it is invalid or holds the client's upload of another round."""
        replies, number = self.replies, self.replies.phase.number
        try:
            report, upload = self._decode(client, reply, size, client in self.replies.phase.training)
            accepted = None if upload is None else self._described(reply, report, upload)
        except Exception as error:  # trust boundary: no client's reply may end the run
            replies.failures[client] = f"upload rejected: {rejection_reason(error)}"
            return
        uploaded = report.round or number
        if upload is not None and uploaded != number:
            replies.failures[client] = f"sent its upload of round {uploaded} instead of round {number}"
            return
        replies.reports[client] = report
        if accepted is not None:
            self._accepted[client] = accepted

    def close(self) -> None:
        """Drop implausible uploads; set the uploads in ascending client order."""
        self._drop_implausible()
        replies, uploads = self.replies, dict(sorted(self._accepted.items()))
        for upload in uploads.values():
            replies.scalars_up += upload.scalars
            if upload.classes is not None:
                replies.classes = (replies.classes or frozenset()).union(upload.classes)
        if self.rules.method.streams():
            records = {client: upload.encoded for client, upload in uploads.items()}
            replies.uploads = Uploads(records, self.rules.method.up, self.rules.task)
        else:
            replies.uploads = {client: u.payload for client, u in uploads.items() if u.payload is not None}

    def _drop_implausible(self) -> None:
        replies, accepted = self.replies, self._accepted
        sizes = {client: upload.magnitudes for client, upload in accepted.items()}
        reported = {client: upload.reported for client, upload in accepted.items()}
        for client, why in self.rules.plausibility.implausible(sizes, reported).items():
            del accepted[client], replies.reports[client]
            replies.failures[client] = f"upload rejected: {printable(why)}"

    def _decode(
        self, client: int, reply: Message, size: Bytes | Exception, training: bool
    ) -> tuple[Report, Upload | None]:
        """Count the bytes of a reply and return its report and upload; raises whatever is wrong with it."""
        if isinstance(size, Exception):
            raise size
        self.replies.up[client] = size
        record = reply.content.get(wire.METRICS) if reply.has_content() else None
        if not isinstance(record, MetricRecord):
            raise RejectedPayload("its report is missing")
        wire.check_size(reply.content, self.rules.max_bytes)
        report = Report.from_record(record, self.rules.requested)
        _check_declared(report, self.replies.phase.declared[client])
        upload: Upload | None = None
        if training:
            record, kind = wire.payload_in(reply.content), self.rules.method.up
            upload = wire.decode(record, kind, self.rules.task, max_bytes=self.most)
            self.rules.method.validate(upload, self.state, self.rules.task)
        return report, upload

    def _described(self, reply: Message, report: Report, upload: Upload) -> _Accepted:
        return _Accepted(
            wire.payload_in(reply.content),
            None if self.rules.method.streams() else upload,
            calls.scalars(upload),
            calls.classes(upload, self.rules.task),
            calls.magnitudes(upload),
            report.num_train,
        )


# Flower's errors for a node whose heartbeats or reply were lost.
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
GROWTH = 2  # a device may have got more of the same data since it joined


def _check_declared(report: Report, client: ClientRecord) -> None:
    """Check that a report counts at most GROWTH times the samples that its client declared in the handshake.

    Accuracies are weighted by them: one report could decide those of the run, when it stops and which state is best.

    Raises:
        RejectedPayload: naming the first count that is larger.
    """
    for what, counted, declared in (
        ("training", report.num_train, client.num_train),
        ("test", report.num_test, client.num_test),
        ("validation", report.num_validation, client.num_validation),
    ):
        if counted > GROWTH * declared:
            raise RejectedPayload(
                f"its report counts {counted} {what} samples; when it joined it declared {declared}, and may count "
                f"at most {GROWTH} times as many until the run is resumed"
            )


def size_of(reply: Message) -> Bytes | Exception:
    """Return the size of a reply, or why it cannot be determined."""
    try:
        if reply.has_content():
            wire.check_records(reply.content)
        return weigh(reply)
    except Exception as error:  # trust boundary, as above
        return error


def rejection_reason(error: Exception) -> str:
    """Return in one line why a reply is rejected; for unexpected exceptions also where they were raised."""
    if isinstance(error, RejectedPayload):
        return printable(str(error)[:LONGEST])
    return format_exception(error)


def read(
    messages: Sequence[Message],
    phase: Phase,
    rules: ReplyRules,
    state: Serializable,
) -> Replies:
    """Decode and validate every reply; an invalid one only affects its own client.

    ``state`` is the one that was broadcast.
    """
    replies = Replies(phase, messages)
    # Decoded, an upload may be larger than on the wire, but not much larger than the network that was sent.
    network = sum(tensor.nbytes for tensor in state.to_tensors().values())
    intake = _Intake(replies, rules, state, max(rules.max_bytes, 2 * network))
    failures = replies.failures
    by_client = wire.ordered(messages, {m.metadata.message_id: client for m, client in phase.messages})
    # All sizes are determined before decoding starts: alternating between both tasks is slower (instruction cache).
    sizes = {client: size_of(reply) for client, reply in by_client.items()}
    for _, client in phase.messages:
        reply = by_client.get(client)
        if reply is None:
            failures[client] = f"no answer within {time.perf_counter() - phase.started:.0f} s"
        elif reply.has_error():
            failures[client] = error_reason(reply)
        else:
            intake.add(client, reply, sizes[client])
    failures |= phase.plan.absent
    intake.close()
    return replies


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
