"""What a message reveals to its receiver, declared next to the payloads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["in clear", "blurred", "hidden"]


@dataclass(frozen=True)
class Reveal:
    """One piece of information that a message reveals.

    Attributes:
        what: the information.
        how: how the receiver obtains it.
        hide: the settings that hide it; empty if none does.
        state: "in clear", "blurred" by an active setting, or "hidden" from the receiver.
        message: which message reveals it.
        single_samples: whether it can be about one sample.
    """

    what: str
    how: str
    hide: str = ""
    state: State = "in clear"
    message: Literal["handshake", "upload", "report", "broadcast"] = "upload"
    single_samples: bool = False

    def but(self, state: State, how: str) -> Reveal:
        """Return a copy with the state and explanation under an active setting."""
        return replace(self, state=state, how=how)


PRESENCE = Reveal(
    "which classes the client holds",
    "the labels sent with the rows",
    "dense-uploads with dp-noise",
)
MEANS = Reveal(
    "class means of features",
    "the rows: the mean feature of each class; a starting point of reconstruction attacks",
    "dp-noise",
)
SINGLE = Reveal(
    "features of single samples",
    "the mean of a class with one sample is that sample's feature",
    "min-class-count",
    single_samples=True,
)
COUNTS = Reveal("samples of each class", "n_ij, sent with the rows", "aggregation = 'mean', or count-bucket")
TOTAL = Reveal("number of training samples", "n_i, sent with the payload")
WEIGHTS = Reveal(
    "weights of the network",
    "all shared tensors: a starting point of gradient inversion and membership inference; changes of the "
    "classifier reveal which classes the client holds",
)
HOLDER = Reveal(
    "the prototype of a class that only one client has, to all clients",
    "the broadcast prototype of that class is this client's upload",
    message="broadcast",
)


def unprotected(reveals: Iterable[Reveal]) -> tuple[Reveal, ...]:
    """Return the reveals for payloads to which no setting of the group ``privacy`` applies."""
    return tuple(replace(reveal, hide="") for reveal in reveals)
