"""A device's identity: its id, and the form of its data at the handshake, checked against in every later message.

A SuperNode with a registered key keeps its node id when it is restarted, so it gets no second handshake, although its
operator may have changed its name or data meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from flwr.app import ConfigRecord

from pbfl_flwr.data import ClientData, same_deal
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task

IDENTITY = "identity"  # key in a message's ConfigRecord
DEAL = "deal"  # likewise, where code of a user decides which samples are whose
# A name must not be a number: client-id='0' would otherwise be another client than client-id=0.
NAME = re.compile(r"(?!\d+$)[A-Za-z0-9._-]{1,64}")
ALLOWED_ID = "a whole number from 0, or a name of 1 to 64 letters, digits, '.', '_', '-' that is not a number"


def is_number(client: object) -> bool:
    """Whether a client id is a whole number from 0, of at most 63 bits as a message carries them."""
    return isinstance(client, int) and not isinstance(client, bool) and 0 <= client < 2**63


def digest(names: Sequence[str]) -> str:
    """Return a short hash of an ordered list of names (of features or classes); empty for an empty list."""
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16] if names else ""


def digest_of_key(public_key: bytes) -> str:
    """Return a hash of a node's public key, as PEM; so long that nobody finds another key with the same one."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def declared_identity(client: int | str, task: Task, labels: Sequence[str], columns: str) -> str:
    """Return a device's identity in four lines: client id, K and input shape, digest of the classes, columns."""
    shape = "x".join(map(str, task.input_shape))
    return f"{client}\n{task.num_classes} classes of inputs {shape}\n{digest(labels)}\n{columns}"


def check_identity(config: ConfigRecord, client: int | str, data: ClientData) -> None:
    """Check that a device has the same client id and the same form of data as at the handshake.

    A message without an identity, as in a simulation, is not checked.

    Raises:
        PbflError: naming what has changed.
    """
    if IDENTITY not in config:
        return
    columns = digest(data.columns)
    declared, current = (
        str(config[IDENTITY]).split("\n"),
        declared_identity(client, data.task(1), data.label_names, columns).split("\n"),
    )
    reasons = (
        f"client-id = {client!r} in --node-config: in this run the node is client {declared[0]}; start it with that id",
        f"its data are {current[1]}, but were {declared[1]} when it joined this run; restore them",
        "the classes of its data have other names, or another order, than when it joined this run; restore them",
        "the columns of its data have other names, or another order, than when it joined this run; restore them",
    )
    for reason, before, after in zip(reasons, declared, current, strict=True):
        if before != after:
            raise PbflError(reason)


def check_deal(config: ConfigRecord, deal: str) -> None:
    """Check that this process has dealt the samples as all others did in the handshake.

    Raises:
        PbflError: if not.
    """
    if not same_deal(str(config.get(DEAL, deal)), deal):
        raise PbflError(dealt_otherwise("this process", "those of the handshake"))


def dealt_otherwise(one: str, others: str) -> str:
    """Return the line on a user's function that did not repeat itself, of two places."""
    return (
        f"the function that dataset or partition names gives {one} other samples than {others}; it must give the same "
        "every time, so draw from the generator that it gets, or from one with a fixed seed"
    )
