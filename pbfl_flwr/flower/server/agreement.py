"""Which clients fit into one run: a client-id belongs to one node's key, and all share the form of their data.

A device may declare any client-id and any data. So where two contradict each other, only these two bear the
consequences, and what most devices declare is what the run has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

from pbfl_flwr.data import same_deal
from pbfl_flwr.errors import LONGEST, PbflError
from pbfl_flwr.flower.messages.identity import dealt_otherwise
from pbfl_flwr.runs.directory import RunRefused
from pbfl_flwr.runs.records import ClientRecord

UNCHANGED = (  # of a client that comes back
    "simulated", "name", "configured_data", "task", "labels", "columns", "architecture", "weights", "parameters"
)  # fmt: skip


def label_order(client: ClientRecord) -> tuple[str, int, int]:
    """Sort key of clients, independent of the order of replies: numbers come before names."""
    return client.name, client.client, client.node


def has_its_key(new: ClientRecord, old: ClientRecord) -> bool:
    """Whether a node that declares a client-id of the run may have it.

    A client-id belongs to its client's key for the whole run if that is registered under a name. A key without a name
    may be one that a SuperNode makes at every start, so its client can come back with another one.
    """
    return new.key == old.key or not old.registered


def check_key(new: ClientRecord, old: ClientRecord) -> None:
    """Check that a client of the run has come back with its key.

    Raises:
        PbflError: if not; names the node.
    """
    if not has_its_key(new, old):
        raise PbflError(
            f"client-id {new.label} belongs to another key in this run, registered as {old.registered}, than that of "
            f"node {new.node}"
        )


def check_unchanged(new: ClientRecord, old: ClientRecord) -> None:
    """Check that a client of the run has come back with the same properties.

    Raises:
        RunRefused: naming what has changed.
    """
    for key in UNCHANGED:
        if (now := getattr(new, key)) != (before := getattr(old, key)):
            raise RunRefused(
                f"client {new.label}: a run keeps its clients, but this one has {key} = {str(now)[:LONGEST]}, it had "
                f"{str(before)[:LONGEST]}"
            )
    if old.deal and not same_deal(new.deal, old.deal):
        raise RunRefused(dealt_otherwise(f"client {new.label}", "it had in this run"))


def contested(clients: Iterable[ClientRecord], taken: Collection[str]) -> dict[int, PbflError]:
    """Return node -> why for nodes that declare the same client-id, where no client of the run has it (``taken``) yet.

    The one whose key alone is registered under this name is right; otherwise nobody can tell, and none is used.
    """
    claims: dict[str, list[ClientRecord]] = {}
    for client in sorted(clients, key=label_order):
        claims.setdefault(client.label, []).append(client)
    refused: dict[int, PbflError] = {}
    for label, nodes in claims.items():
        if label in taken or len(nodes) == 1:
            continue
        owners = [client for client in nodes if client.registered == label]
        right = owners[0] if len(owners) == 1 else None
        count = "two" if len(nodes) == 2 else str(len(nodes))
        names = ", ".join(str(client.node) for client in nodes[:-1]) + f" and {nodes[-1].node}"
        which = f"only the key of {right.node}" if right else "not exactly one of their keys"
        error = PbflError(
            f"client-id {label} is used by {count} nodes, {names}, and {which} is registered under this name"
            f"{'' if right else ': none is used'}"
        )
        refused |= {client.node: error for client in nodes if client is not right}
    return refused


def majority(clients: Iterable[ClientRecord]) -> list[ClientRecord]:
    """Return the clients that agree with each other, as most do; of equally many those with the lowest label."""
    same_data = largest(clients, lambda client: (client.simulated, client.task, client.labels))
    with_columns = largest((client for client in same_data if client.columns), lambda client: client.columns)
    columns = {"", *(client.columns for client in with_columns)}
    return [client for client in same_data if client.columns in columns]


def largest(clients: Iterable[ClientRecord], value: Callable[[ClientRecord], Hashable]) -> list[ClientRecord]:
    """Return the largest group of clients with one value; of equally large ones that with the lowest label."""
    groups: dict[Hashable, list[ClientRecord]] = {}
    for client in sorted(clients, key=label_order):
        groups.setdefault(value(client), []).append(client)
    return max(groups.values(), key=len, default=[])


def check_agreement(members: Mapping[int, ClientRecord], client: ClientRecord) -> None:
    """Check that a client is compatible with those of a run.

    Raises:
        PbflError: if it differs in K, d, V, input shape, class names or columns, if only one is simulated, or if the
            samples were dealt otherwise in its process.
    """
    if not members:
        return
    name_classes = "; labels='...' names all classes, in --node-config or in the run configuration"
    set_shape = "; input-shape='...', in --node-config or in the run configuration, brings images to one"
    first = members[min(members)]
    for what, mine, theirs, advice in (
        ("being simulated", first.simulated, client.simulated, ""),
        ("num classes K", first.task.num_classes, client.task.num_classes, name_classes),
        ("feature-dim d", first.task.feature_dim, client.task.feature_dim, ""),
        ("input shape", first.task.input_shape, client.task.input_shape, set_shape),
        ("label names", first.labels, client.labels, name_classes),
        ("vocabulary size V", first.task.vocabulary_size, client.task.vocabulary_size, ""),
    ):
        if mine != theirs:
            raise PbflError(
                f"clients disagree on {what}: client {first.label} has {str(mine)[:LONGEST]}, {client.label} has "
                f"{str(theirs)[:LONGEST]}{advice}"
            )
    if client.simulated and not same_deal(
        client.deal, first.deal
    ):  # of devices, nobody could tell which one is right
        raise PbflError(dealt_otherwise(f"client {first.label}", f"client {client.label}"))
    if not client.columns:
        return
    first = next((members[number] for number in sorted(members) if members[number].columns), client)
    if client.columns != first.columns:
        raise PbflError(
            f"clients disagree on feature columns: those of client {first.label} and {client.label} differ in name or "
            "order; pbfl check-data prints them"
        )
