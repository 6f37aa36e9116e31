"""Injected faults: their kinds, their rates, and their notation in a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

FAULTS = ("drop", "crash", "corrupt", "stale", "delay")


@dataclass(frozen=True)
class FaultRates:
    """Rate of each fault injected into a client's reply, 0..1, and the length of a delay.

    Attributes:
        drop: the client trains, but its reply is lost.
        crash: the client raises instead of training.
        corrupt: bytes of its upload change in transit.
        stale: it replies with its last upload instead of training.
        delay: its reply is late.
        seconds: length of the delay.
    """

    drop: float = 0.0
    crash: float = 0.0
    corrupt: float = 0.0
    stale: float = 0.0
    delay: float = 0.0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> FaultRates:
        """Read ``drop=0.2,delay=5s@0.3,crash=0.05,corrupt=0.01,stale=0.1``; ``delay=5s`` delays every answer.

        Raises:
            ValueError: saying what is allowed.
        """
        found: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            word, _, value = part.partition("=")
            if word not in FAULTS or word in found:
                said = f"'{word}' is given twice" if word in found else f"found '{word}'"
                raise ValueError(f"a comma list of {', '.join(f'{name}=...' for name in FAULTS)}; {said}")
            share = value
            if word == "delay":
                duration, _, share = value.partition("@")
                seconds = re.fullmatch(r"(\d+(?:\.\d+)?)s", duration)
                if seconds is None:
                    raise ValueError(f"delay=5s or, for a share of the answers, delay=5s@0.3; found '{part}'")
                found["seconds"], share = float(seconds[1]), share or "1"
            if not re.fullmatch(r"\d*\.?\d+", share) or float(share) > 1:
                raise ValueError(f"a share from 0 to 1 for '{word}', found '{part}'")
            found[word] = float(share)
        return cls(**found)
