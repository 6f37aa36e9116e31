"""What a message weighs, counted where it is encoded, so that no method can flatter itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as MAX_CHUNK
from flwr.common.serde_utils import metadata_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

from pbfl_flwr.payloads import Reveal

_HASH = "0" * 64  # as long as the names of Flower's objects are

SIZE = Reveal(
    "size of the message",
    "bytes grow with the rows that are sent, also for who reads encrypted traffic",
    "dense-uploads",
)


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
        different, places = _chunks(array.data)
        about = {"dtype": array.dtype, "shape": array.shape, "stype": array.stype, "arraychunk_ids": places}
        total += _size("Array", len(different), len(json.dumps(about)))
        total += sum(_size("ArrayChunk", 0, len(chunk)) for chunk in different)
    return total


def _chunks(data: bytes) -> tuple[list[memoryview], list[int]]:
    """Return the different chunks of an array, and which of them lies at each place.

    They are compared as they lie: two that differ mostly do so in their first bytes, where a hash reads all of them.
    """
    whole, different, places = memoryview(data), list[memoryview](), list[int]()
    for at in range(0, len(data), MAX_CHUNK):
        chunk = whole[at : at + MAX_CHUNK]
        place = next((number for number, known in enumerate(different) if known == chunk), len(different))
        if place == len(different):
            different.append(chunk)
        places.append(place)
    return different, places


def _size(kind: str, children: int, body: int) -> int:
    """Return the bytes of one of Flower's objects: ``kind hash,hash,… length-of-body``, a zero byte, the body."""
    return len(f"{kind} {','.join([_HASH] * children)} {body}") + 1 + body


def _references(names: Iterable[str]) -> int:
    return len(json.dumps(dict.fromkeys(names, _HASH)))
