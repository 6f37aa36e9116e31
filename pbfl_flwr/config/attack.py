"""The attacks of malicious clients in a run configuration: ``sign-flip=0.2``, ``scale=10@0.2``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

ATTACKS = ("sign-flip", "scale", "noise", "permute")
_SHARE = re.compile(r"\d*\.?\d+")
_FACTOR = re.compile(r"-?\d+(\.\d+)?(e\d+)?")


@dataclass(frozen=True)
class Attack:
    """One kind of attack, and the share of clients that carry it out.

    Attributes:
        kind: of ATTACKS; see :func:`pbfl_flwr.prototypes.attacks.falsified` for what each one sends.
        share: of all clients, 0 < share < 1.
        factor: of ``scale``, else 1.
    """

    kind: str
    share: float
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Attack:
        """Read ``sign-flip=0.2``, ``noise=0.2``, ``permute=0.2`` or, with a factor, ``scale=10@0.2``.

        Raises:
            ValueError: saying what is allowed.
        """
        kind, _, value = (part.strip() for part in text.partition("="))
        if kind not in ATTACKS:
            raise ValueError(
                f"nothing, sign-flip=0.2, scale=10@0.2, noise=0.2 or permute=0.2, one kind only; found '{kind}'"
            )
        factor, at, share = value.rpartition("@")
        if bool(at) != (kind == "scale"):
            raise ValueError(
                f"{kind}={'10@0.2, a factor and the share of the clients' if kind == 'scale' else '0.2'}"
            )
        if at and not (_FACTOR.fullmatch(factor) and math.isfinite(float(factor))):
            raise ValueError(f"a finite factor before the @, found '{factor}'")
        if not (_SHARE.fullmatch(share) and 0 < float(share) < 1):
            raise ValueError(f"a share of the clients above 0 and below 1, found '{share}'")
        return cls(kind, float(share), float(factor) if at else 1.0)


def announced(attack: str, who: Sequence[int]) -> str:
    """Return the message that names the attack and the attacking clients."""
    malicious = ", ".join(map(str, who))
    return f"attack {attack}: clients {malicious} send falsified prototypes; accuracies are those of the other clients"
