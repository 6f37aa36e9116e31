"""What travels between server and clients: frozen dataclasses with fixed shapes.

In memory a payload is dense: K rows, absent classes are zero rows with ``present`` False, never lists and
never infinities. On the wire it is ragged: ``to_tensors`` keeps only the rows of present classes and
``from_tensors`` checks everything that arrives before anybody can use it. What is encoded is what is counted:
``scalars`` is the paper's measure (numbers that carry information), bytes are counted in ``flower/messages/wire.py``.
"""

from pbfl_flwr.payloads.classes import Logits, Prototypes, class_counts
from pbfl_flwr.payloads.contract import (
    MAX_COUNT,
    MAX_MAGNITUDE,
    Nothing,
    Payload,
    RejectedPayload,
    Upload,
    joined,
    separate,
    under,
)
from pbfl_flwr.payloads.mixtures import Mixtures
from pbfl_flwr.payloads.networks import Factors, LowRank, Weights, WeightsAndPrototypes
from pbfl_flwr.payloads.reveals import Reveal

__all__ = [
    "MAX_COUNT",
    "MAX_MAGNITUDE",
    "Factors",
    "Logits",
    "LowRank",
    "Mixtures",
    "Nothing",
    "Payload",
    "Prototypes",
    "RejectedPayload",
    "Reveal",
    "Upload",
    "Weights",
    "WeightsAndPrototypes",
    "class_counts",
    "joined",
    "separate",
    "under",
]
