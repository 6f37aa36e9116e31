"""What travels between server and clients: frozen dataclasses with fixed shapes.

In memory a payload is dense: it has K rows, and absent classes are zero rows with ``present`` False, never lists or
infinities. On the wire it is ragged: ``to_tensors`` keeps only the rows of present classes, and ``from_tensors``
validates everything that arrives before it is used. ``scalars`` is the papers' measure of cost (numbers that carry
information); bytes are counted where the message is encoded, in ``flower/messages/wire.py``.
"""

from pbfl_flwr.payloads.classes import Logits, Prototypes, class_counts
from pbfl_flwr.payloads.contract import (
    MAX_COUNT,
    MAX_MAGNITUDE,
    Magnitudes,
    Nothing,
    Payload,
    RejectedPayload,
    Serializable,
    Upload,
    check_storable,
    joined,
    part_of,
    separate,
)
from pbfl_flwr.payloads.networks import Factors, LowRank, Weights, WeightsAndPrototypes

__all__ = [
    "MAX_COUNT",
    "MAX_MAGNITUDE",
    "Factors",
    "Logits",
    "LowRank",
    "Magnitudes",
    "Nothing",
    "Payload",
    "Prototypes",
    "RejectedPayload",
    "Serializable",
    "Upload",
    "Weights",
    "WeightsAndPrototypes",
    "check_storable",
    "class_counts",
    "joined",
    "part_of",
    "separate",
]
