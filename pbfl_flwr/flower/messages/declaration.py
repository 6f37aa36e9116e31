"""What a device is held to in every question: the name and the form of the data with which it said hello.

A SuperNode with a registered key keeps its node id when it is started again, so nobody greets it a second time, though
its operator may have changed both meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from flwr.app import ConfigRecord

from pbfl_flwr.data import ClientData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task

DECLARATION = "said"  # of a question's settings
LONGEST_LIST = 200  # characters of names in a message


def digest(names: Sequence[str]) -> str:
    """Return a short hash of the names of features or classes, or of tokens, and of their order; nothing for none."""
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16] if names else ""


def declaration(client: int | str, task: Task, labels: Sequence[str], columns: str) -> str:
    """Return what a device said, a line each: who it is, K and the input's shape, the classes, the columns.

    Args:
        client: its number or its name.
        task: of its data.
        labels: names of the classes.
        columns: digest of the names of the columns, or of the vocabulary.
    """
    shape = "x".join(map(str, task.input_shape))
    return f"{client}\n{task.num_classes} classes of inputs {shape}\n{digest(labels)}\n{columns}"


def check_declaration(asked: ConfigRecord, client: int | str, data: ClientData) -> None:
    """Check that a device is who it was and that its data have the form that they had.

    Args:
        asked: the question's settings; in a simulation, and on Flower's older interface, they hold nobody to anything.
        client: its number or its name now.
        data: what it brings now.

    Raises:
        PbflError: naming what has changed.
    """
    if DECLARATION not in asked:
        return
    columns = digest(data.columns or data.vocabulary)
    was, now = (
        str(asked[DECLARATION]).split("\n"),
        declaration(client, data.task(1), data.label_names, columns).split("\n"),
    )
    listed = ", ".join(data.label_names)[:LONGEST_LIST]
    said = (
        f"client-id = {client!r} in --node-config: in this run the node is client {was[0]}; start it as that",
        f"its data are {now[1]}, but were {was[1]} when it joined this run; put them back",
        f"the classes of its data are {listed}, but were others when it joined this run; put them back",
        "the columns or words of its data have other names, or another order, than when it joined this run; put "
        "them back",
    )
    for reason, before, after in zip(said, was, now, strict=True):
        if before != after:
            raise PbflError(reason)
