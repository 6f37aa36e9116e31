"""Payloads on the wire.

A payload travels as one array of bytes in the safetensors format: ragged, without pickle, checked in full before
anything is rebuilt from it. One array, because Flower spends about 600 bytes on each.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages.safetensors_codec import load
from pbfl_flwr.payloads import Payload, Prototypes, RejectedPayload, separate
from pbfl_flwr.task import Task

P = TypeVar("P", bound=Payload)
WireDtype = Literal["float32", "float16", "bfloat16", "int8"]

PAYLOAD, METRICS, CONFIG = "p", "m", "c"  # record names: short, they travel with every message
KEEP_BEST = "best"  # in CONFIG: the best round so far, whose states clients keep
MAX_BYTES = 2**31  # of one payload; Flower's own frame limit
FORMAT = "safetensors crc32="  # how the one array says what its bytes are; Flower hands unknown ones on as they are
MAX_HEADER = 2**20  # bytes that name the tensors of a payload; those of a network with 2,000 take 200,000
_SCALE = "#scale"
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
        elif tensor.dim() < 2 or not tensor.numel():  # factors may have no column
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
