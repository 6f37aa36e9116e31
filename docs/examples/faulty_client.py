"""Faults on purpose, each a Flower mod around the clients.

    PYTHONPATH=docs/examples pbfl run --set mods=faulty_client:drop,faulty_client:delay --engine processes

Each hits its share of a client's training messages. Which ones depends on the run's seed, the client and the round
alone, since the package seeds ``random`` for every message; the draw comes before whatever is inside.
"""

from __future__ import annotations

import random
import time

from flwr.app import Array, ArrayRecord, Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire

RATES = {"drop": 0.1, "crash": 0.05, "corrupt": 0.1, "stale": 0.1, "delay": 0.3}
SECONDS = 2.0  # of a delay
FLIPPED = 8  # bytes changed in a corrupted upload
NOT_AVAILABLE = 4  # Flower's code for "the reply is not available"


def hits(kind: str, message: Message, context: Context) -> bool:
    """Draw whether a kind of fault hits this message."""
    return message.metadata.message_type == "train" and random.random() < RATES[kind]


def drop(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Train, save, and lose the answer; an error in its place spares the server the wait for its deadline."""
    lost = hits("drop", message, context)
    reply = call_next(message, context)
    if lost:
        return Message(Error(NOT_AVAILABLE, "injected fault: its reply was dropped"), reply_to=message)
    return reply


def crash(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Raise an error instead of training."""
    if hits("crash", message, context):
        raise PbflError("injected fault: crash")
    return call_next(message, context)


def corrupt(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Change bytes of the upload after its checksum was taken."""
    places = [random.random() for _ in range(FLIPPED)] if hits("corrupt", message, context) else []
    reply = call_next(message, context)
    if places and reply.has_content():
        corrupted = ArrayRecord()
        for name, array in reply.content.array_records[wire.PAYLOAD].items():
            data = bytearray(array.data)
            for place in places:
                data[int(place * len(data))] ^= 0xFF
            corrupted[name] = Array(array.dtype, array.shape, array.stype, bytes(data))
        reply.content[wire.PAYLOAD] = corrupted
    return reply


def stale(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer what the last round asked: a client that took part in it repeats its upload, without training."""
    config = message.content.config_records[wire.CONFIG]
    if hits("stale", message, context) and (number := int(str(config["round"]))) > 1:
        config["round"] = number - 1
        config.pop(wire.STATE, None)  # or the client sees that the broadcast is not that of its upload
    return call_next(message, context)


def delay(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer so many seconds later."""
    late = hits("delay", message, context)
    reply = call_next(message, context)
    if late:
        time.sleep(SECONDS)
    return reply
