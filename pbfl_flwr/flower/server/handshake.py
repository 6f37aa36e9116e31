"""The hello round: collects every client's properties and checks that they are compatible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from pbfl_flwr.errors import LONGEST, PbflError, printable
from pbfl_flwr.flower.code_version import code_version
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.replies import error_reason
from pbfl_flwr.flower.server.roster import Member, Roster
from pbfl_flwr.flower.server.waiting import OnWait, ignore, poll
from pbfl_flwr.payloads import RejectedPayload, Reveal

REVEALS = (  # what the hello round reveals to the server
    Reveal("client id, or the device's name", "how the server tells clients apart", message="hello"),
    Reveal("number of training and test samples", "sent once", "client-report = 'none'", message="hello"),
    Reveal(
        "names of the classes, input shape, hash of the columns' names or of the words",
        "all clients must agree on them",
        message="hello",
    ),
    Reveal("architecture, number of parameters, kind of device", "for logs and costs", message="hello"),
    Reveal("hash of pretrained weights", "to warn if clients begin with different ones", message="hello"),
    Reveal("version of pbfl-flwr", "to warn if it differs from the server's", message="hello"),
)
MAX_NODES_NAMED = 3  # in one line
CLIENT_ID = "client-id = "  # contained in a reason if it already identifies the client


def wait_for_nodes(
    grid: Grid, target: int, timeout: float, on_wait: OnWait = ignore, least: int | None = None
) -> list[int]:
    """Return the node ids once enough of them have joined; in a simulation they join during the first seconds.

    Args:
        grid: Flower's.
        target: nodes to wait for.
        timeout: seconds to wait for them.
        on_wait: called with a line on how many have joined.
        least: nodes that suffice when the timeout has passed; by default ``target``.

    Raises:
        PbflError: if too few have joined when the timeout has passed.
    """

    def joined() -> list[int]:
        return sorted(grid.get_node_ids())

    def status() -> str:
        return f"waiting for nodes: {len(joined())} of {target} have joined"

    for _ in poll(timeout, status, on_wait):
        if len(nodes := joined()) >= target:
            return nodes
    if least is not None:
        if len(nodes) >= least:
            return nodes
        raise PbflError(
            f"min-clients = {least}, but only {len(joined())} nodes joined within {timeout:.0f} s"
        )
    raise PbflError(
        f"num-clients = {target}, but only {len(joined())} nodes joined within {timeout:.0f} s; a simulation "
        f"needs --federation-config 'num-supernodes={target}' (pbfl run passes it), a deployment needs "
        f"{target} running SuperNodes"
    )


def hello_round(
    grid: Grid,
    num_clients: int,
    experiment: str,
    timeout: float,
    join_timeout: float,
    on_wait: OnWait = ignore,
    least: int = 0,
) -> tuple[Roster, list[str]]:
    """Send a hello to every node and check that all clients are compatible, before any training starts.

    Args:
        grid: Flower's.
        num_clients: M.
        experiment: id of the run.
        timeout: seconds to wait for the replies.
        join_timeout: seconds to wait for the nodes.
        on_wait: called with lines on how many nodes have joined, while waiting.
        least: number of devices that suffice to start after join_timeout; 0 requires all clients.

    Returns:
        The roster, and a line for every node without a valid reply.

    Raises:
        PbflError: if clients are missing or incompatible; names them.
    """
    nodes = wait_for_nodes(grid, num_clients, join_timeout, on_wait, least or None)
    members, refused = send_hello(grid, nodes, experiment, timeout)
    if refused and not 0 < least <= len(members):
        raise PbflError("\n".join(refusals(refused, len(nodes))))
    if len(members) < num_clients and any(member.simulated for member in members):
        raise PbflError(
            f"min-clients = {least}: only 0 is allowed in a simulation, where all num-clients = {num_clients} must "
            f"start; {len(members)} did"
        )
    roster = checked_roster(with_numbers(members, num_clients))
    if beyond := [client for client in roster.members if client >= num_clients]:
        raise PbflError(
            f"client-id {beyond[0]} is beyond num-clients = {num_clients}: allowed are 0 to {num_clients - 1}"
        )
    return roster, [f"node {node}: {reason}" for node, reason in refused.items()]


def refusals(refused: Mapping[int, str], num_nodes: int) -> list[str]:
    """Return a line per reason with the number of clients; names a few nodes unless the reason names the client."""
    lines = []
    for reason in dict.fromkeys(refused.values()):
        nodes = [node for node, why in refused.items() if why == reason]
        which = (
            f" (on node {', '.join(map(str, nodes))})"
            if len(nodes) <= MAX_NODES_NAMED and CLIENT_ID not in reason
            else ""
        )
        lines.append(f"{len(nodes)} of {num_nodes} clients: {reason}{which}")
    return lines


def send_hello(
    grid: Grid, nodes: Sequence[int], experiment: str, timeout: float
) -> tuple[list[Member], dict[int, str]]:
    """Send a hello to nodes.

    Args:
        grid: Flower's.
        nodes: their ids.
        experiment: id of the run.
        timeout: seconds to wait for the replies.

    Returns:
        The members with a valid reply, and node -> reason for the others.
    """
    messages = [
        Message(
            wire.content(config=ConfigRecord({"experiment": experiment, "code-version": code_version()})),
            dst_node_id=node,
            message_type="query",
            group_id="hello",
        )
        for node in nodes
    ]
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    members: list[Member] = []
    refused = dict.fromkeys(nodes, f"no answer within {timeout:.0f} s")
    for reply in replies:
        node = node_of.get(reply.metadata.reply_to_message_id, 0)
        if reply.has_error():
            refused[node] = error_reason(reply)
            continue
        try:
            if not reply.has_content() or wire.CONFIG not in reply.content.config_records:
                raise RejectedPayload("its hello reply is empty")
            members.append(Member.from_reply(node, reply.content.config_records[wire.CONFIG]))
            refused.pop(node, None)
        except RejectedPayload as error:
            refused[node] = printable(str(error)[:LONGEST])
    return members, refused


def with_numbers(members: Iterable[Member], num_clients: int) -> list[Member]:
    """Return the members, those with names numbered: names in ascending order get the lowest free numbers.

    Args:
        members: in any order.
        num_clients: M.

    Raises:
        PbflError: if there are more names than free numbers.
    """
    found = list(members)
    names = sorted({member.name for member in found if member.name})
    taken = {member.client for member in found if not member.name}
    free = [number for number in range(num_clients) if number not in taken]
    if len(names) > len(free):
        raise PbflError(
            f"client-id '{names[len(free)]}': num-clients = {num_clients} leaves no number for it; {len(found)} "
            f"clients connected: {', '.join(sorted(m.label for m in found))}"
        )
    numbers = dict(zip(names, free, strict=False))
    return [replace(m, client=numbers[m.name]) if m.name else m for m in found]


def checked_roster(members: Iterable[Member]) -> Roster:
    """Return the roster if all members are compatible.

    Raises:
        PbflError: if two nodes have the same client id, or if two clients differ in K, d, input shape, class names,
            columns or vocabulary.
    """
    by_client: dict[int, Member] = {}
    for member in sorted(members, key=lambda m: (m.client, m.node)):
        if (other := by_client.get(member.client)) is not None:
            which = f"client-id {member.label}"
            if member.name != other.name:
                which = f"number {member.client} (of client-ids {other.label} and {member.label})"
            raise PbflError(f"{which} is used by two nodes, {other.node} and {member.node}")
        by_client[member.client] = member
    first, *others = by_client.values()
    name_classes = "; labels='...' names all classes, in --node-config or in the run configuration"
    set_shape = "; input-shape='...', in --node-config or in the run configuration, brings images to one"
    for other in others:
        for what, mine, theirs, advice in (
            ("num classes K", first.task.num_classes, other.task.num_classes, name_classes),
            ("feature-dim d", first.task.feature_dim, other.task.feature_dim, ""),
            ("input shape", first.task.input_shape, other.task.input_shape, set_shape),
            ("label names", first.labels, other.labels, name_classes),
            ("vocabulary size V", first.task.vocabulary_size, other.task.vocabulary_size, ""),
        ):
            if mine != theirs:
                raise PbflError(
                    f"clients disagree on {what}: client {first.label} has {str(mine)[:LONGEST]}, "
                    f"{other.label} has {str(theirs)[:LONGEST]}{advice}"
                )
    first, *others = [m for m in by_client.values() if m.columns] or [first]
    for other in others:
        if other.columns != first.columns:
            named = "words of the vocabulary" if first.task.vocabulary_size else "feature columns"
            raise PbflError(
                f"clients disagree on {named}: those of client {first.label} and {other.label} differ in "
                "name or order; pbfl check-data prints them"
            )
    return Roster(by_client)
