"""A device's identity: its id, form of data and network at the handshake, checked against in every later message.

A SuperNode with a registered key keeps its node id when it is restarted, so it gets no second handshake, although its
operator may have changed its name, data or model meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from flwr.app import ConfigRecord

from pbfl_flwr.data import ClientData, same_deal
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.pretrained import digest as digest_of_weights
from pbfl_flwr.runs.records import ClientRecord
from pbfl_flwr.task import Task

IDENTITY = "declared"  # key in a message's ConfigRecord
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


def declared_identity(client: ClientRecord) -> str:
    """Return what a device declared in the handshake and must keep, a line for each reason of the two checks below."""
    form = client.configured_data, client.task, client.labels, client.columns
    lines = _identity(client.label, *form, client.architecture)
    return "\n".join([*lines, client.weights, _sizes(client.parameters)])


def _identity(
    client: int | str, configured: bool, task: Task, labels: Sequence[str], columns: str, architecture: str
) -> list[str]:
    shape, tokens = "x".join(map(str, task.input_shape)), f" of {task.vocabulary_size} tokens"
    data = f"{task.num_classes} classes of inputs {shape}{tokens if task.vocabulary_size else ''}"
    return [
        str(client),
        f"its share of a common dataset with {data}" if configured else data,
        digest(labels),
        columns,
        f"{architecture} with d = {task.feature_dim}",
    ]


def _sizes(parameters: tuple[int, int]) -> str:
    body, head = parameters
    return f"{body} + {head} parameters"


def check_identity(
    config: ConfigRecord,
    client: int | str,
    configured: bool,
    data: ClientData,
    task: Task,
    architecture: str,
) -> None:
    """Check that a device has the same client id, form of data and architecture as at the handshake.

    A message without an identity, as in a simulation, is not checked. ``configured`` says whether the client has the
    configured dataset, not data of its own.

    Raises:
        PbflError: naming what has changed.
    """
    if IDENTITY not in config:
        return
    *declared, _, _ = str(config[IDENTITY]).split("\n")
    current = _identity(client, configured, task, data.label_names, digest(data.columns), architecture)
    reasons = (
        f"client-id = {client!r} in --node-config: in this run the node is client {declared[0]}; start it with that id",
        f"its data are {current[1]}, but were {declared[1]} when it joined this run; restore them",
        "the classes of its data have other names, or another order, than when it joined this run; restore them",
        "the columns of its data have other names, or another order, than when it joined this run; restore them",
        f"its network is {current[4]}, but was {declared[4]} when it joined this run; start it with that model",
    )
    for reason, before, after in zip(reasons, declared, current, strict=True):
        if before != after:
            raise PbflError(reason)


def check_network(config: ConfigRecord, architecture: str, parameters: tuple[int, int]) -> None:
    """Check a device's network once it is built, as :func:`check_identity` does: pretrained weights and sizes.

    Raises:
        PbflError: naming what has changed.
    """
    if IDENTITY not in config:
        return
    *_, weights, sizes = str(config[IDENTITY]).split("\n")
    if weights != digest_of_weights(architecture):
        raise PbflError(
            f"the pretrained weights of {architecture} are others than when it joined this run; restore them"
        )
    if sizes != (current := _sizes(parameters)):  # code of its own has changed
        raise PbflError(f"its network has {current}, but had {sizes} when it joined this run; restore it")


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
