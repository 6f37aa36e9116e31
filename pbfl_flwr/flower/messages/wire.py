"""Encoding of payloads for transport.

A payload is sent as one array of bytes in the safetensors format: tensors of any shapes, no pickle, fully checked
before it is decoded. It is one array because Flower adds about 600 bytes to each.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.torch import save
from torch import Tensor

from pbfl_flwr.config.keys import WireDtype as WireDtype
from pbfl_flwr.errors import PbflError
from pbfl_flwr.payloads import Payload, RejectedPayload, separate
from pbfl_flwr.runs.tensor_files import MALFORMED, header_of, tensors_in
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import returned

P = TypeVar("P", bound=Payload)

UNSCORED = "unscored"  # in CONFIG, if the client shall train without being scored
STATE = "state"  # in CONFIG, if the client shall train: digest of the server's state that the broadcast is of
UNSAVED = 1001  # error code, far above Flower's own: a simulation's disk does not take what a client writes
PAYLOAD, METRICS, CONFIG = "p", "m", "c"  # record names; short, because every message contains them
FORMAT = "safetensors crc32="  # stype of the array, followed by the checksum; Flower passes on unknown stypes unchanged
MAX_HEADER = (
    2**20
)  # bytes of a payload's safetensors header; that of a network with 2,000 tensors takes 200,000
_SCALE = "#scale"
# How often larger a tensor is when it is used: numbers as float32, whole numbers as int64. Others do not grow.
_GROWTH = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 4, "I16": 4, "U32": 2, "I32": 2, "F16": 2, "BF16": 2}
_CAST = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def encode(payload: Payload, dtype: WireDtype = "float32") -> ArrayRecord:
    """Return the payload as a record of at most one array.

    Args:
        payload: without tensors it gives an empty record.
        dtype: of its floating-point tensors on the wire. int8 quantises each row of a matrix symmetrically with
            its own float32 scale, max|row|/127; vectors stay float32.

    Raises:
        PbflError: if a number is too large for float16.
    """
    return encode_tensors(payload.to_tensors(), dtype)


def encode_tensors(tensors: Mapping[str, Tensor], dtype: WireDtype = "float32") -> ArrayRecord:
    """Encode the tensors of a payload; see :func:`encode`."""
    if not tensors:
        return ArrayRecord()
    sent: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            sent[name] = tensor
        elif dtype != "int8":
            sent[name] = _cast(name, tensor, dtype)
        elif tensor.dim() < 2 or not tensor.numel():  # low-rank factors may have no columns
            sent[name] = tensor.to(torch.float32)
        else:
            scale = tensor.flatten(1).abs().amax(dim=1).to(torch.float32) / 127
            divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).reshape(
                -1, *[1] * (tensor.dim() - 1)
            )
            sent[name] = (tensor / divisor).round().to(torch.int8)
            sent[name + _SCALE] = scale
    return with_checksum(save(separate(sent)))


def with_checksum(data: bytes) -> ArrayRecord:
    """Return bytes as a payload's array with their checksum.

    Flower hashes messages in transport; the checksum also detects changes before and after that, which the validation
    of values cannot detect.
    """
    return ArrayRecord({"s": Array("uint8", (len(data),), f"{FORMAT}{zlib.crc32(data):08x}", data)})


def _cast(name: str, tensor: Tensor, dtype: Literal["float32", "float16", "bfloat16"]) -> Tensor:
    cast = tensor.to(_CAST[dtype])
    if dtype == "float16" and bool((cast.isinf() & tensor.isfinite()).any()):
        raise PbflError(
            f"wire-dtype = 'float16': '{name}' holds {float(tensor.abs().max()):.3g}, float16's maximum is 65504; "
            "must be 'float32', 'bfloat16' or 'int8' here"
        )
    return cast


def decode(
    record: ArrayRecord, payload: type[P], task: Task, again: bool = False, max_bytes: int | None = None
) -> P:
    """Decode a payload; its checksum is checked before parsing.

    Args:
        record: as received.
        payload: the expected type.
        task: K, d and input shape, for validation.
        again: the same record was decoded before, so its checksum is not checked again.
        max_bytes: largest size in memory, which the header tells before anything is decoded; None: any.

    Raises:
        RejectedPayload: if the bytes are not a safetensors file, too large in memory, or not valid for the payload's
            type.
        PbflError: if ``from_tensors`` of a user's payload returns something else.
    """
    tensors = decode_tensors(record, again, max_bytes)
    return returned(payload.from_tensors, payload.from_tensors(tensors, task), payload)


def decode_tensors(
    record: ArrayRecord, again: bool = False, max_bytes: int | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a payload of any type, by name; see :func:`decode`.

    Raises:
        RejectedPayload: if the bytes are not a safetensors file, or too large in memory.
    """
    arrays = list(record.values())
    if len(arrays) > 1:
        raise RejectedPayload(f"{len(arrays)} arrays, expected one")
    if not arrays:
        return {}
    if not again:
        _check(arrays[0])
    try:
        if max_bytes is not None and (size := _decoded_bytes(arrays[0].data)) > max_bytes:
            raise RejectedPayload(f"{size} bytes in memory, must be at most {max_bytes} (max-upload-mb)")
        tensors = tensors_in(arrays[0].data)
    except RejectedPayload:
        raise
    except MALFORMED as error:
        raise RejectedPayload(f"not a safetensors payload: {' '.join(str(error).split())[:200]}") from None
    return _dequantised(tensors)


def _check(array: Array) -> None:
    """Check an array's format, checksum and header size."""
    data = array.data
    if not array.stype.startswith(FORMAT):
        raise RejectedPayload(f"an array of format '{array.stype[:40]}', expected 'safetensors'")
    if array.stype != f"{FORMAT}{zlib.crc32(data):08x}":
        raise RejectedPayload("its bytes do not match their checksum")
    if (header := int.from_bytes(data[:8], "little")) > MAX_HEADER:
        raise RejectedPayload(
            f"not a safetensors payload: a header of {header} bytes, must be at most {MAX_HEADER}"
        )


def _decoded_bytes(data: bytes) -> int:
    """Return the memory that the tensors of a payload will take, from the number of bytes that the header declares.

    The library refuses a header whose shapes do not fit these numbers.
    """
    header = dict(header_of(data)[0])
    header.pop("__metadata__", None)
    sizes = {name: about["data_offsets"][1] - about["data_offsets"][0] for name, about in header.items()}
    quantised = {name.removesuffix(_SCALE) for name in header if name.endswith(_SCALE)}
    return sum(
        size * (4 if name in quantised else _GROWTH.get(header[name]["dtype"], 1))
        for name, size in sizes.items()
    )


def _dequantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(_SCALE)}
    plain = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name, scale in scales.items():
        base = name.removesuffix(_SCALE)
        rows = plain.get(base)
        fits = rows is not None and rows.dtype is torch.int8 and rows.dim() >= 2
        if rows is None or not fits or scale.dtype is not torch.float32 or scale.shape != rows.shape[:1]:
            raise RejectedPayload(f"the scales of '{base}' do not fit its rows")
        plain[base] = rows.to(torch.float32).mul_(scale.reshape(-1, *[1] * (rows.dim() - 1)))
    return plain


def check_records(content: RecordDict) -> None:
    """Check that a reply holds nothing but a payload of one array and a report.

    This comes before weighing, which takes as often as long as a reply names one record or array under several names.

    Raises:
        RejectedPayload: naming another record, or the number of arrays.
    """
    if others := sorted(set(content) - {PAYLOAD, METRICS}):
        raise RejectedPayload(f"unexpected record '{others[0][:40]}'")
    if (arrays := sum(len(record) for record in content.values() if isinstance(record, ArrayRecord))) > 1:
        raise RejectedPayload(f"{arrays} arrays, expected one")


def check_size(content: RecordDict, max_bytes: int) -> None:
    """Check, before parsing, that a reply is within the size limit.

    Raises:
        RejectedPayload: naming the size.
    """
    if (size := sum(record.count_bytes() for record in content.values())) > max_bytes:
        raise RejectedPayload(f"{size} bytes, must be at most {max_bytes} (max-upload-mb)")


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
    """Return a message's content, with the record names used by both sides."""
    records = {PAYLOAD: payload, METRICS: report, CONFIG: config}
    return RecordDict({name: record for name, record in records.items() if record is not None})


def ordered(replies: Iterable[Message], sent: Mapping[str, int]) -> dict[int, Message]:
    """Return client id -> reply, in ascending client order regardless of the order of arrival.

    Replies are matched by the message they answer (``sent``: message id -> client id), since Flower's own errors come
    from "node 1".
    """
    by_client = {
        sent[m.metadata.reply_to_message_id]: m for m in replies if m.metadata.reply_to_message_id in sent
    }
    return dict(sorted(by_client.items()))
