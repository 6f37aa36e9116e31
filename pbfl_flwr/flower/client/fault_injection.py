"""Faults on purpose: what a client's answer meets on its way, drawn from the run's seed, the client and the round.

The same (seed, client, round) meets the same faults with any number of workers and after a resume, and a fault that is
added to the configuration does not move the others. Off unless ``faults`` says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message

from pbfl_flwr import seeds
from pbfl_flwr.config import FaultRates, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire

DROPPED = 4  # Flower's code for "the reply is not available"
FLIPPED = 8  # bytes of an upload


@dataclass(frozen=True)
class Fault:
    """What one answer meets.

    Attributes:
        drop, crash, corrupt, stale: see :class:`pbfl_flwr.config.FaultRates`.
        seconds: by which it is delayed.
        places: (FLIPPED,) in 0..1, where bytes change.
    """

    drop: bool
    crash: bool
    corrupt: bool
    stale: bool
    seconds: float
    places: tuple[float, ...]


def drawn(settings: Settings, client: int | str, server_round: int) -> Fault:
    """Return the faults of a client's answer in a round.

    Args:
        settings: with seed and rates.
        client: its number or its name.
        server_round: from 1.
    """
    rates = FaultRates.parse(settings.run.faults)
    rng = np.random.default_rng(seeds.derive(settings.run.seed, "faults", client, server_round))
    drop, crash, corrupt, stale, delay, *places = rng.random(5 + FLIPPED).tolist()
    return Fault(
        drop < rates.drop,
        crash < rates.crash,
        corrupt < rates.corrupt,
        stale < rates.stale,
        rates.seconds if delay < rates.delay else 0.0,
        tuple(places),
    )


def inject(
    fault: Fault, message: Message, answer: Callable[[], Message], last: Callable[[], Message] | None
) -> Message:
    """Answer a message under a fault.

    A crash comes before the training: nothing that a raising client did is kept, whenever it raises. Flower has no way
    for a client not to answer, so a dropped answer is replaced by an error; the server need not wait for its deadline.

    Args:
        fault: what happens.
        message: the question.
        answer: trains and answers.
        last: gives the last round's answer; None if there was none, then a stale client has nothing to be stale with.

    Raises:
        PbflError: the crash.
    """
    if fault.crash:
        raise PbflError("injected fault: crash")
    reply = last() if fault.stale and last is not None else answer()
    time.sleep(fault.seconds)
    if fault.drop:
        return Message(Error(DROPPED, "injected fault: its answer was dropped"), reply_to=message)
    return _corrupted(reply, message, fault.places) if fault.corrupt else reply


def _corrupted(reply: Message, message: Message, places: tuple[float, ...]) -> Message:
    content, found = reply.content, ArrayRecord()
    for name, array in content.array_records[wire.PAYLOAD].items():
        data = bytearray(array.data)
        for place in places:
            data[int(place * len(data))] ^= 0xFF
        found[name] = Array(array.dtype, array.shape, array.stype, bytes(data))
    return Message(wire.content(found, content.metric_records[wire.METRICS]), reply_to=message)
