"""Payloads on the wire, and what they weigh.

A payload travels as one array of bytes in the safetensors format: ragged, without pickle, checked in full before
anything is rebuilt from it. One array, because Flower spends about 600 bytes on each. Bytes are counted here, where
messages are encoded, so that no method can flatter itself.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as MAX_CHUNK
from flwr.common.serde_utils import metadata_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.headers import load
from pbfl_flwr.payloads import MAX_COUNT, Payload, Prototypes, RejectedPayload, Reveal, separate
from pbfl_flwr.task import Task

P = TypeVar("P", bound=Payload)
WireDtype = Literal["float32", "float16", "bfloat16", "int8"]

PAYLOAD, METRICS, CONFIG = "p", "m", "c"  # record names: short, they travel with every message
MAX_BYTES = 2**31  # of one payload; Flower's own frame limit
SPENT = ("data", "open", "fit", "evaluate", "save")  # data: its own shards; open: network, state and settings
MAX_METRICS = 100  # of one report
MAX_NAME = 100  # characters of a metric's name
FORMAT = "safetensors crc32="  # how the one array says what its bytes are; Flower hands unknown ones on as they are
MAX_HEADER = 2**20  # bytes that name the tensors of a payload; those of a network with 2,000 take 200,000
_LARGEST_FLOAT = 1e40  # beyond float32: no loss, no time and no memory is that large
_SCALE = "#scale"
_HASH = "0" * 64  # as long as the names of Flower's objects are
_CAST = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def encode(payload: Payload, dtype: WireDtype = "float32") -> ArrayRecord:
    """Return the payload as a record of at most one array.

    Args:
        payload: what travels; an empty one gives an empty record.
        dtype: of its floating-point tensors on the wire. int8 quantises each row of a matrix symmetrically with
            its own float32 scale, max|row|/127; vectors stay float32.

    Raises:
        PbflError: if a number is too large for float16.
    """
    return encode_tensors(payload.to_tensors(), dtype)


def encode_tensors(tensors: Mapping[str, Tensor], dtype: WireDtype = "float32") -> ArrayRecord:
    """Return tensors that were taken from a payload as a record; see :func:`encode`."""
    if not tensors:
        return ArrayRecord()
    sent: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            sent[name] = tensor
        elif dtype != "int8":
            sent[name] = _cast(name, tensor, dtype)
        elif tensor.dim() < 2:
            sent[name] = tensor.to(torch.float32)
        else:
            scale = tensor.flatten(1).abs().amax(dim=1).to(torch.float32) / 127
            divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).reshape(
                -1, *[1] * (tensor.dim() - 1)
            )
            sent[name] = (tensor / divisor).round().to(torch.int8)
            sent[name + _SCALE] = scale
    return sealed(save(separate(sent)))


def sealed(data: bytes) -> ArrayRecord:
    """Return bytes as the one array of a payload, with their checksum.

    Flower hashes what it carries; the checksum also covers what happens before and after that, and a changed number in
    a row is a number like any other.
    """
    return ArrayRecord({"s": Array("uint8", (len(data),), f"{FORMAT}{zlib.crc32(data):08x}", data)})


def _cast(name: str, tensor: Tensor, dtype: Literal["float32", "float16", "bfloat16"]) -> Tensor:
    cast = tensor.to(_CAST[dtype])
    if dtype == "float16" and bool((cast.isinf() & tensor.isfinite()).any()):
        raise PbflError(
            f"wire-dtype = 'float16': '{name}' holds {float(tensor.abs().max()):.3g}, float16 ends at 65504; "
            "allowed here are 'float32', 'bfloat16' and 'int8'"
        )
    return cast


def decode(
    record: ArrayRecord, payload: type[P], task: Task, max_bytes: int = MAX_BYTES, again: bool = False
) -> P:
    """Rebuild a payload; size and checksum are looked at before anything is parsed.

    Args:
        record: as it arrived.
        payload: the type it must be.
        task: K, d and input shape that it must fit.
        max_bytes: more are refused unread.
        again: the same record was decoded before: its size, its checksum and a table's numbers need not be looked at
            a second time.

    Raises:
        RejectedPayload: if the bytes are no safetensors file, too many, or not what the payload's type allows.
    """
    arrays = list(record.values())
    if len(arrays) > 1:
        raise RejectedPayload(f"{len(arrays)} arrays, expected one")
    if not arrays:
        return payload.from_tensors({}, task)
    if not again:
        _check(arrays[0], max_bytes)
    try:
        tensors = load(arrays[0].data)
    # Beside its own error the reader lets through what torch says about absurd shapes and unknown types.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        raise RejectedPayload(f"not a safetensors payload: {_one_line(error)}") from None
    plain = _dequantised(tensors)
    if again and issubclass(payload, Prototypes):
        return payload.accepted(plain, task)
    return payload.from_tensors(plain, task)


def _check(array: Array, max_bytes: int) -> None:
    """Check that an array says it is a payload, holds few enough bytes, and those that were sent."""
    data = array.data
    if not array.stype.startswith(FORMAT):
        raise RejectedPayload(f"an array of format '{array.stype[:40]}', expected 'safetensors'")
    if len(data) > max_bytes:
        raise RejectedPayload(f"{len(data)} bytes, allowed are {max_bytes} (max-upload-mb)")
    if array.stype != f"{FORMAT}{zlib.crc32(data):08x}":
        raise RejectedPayload("its bytes do not fit their checksum")
    if (header := int.from_bytes(data[:8], "little")) > MAX_HEADER:
        raise RejectedPayload(
            f"not a safetensors payload: a header of {header} bytes, allowed are {MAX_HEADER}"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _dequantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(_SCALE)}
    plain = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name, scale in scales.items():
        base = name.removesuffix(_SCALE)
        rows = plain.get(base)
        fits = rows is not None and rows.dtype is torch.int8 and rows.dim() >= 2
        if rows is None or not fits or scale.dtype is not torch.float32 or scale.shape != rows.shape[:1]:
            raise RejectedPayload(f"the scales of '{base}' do not fit its rows")
        plain[base] = rows.to(torch.float32) * scale.reshape(-1, *[1] * (rows.dim() - 1))
    return plain


REVEALS = tuple(  # what the report tells the server
    Reveal(what, how, "client-report = 'none'", message="report")
    for what, how in (
        ("number of training and test samples", "every round"),
        ("accuracies and test loss", "of every predictor: how easy the client's data is"),
        ("training losses", "the mean of every term, and what else the method reports"),
        ("timings and memory", "they grow with the number of samples and tell the hardware"),
    )
)
SIZE = Reveal(
    "size of the message",
    "bytes grow with the rows that are sent, also for who reads encrypted traffic",
    "dense-uploads",
)


@dataclass(frozen=True)
class Report:
    """What a client says about its round beside the payload: counters, never samples.

    Attributes:
        num_train, num_test: samples.
        participations: rounds this client has trained in, this one included.
        correct: predictor -> correctly predicted test samples; only predictors that could be asked.
        test_loss: mean cross-entropy on the test samples.
        seconds: what the client spent its time on, in the order of SPENT.
        peak_mb: the worker's peak resident memory.
        metrics: what the method reports.
        num_validation: samples held out for validation.
        validation: predictor -> correctly predicted ones of them; None without any.
        round: whose upload this is; 0 where nothing was trained.
        other: predictor -> correctly predicted test samples at the other moment (before training instead of after it,
            or the other way round); None where the client was not scored twice.
    """

    num_train: int
    num_test: int
    participations: int = 0
    correct: Mapping[str, int] | None = None
    test_loss: float = 0.0
    seconds: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    peak_mb: float = 0.0
    metrics: Mapping[str, float] | None = None
    num_validation: int = 0
    validation: Mapping[str, int] | None = None
    round: int = 0
    other: Mapping[str, int] | None = None

    def to_record(self) -> MetricRecord:
        """Return the compact record: lists with a fixed layout, since every key costs bytes."""
        fixed: dict[str, float | list[int] | list[float]] = {
            "n": [self.num_train, self.num_test, self.participations, self.round],
            "c": _in_order(self.correct),
            "t": [self.test_loss, *self.seconds, self.peak_mb],
        }
        if self.num_validation:
            fixed["v"] = [self.num_validation, *_in_order(self.validation)]
        if self.other is not None:
            fixed["o"] = _in_order(self.other)
        return MetricRecord({**(self.metrics or {}), **fixed})

    @classmethod
    def from_record(cls, record: MetricRecord) -> Report:
        """Rebuild a report.

        Raises:
            RejectedPayload: if a field is missing or of a wrong length, or a counter contradicts another.
        """
        num_train, num_test, participations, number = (int(value) for value in _list(record, "n", 4))
        correct = [int(value) for value in _list(record, "c", len(PREDICTORS))]
        held_out = _list(record, "v", 1 + len(PREDICTORS)) if "v" in record else [0] * (1 + len(PREDICTORS))
        num_validation, *validated = (int(value) for value in held_out)
        other = [int(value) for value in _list(record, "o", len(PREDICTORS))] if "o" in record else None
        loss, data, opened, fitted, evaluated, saved, peak_mb = _list(record, "t", 7)
        counters = (num_train, num_test, participations, num_validation, number)
        if min(counters) < 0 or max(correct + (other or [])) > num_test or max(validated) > num_validation:
            raise RejectedPayload("its counters contradict each other")
        if max(counters) >= MAX_COUNT:
            raise RejectedPayload(f"its report counts {max(counters)} samples")
        if len(record) > MAX_METRICS:
            raise RejectedPayload(f"its report has {len(record)} entries, allowed are {MAX_METRICS}")
        if (longest := max(map(len, record))) > MAX_NAME:
            raise RejectedPayload(f"its report has a name of {longest} characters, allowed are {MAX_NAME}")
        scored, by_validation = _named(correct), _named(validated) if num_validation else None
        metrics = {key: _checked(key, value) for key, value in record.items() if not isinstance(value, list)}
        seconds = (data, opened, fitted, evaluated, saved)
        return cls(
            num_train,
            num_test,
            participations,
            scored,
            loss,
            seconds,
            peak_mb,
            metrics,
            num_validation,
            by_validation,
            number,
            None if other is None else _named(other),
        )


def _in_order(correct: Mapping[str, int] | None) -> list[int]:
    return [(correct or {}).get(name, -1) for name in PREDICTORS]


def _named(correct: list[int]) -> dict[str, int]:
    return {name: value for name, value in zip(PREDICTORS, correct, strict=True) if value >= 0}


def _list(record: MetricRecord, key: str, length: int) -> list[float]:
    values = record.get(key)
    if not isinstance(values, list) or len(values) != length:
        raise RejectedPayload(f"its report lacks '{key}' of length {length}")
    return [_checked(key, value) for value in values]


def _checked(key: str, value: float) -> float:
    # Python compares whole numbers of any size, and NaN with nothing.
    if not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:
        found = value if isinstance(value, float) and not math.isfinite(value) else "a number beyond 1e40"
        raise RejectedPayload(f"its report holds {found} in '{key[:40]}'")
    return float(value)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one message.

    Attributes:
        payload: the encoded payload.
        ours: payload, report and configuration, as encoded.
        total: all of Flower's objects for this message, before transport headers and encryption.
    """

    payload: int = 0
    ours: int = 0
    total: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.payload + other.payload, self.ours + other.ours, self.total + other.total)


def weigh(message: Message) -> Traffic:
    """Return the bytes of one message."""
    if not message.has_content():
        return Traffic()
    records = list(message.content.values())
    arrays = [array for record in records if isinstance(record, ArrayRecord) for array in record.values()]
    beside = [record.deflate() for record in records if not isinstance(record, ArrayRecord)]
    payload = sum(len(array.data) for array in arrays)
    total = _counted(message, arrays, beside) if len(arrays) <= 1 else encoded_bytes(message)
    return Traffic(payload, payload + sum(map(len, beside)), total)


def encoded_bytes(message: Message) -> int:
    """Return the bytes of all of Flower's objects for a message, by making them."""
    with no_object_id_recompute():  # each level's hash is asked for several times
        return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())


def _counted(message: Message, arrays: Sequence[Array], beside: Iterable[bytes]) -> int:
    """Return the same for a message with one array at most, neither encoding nor hashing what is in it.

    An object names its children by hashes of one length, and equal objects are one. So an array's size follows from
    its description, a record's from its names, and the message's own is that of an empty one with its metadata.
    """
    others = set(beside)
    holders = {tuple(record) for record in message.content.values() if isinstance(record, ArrayRecord)}
    described = metadata_to_proto(message.metadata)
    described.message_id = ""  # as Flower sends it
    total = _size("Message", 1, ProtoMessage(metadata=described).ByteSize()) + sum(map(len, others))
    total += _size("RecordDict", len(holders) + len(others), _references(message.content))
    total += sum(_size("ArrayRecord", len(names), _references(names)) for names in holders)
    for array in arrays:
        chunks = [array.data[at : at + MAX_CHUNK] for at in range(0, len(array.data), MAX_CHUNK)]
        known: dict[bytes, int] = {}
        places = (
            [known.setdefault(chunk, len(known)) for chunk in chunks]
            if len(chunks) > 1
            else [0][: len(chunks)]
        )
        about = {"dtype": array.dtype, "shape": array.shape, "stype": array.stype, "arraychunk_ids": places}
        total += _size("Array", len(set(places)), len(json.dumps(about)))
        total += sum(_size("ArrayChunk", 0, len(chunk)) for chunk in known or chunks)
    return total


def _size(kind: str, children: int, body: int) -> int:
    """Return the bytes of one of Flower's objects: ``kind hash,hash,… length-of-body``, a zero byte, the body."""
    return len(f"{kind} {','.join([_HASH] * children)} {body}") + 1 + body


def _references(names: Iterable[str]) -> int:
    return len(json.dumps(dict.fromkeys(names, _HASH)))


def check_content(content: RecordDict, max_bytes: int) -> None:
    """Check, before anything is parsed, that a reply holds a payload and a report at most, and few enough bytes.

    Raises:
        RejectedPayload: saying what else it holds, or how much.
    """
    if others := sorted(set(content) - {PAYLOAD, METRICS}):
        raise RejectedPayload(f"unexpected record '{others[0][:40]}'")
    if (size := sum(record.count_bytes() for record in content.values())) > max_bytes:
        raise RejectedPayload(f"{size} bytes, allowed are {max_bytes} (max-upload-mb)")


def payload_in(content: RecordDict) -> ArrayRecord:
    """Return the encoded payload of a message's content.

    Raises:
        RejectedPayload: if there is none.
    """
    record = content.get(PAYLOAD)  # content.array_records would copy the content first
    if not isinstance(record, ArrayRecord):
        raise RejectedPayload("its payload is missing")
    return record


def content(
    payload: ArrayRecord | None = None, report: MetricRecord | None = None, config: ConfigRecord | None = None
) -> RecordDict:
    """Return a message's content under the names that both sides use."""
    named = {PAYLOAD: payload, METRICS: report, CONFIG: config}
    return RecordDict({name: record for name, record in named.items() if record is not None})


def ordered(replies: Iterable[Message], sent: Mapping[str, int]) -> dict[int, Message]:
    """Return client id -> reply, in ascending client order whatever the order of arrival.

    Args:
        replies: as Flower hands them over; errors made by Flower itself come from "node 1", so the reply is found by
            the message it answers.
        sent: message id -> client id.
    """
    by_client = {
        sent[m.metadata.reply_to_message_id]: m for m in replies if m.metadata.reply_to_message_id in sent
    }
    return dict(sorted(by_client.items()))
