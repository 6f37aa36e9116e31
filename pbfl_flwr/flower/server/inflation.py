"""Making replies of the bytes that devices sent, within bounds and each on its own.

A SuperLink checks only the head of each object that a device sends. Flower's grid then makes messages of all that one
pull brings: whatever one of them raises ends the run, an array may name one chunk of bytes any number of times, and a
number of one byte becomes one of eight or more, so a few megabytes on the wire become gigabytes. Flower has no hook
there, so its function is replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import Error, Message, MessageType, Metadata
from flwr.app.message import make_message
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from pbfl_flwr.errors import PbflError, format_exception
from pbfl_flwr.payloads import RejectedPayload

GRID = "flwr.superlink.grid.http_grid"
FUNCTION = inflate_object_from_contents.__name__  # the grid's module has it under this name
_DIVIDER = b"\0"  # between an object's head and its body
_GROWTH = 8  # how often larger a record is in memory: a number of one byte takes eight in a list


def bound(max_bytes: int) -> None:
    """Let Flower's grid of this process make messages of at most so many bytes in memory.

    What cannot be made becomes an error of the client that sent it. A process that has not loaded the grid, as in a
    simulation, gets no replies of devices.

    Raises:
        PbflError: if this Flower's grid has no such function.
    """
    if (grid := sys.modules.get(GRID)) is None:
        return
    if not hasattr(grid, FUNCTION):
        raise PbflError(f"{GRID} has no {FUNCTION} in this version of Flower, so replies would have no bound")
    setattr(grid, FUNCTION, _Bounded(max_bytes))


@dataclass(frozen=True)
class _Bounded:
    """In place of Flower's function; its arguments are an object's id, and the contents of it and its descendants."""

    max_bytes: int

    def __call__(self, object_id: str, contents: dict[str, bytes]) -> Message:
        raw = contents[object_id]
        try:
            if (size := _bytes_in_memory(contents)) > self.max_bytes:
                raise RejectedPayload(
                    f"{size} bytes in memory, must be at most {self.max_bytes} (max-upload-mb)"
                )
            message = inflate_object_from_contents(object_id, contents)
            if not isinstance(message, Message):
                raise RejectedPayload("it is no message")
        except Exception as error:  # trust boundary: no client's reply may end the run
            why = str(error) if isinstance(error, RejectedPayload) else format_exception(error)
            reason = f"its reply cannot be read: {why}"
            return make_message(metadata=_metadata(raw), error=Error(ErrorCode.UNKNOWN, reason))
        return message


def _bytes_in_memory(contents: Mapping[str, bytes]) -> int:
    """Return what the arrays among these objects take, each chunk as often as it is named, or all others if more."""
    arrays, others = 0, 0
    sizes = {each: len(content) - content.find(_DIVIDER) - 1 for each, content in contents.items()}
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == "Array":
            about: dict[str, Any] = json.loads(content.partition(_DIVIDER)[2])
            arrays += sum(sizes[children[place]] for place in about["arraychunk_ids"])
        if kind != "ArrayChunk":
            others += len(content)
    return max(arrays, _GROWTH * others)


def _metadata(raw: bytes) -> Metadata:
    """Return the metadata of a message's bytes; if they have none, those of an answer to nothing."""
    try:
        return metadata_from_proto(ProtoMessage.FromString(raw.partition(_DIVIDER)[2]).metadata)
    except Exception:  # trust boundary; nothing tells whose it is, so its client will not have answered
        log(
            WARNING,
            "a device has sent a reply that is no message; its client counts as one that did not answer",
        )
        return metadata_from_proto(ProtoMetadata(message_type=MessageType.QUERY))
