"""Injected faults in a client's replies, drawn from the run's seed, the client and the round.

The same (seed, client, round) gives the same faults with any number of workers and after a resume, and adding a kind of
fault to the configuration does not change when the others occur. Off by default; see the keys ``faults.``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message

from pbfl_flwr import seeds
from pbfl_flwr.config import Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire

DROPPED = 4  # Flower's code for "the reply is not available"
FLIPPED = 8  # bytes changed in a corrupted upload


@dataclass(frozen=True)
class Fault:
    """The faults of one reply.

    Attributes:
        drop, crash, corrupt, stale: see :class:`pbfl_flwr.config.FaultSettings`.
        seconds: delay of the reply.
        places: (FLIPPED,) in 0..1, relative positions of the changed bytes.
    """

    drop: bool
    crash: bool
    corrupt: bool
    stale: bool
    seconds: float
    places: tuple[float, ...]


def draw(settings: Settings, client: int | str, server_round: int) -> Fault:
    """Return the faults of a client's reply in a round."""
    rates = settings.faults
    rng = np.random.default_rng(seeds.derive(settings.run.seed, "faults", client, server_round))
    drop, crash, corrupt, stale, delay, *places = rng.random(5 + FLIPPED).tolist()
    return Fault(
        drop < rates.drop,
        crash < rates.crash,
        corrupt < rates.corrupt,
        stale < rates.stale,
        rates.delay_seconds if delay < rates.delay else 0.0,
        tuple(places),
    )


def inject(
    fault: Fault, message: Message, train: Callable[[], Message], last_reply: Callable[[], Message] | None
) -> Message:
    """Return the reply to a message, with injected faults.

    A crash is raised before training, since nothing is stored anyway when a client raises. A Flower client cannot omit
    its reply, so a dropped reply becomes an error; the server need not wait for its deadline.

    Without a ``last_reply`` (there was no last round) the fault ``stale`` has no effect.

    Raises:
        PbflError: the injected crash.
    """
    if fault.crash:
        raise PbflError("injected fault: crash")
    reply = last_reply() if fault.stale and last_reply is not None else train()
    if fault.seconds:
        time.sleep(fault.seconds)
    if fault.drop:
        return Message(Error(DROPPED, "injected fault: its reply was dropped"), reply_to=message)
    return _corrupted(reply, message, fault.places) if fault.corrupt else reply


def _corrupted(reply: Message, message: Message, places: tuple[float, ...]) -> Message:
    content, corrupted = reply.content, ArrayRecord()
    for name, array in content.array_records[wire.PAYLOAD].items():
        data = bytearray(array.data)
        for place in places:
            data[int(place * len(data))] ^= 0xFF
        corrupted[name] = Array(array.dtype, array.shape, array.stype, bytes(data))
    return Message(wire.content(corrupted, content.metric_records[wire.METRICS]), reply_to=message)
