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
    """

    what: str
    how: str
    hide: str = ""
    state: State = "in clear"
    message: Literal["hello", "upload", "report", "broadcast"] = "upload"

    def but(self, state: State, how: str) -> Reveal:
        """Return a copy with the state and explanation under an active setting."""
        return replace(self, state=state, how=how)


PRESENCE = Reveal(
    "which classes the client holds",
    "the labels beside the rows",
    "dense-uploads with dp-noise, or secure-aggregation",
)
MEANS = Reveal(
    "class means of features",
    "the rows: what a class looks like to the client's network; reconstruction attacks start here",
    "dp-noise, or secure-aggregation",
)
SINGLE = Reveal(
    "features of single samples",
    "the mean of a class with one sample is that sample's feature",
    "min-class-count",
)
COUNTS = Reveal("samples of each class", "n_ij beside the rows", "aggregation = 'mean', or count-bucket")
TOTAL = Reveal("number of training samples", "n_i beside the payload")
WEIGHTS = Reveal(
    "weights of the network",
    "all shared tensors; gradient inversion and membership inference start here, and changes of the classifier tell "
    "which classes the client holds",
)
HOLDER = Reveal(
    "the prototype of a class with one holder, to all clients",
    "what the server broadcasts of that class is this client's upload",
    "secure-aggregation hides from the server who it is, nothing else",
    message="broadcast",
)


def unprotected(reveals: Iterable[Reveal]) -> tuple[Reveal, ...]:
    """Return the reveals for payloads to which no setting of the group ``privacy`` applies."""
    return tuple(replace(reveal, hide="") for reveal in reveals)
