"""Faults that are injected on purpose: which, how often, and how they are written in a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

FAULTS = ("drop", "crash", "corrupt", "stale", "delay")


@dataclass(frozen=True)
class FaultRates:
    """How often each fault is injected into a client's answer, 0..1, and how long a delay lasts.

    Attributes:
        drop: the client trains, its answer does not arrive.
        crash: the client raises instead of training.
        corrupt: bytes of its upload change on the way.
        stale: it answers with its last upload instead of training.
        delay: its answer comes late,
        seconds: by so much.
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
                said = f"'{word}' twice" if word in found else f"not '{word}'"
                raise ValueError(f"a comma list of {', '.join(f'{name}=...' for name in FAULTS)}; {said}")
            share = value
            if word == "delay":
                duration, _, share = value.partition("@")
                seconds = re.fullmatch(r"(\d+(?:\.\d+)?)s", duration)
                if seconds is None:
                    raise ValueError(f"delay=5s or, for a share of the answers, delay=5s@0.3; not '{part}'")
                found["seconds"], share = float(seconds[1]), share or "1"
            if not re.fullmatch(r"\d*\.?\d+", share) or float(share) > 1:
                raise ValueError(f"a share from 0 to 1 for '{word}', not '{part}'")
            found[word] = float(share)
        return cls(**found)
