"""Message sizes in bytes, measured on the encoded message rather than reported by the method."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from flwr.app import Array, ArrayRecord, Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as MAX_CHUNK
from flwr.common.serde_utils import metadata_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

from pbfl_flwr.runs.records import Bytes

_HASH = "0" * 64  # has the length of the ids of Flower's objects

NO_BYTES = Bytes(payload=0, application=0, total=0)


def weigh(message: Message) -> Bytes:
    """Return the size of a message."""
    if not message.has_content():
        return NO_BYTES
    records = list(message.content.values())
    arrays = [array for record in records if isinstance(record, ArrayRecord) for array in record.values()]
    others = [record.deflate() for record in records if not isinstance(record, ArrayRecord)]
    payload = sum(len(array.data) for array in arrays)
    total = _total_bytes(message, arrays, others) if len(arrays) <= 1 else encoded_bytes(message)
    return Bytes(payload=payload, application=payload + sum(map(len, others)), total=total)


def encoded_bytes(message: Message) -> int:
    """Return the size of all of Flower's objects for a message, by encoding them."""
    with no_object_id_recompute():  # each level's hash is used several times
        return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())


def _total_bytes(message: Message, arrays: Sequence[Array], other_records: Iterable[bytes]) -> int:
    """Return :func:`encoded_bytes` of a message with at most one array, without encoding or hashing its content.

    An object refers to its children by hashes of fixed length, and equal objects are stored once. So an array's size
    follows from its description, a record's from its names, and the message's own from its metadata.
    """
    others = set(other_records)
    array_records = {tuple(record) for record in message.content.values() if isinstance(record, ArrayRecord)}
    metadata = metadata_to_proto(message.metadata)
    metadata.message_id = ""  # as Flower sends it
    total = _size("Message", 1, ProtoMessage(metadata=metadata).ByteSize()) + sum(map(len, others))
    total += _size("RecordDict", len(array_records) + len(others), _references(message.content))
    total += sum(_size("ArrayRecord", len(names), _references(names)) for names in array_records)
    for array in arrays:
        chunks, indices = _distinct_chunks(array.data)
        entry = {"dtype": array.dtype, "shape": array.shape, "stype": array.stype, "arraychunk_ids": indices}
        total += _size("Array", len(chunks), len(json.dumps(entry)))
        total += sum(_size("ArrayChunk", 0, len(chunk)) for chunk in chunks)
    return total


def _distinct_chunks(data: bytes) -> tuple[list[memoryview], list[int]]:
    """Return the distinct chunks of an array, and for each position the index of its chunk.

    Chunks are compared directly: different ones usually differ in their first bytes, while a hash would read all bytes.
    """
    whole, chunks, indices = memoryview(data), list[memoryview](), list[int]()
    for start in range(0, len(data), MAX_CHUNK):
        chunk = whole[start : start + MAX_CHUNK]
        index = next((i for i, other in enumerate(chunks) if other == chunk), len(chunks))
        if index == len(chunks):
            chunks.append(chunk)
        indices.append(index)
    return chunks, indices


def _size(kind: str, children: int, body: int) -> int:
    """Return the size of one of Flower's objects: ``kind hash,hash,… length-of-body``, a zero byte, the body."""
    return len(f"{kind} {','.join([_HASH] * children)} {body}") + 1 + body


def _references(names: Iterable[str]) -> int:
    return len(json.dumps(dict.fromkeys(names, _HASH)))
