"""The handshake: nodes say who they are and what they have, and all clients must be compatible.

::

    new run       handshake with every node -> checked roster
    resumed run   handshake with the recorded clients; missing ones may reconnect later
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from pbfl_flwr.errors import LONGEST, PbflError, printable
from pbfl_flwr.flower.code_version import code_version
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.grid import OnWait, ignore, poll
from pbfl_flwr.flower.server.replies import error_reason
from pbfl_flwr.flower.server.roster import NO_NODE, Roster, client_from_reply
from pbfl_flwr.payloads import RejectedPayload, Reveal
from pbfl_flwr.runs.directory import RunRefused
from pbfl_flwr.runs.records import ClientRecord

REVEALS = (  # what the handshake reveals to the server
    Reveal("client id, or the device's name", "how the server tells clients apart", message="handshake"),
    Reveal("number of training and test samples", "sent once", "client-report = 'none'", message="handshake"),
    Reveal(
        "names of the classes, input shape, hash of the columns' names or of the words",
        "all clients must agree on them",
        message="handshake",
    ),
    Reveal("architecture, number of parameters, kind of device", "for logs and costs", message="handshake"),
    Reveal("hash of pretrained weights", "to warn if clients begin with different ones", message="handshake"),
    Reveal("version of pbfl-flwr", "to warn if it differs from the server's", message="handshake"),
)
JOIN_PAUSE = 2.0  # seconds; Flower's simulation registers its nodes in a loop without pauses
MAX_NODES_NAMED = 3  # in one line
CLIENT_ID = "client-id = "  # contained in a reason if it already identifies the client
UNCHANGED = ("task", "labels", "columns", "architecture", "weights", "parameters")  # when a client reconnects
UNCHANGED_ON_RESUME = ("simulated", "name", "configured_data", *UNCHANGED)


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


def count_simulated_nodes(grid: Grid, timeout: float) -> int:
    """Return how many nodes a simulation has: those that are there once no more have joined for a while.

    Args:
        grid: Flower's.
        timeout: seconds to wait for the first one.

    Raises:
        PbflError: if none has joined when the timeout has passed.
    """
    first = wait_for_nodes(grid, 1, timeout)
    deadline, count = time.monotonic() + JOIN_PAUSE, len(first)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if (now := len(list(grid.get_node_ids()))) != count:
            deadline, count = time.monotonic() + JOIN_PAUSE, now
    return count


def send_handshake(
    grid: Grid, nodes: Sequence[int], experiment: str, timeout: float
) -> tuple[list[ClientRecord], dict[int, str]]:
    """Ask nodes who they are and what they have.

    Args:
        grid: Flower's.
        nodes: their ids.
        experiment: id of the run.
        timeout: seconds to wait for the replies.

    Returns:
        The clients with a valid reply, and node -> reason for the others.
    """
    messages = [
        Message(
            wire.content(config=ConfigRecord({"experiment": experiment, "code-version": code_version()})),
            dst_node_id=node,
            message_type="query",
            group_id="handshake",
        )
        for node in nodes
    ]
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    clients: list[ClientRecord] = []
    refused = dict.fromkeys(nodes, f"no answer within {timeout:.0f} s")
    for reply in replies:
        node = node_of.get(reply.metadata.reply_to_message_id, 0)
        if reply.has_error():
            refused[node] = error_reason(reply)
            continue
        try:
            if not reply.has_content() or wire.CONFIG not in reply.content.config_records:
                raise RejectedPayload("its handshake reply is empty")
            clients.append(client_from_reply(node, reply.content.config_records[wire.CONFIG]))
            refused.pop(node, None)
        except RejectedPayload as error:
            refused[node] = printable(str(error)[:LONGEST])
    return clients, refused


def handshake(
    grid: Grid,
    num_clients: int,
    experiment: str,
    timeout: float,
    join_timeout: float,
    on_wait: OnWait = ignore,
    least: int = 0,
) -> tuple[Roster, list[str]]:
    """Ask every node and check that all clients are compatible, before any training starts.

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
    clients, refused = send_handshake(grid, nodes, experiment, timeout)
    if refused and not 0 < least <= len(clients):
        raise PbflError("\n".join(refusals(refused, len(nodes))))
    if len(clients) < num_clients and any(client.simulated for client in clients):
        raise PbflError(
            f"min-clients = {least}: must be 0 in a simulation, where all num-clients = {num_clients} must "
            f"start; {len(clients)} did"
        )
    roster = checked_roster(with_numbers(clients, num_clients))
    if beyond := [client for client in roster.clients if client >= num_clients]:
        raise PbflError(
            f"client-id {beyond[0]} is beyond num-clients = {num_clients}: must be 0 to {num_clients - 1}"
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


def with_numbers(clients: Iterable[ClientRecord], num_clients: int) -> list[ClientRecord]:
    """Return the clients, those with names numbered: names in ascending order get the lowest free numbers.

    Args:
        clients: in any order.
        num_clients: M.

    Raises:
        PbflError: if there are more names than free numbers.
    """
    connected = list(clients)
    names = sorted({client.name for client in connected if client.name})
    taken = {client.client for client in connected if not client.name}
    free = [number for number in range(num_clients) if number not in taken]
    if len(names) > len(free):
        raise PbflError(
            f"client-id '{names[len(free)]}': num-clients = {num_clients} leaves no number for it; {len(connected)} "
            f"clients connected: {', '.join(sorted(client.label for client in connected))}"
        )
    numbers = dict(zip(names, free, strict=False))
    return [client.numbered(numbers[client.name]) if client.name else client for client in connected]


def checked_roster(clients: Iterable[ClientRecord]) -> Roster:
    """Return the roster if all clients are compatible.

    Raises:
        PbflError: if two nodes have the same client id, or if two clients differ in K, d, input shape, class names,
            columns or vocabulary.
    """
    by_number: dict[int, ClientRecord] = {}
    for client in sorted(clients, key=lambda client: (client.client, client.node)):
        if (other := by_number.get(client.client)) is not None:
            which = f"client-id {client.label}"
            if client.name != other.name:
                which = f"number {client.client} (of client-ids {other.label} and {client.label})"
            raise PbflError(f"{which} is used by two nodes, {other.node} and {client.node}")
        by_number[client.client] = client
    first, *others = by_number.values()
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
    first, *others = [client for client in by_number.values() if client.columns] or [first]
    for other in others:
        if other.columns != first.columns:
            what = "words of the vocabulary" if first.task.vocabulary_size else "feature columns"
            raise PbflError(
                f"clients disagree on {what}: those of client {first.label} and {other.label} differ in "
                "name or order; pbfl check-data prints them"
            )
    return Roster(by_number)


# A resumed run ----------------------------------------------------------------------------------------------


def resumed_handshake(
    grid: Grid,
    recorded: Sequence[ClientRecord],
    experiment: str,
    timeout: float,
    join_timeout: float,
    least: int,
    on_wait: OnWait = ignore,
) -> tuple[Roster, list[str]]:
    """Ask the clients of a resumed run; missing ones may reconnect later, other nodes are refused.

    Args:
        grid: Flower's.
        recorded: the run's clients, as in run.json.
        experiment: id of the run.
        timeout: seconds to wait for the replies.
        join_timeout: seconds to wait for the nodes.
        least: number of the run's clients that it needs to continue.
        on_wait: called with lines on how many nodes have joined, while waiting.

    Returns:
        All clients of the run, missing ones with node NO_NODE, and a line for every refused node.

    Raises:
        RunRefused: if a client has changed, naming the first.
        PbflError: if fewer than ``least`` connected, naming the missing ones, or if two nodes have the same client id.
    """
    known = {client.client: client.on_node(NO_NODE) for client in recorded}
    numbers = {client.label: number for number, client in known.items()}
    clients, failed = _handshake_until_present(grid, numbers, experiment, timeout, join_timeout, on_wait)
    back = [client.numbered(numbers[client.label]) for client in clients if client.label in numbers]
    refused = [not_in_run(client) for client in clients if client.label not in numbers]
    refused += [f"node {node}: {reason}" for node, reason in failed.items()]
    present = checked_roster(back) if back else Roster({})
    if len(present.clients) < least:
        missing = ", ".join(sorted(set(numbers) - {client.label for client in back}))
        others = ", ".join(sorted({client.label for client in clients} - set(numbers)))
        needed = f"resuming this run needs at least {least} of its {len(known)} clients; missing: {missing}"
        instead = f"; other clients connected: {others}" if others else ""
        raise PbflError("\n".join([f"{needed}{instead}", *refusals(failed, len(clients) + len(failed))]))
    for number, client in present.clients.items():
        for key in UNCHANGED_ON_RESUME:
            if (new := getattr(client, key)) != (old := getattr(known[number], key)):
                raise RunRefused(
                    f"client {client.label}: a resumed run keeps its clients, but this one has {key} = "
                    f"{str(new)[:LONGEST]}, it had {str(old)[:LONGEST]}"
                )
    return Roster(dict(sorted({**known, **present.clients}.items()))), refused


def _handshake_until_present(
    grid: Grid, labels: Collection[str], experiment: str, timeout: float, join_timeout: float, on_wait: OnWait
) -> tuple[list[ClientRecord], dict[int, str]]:
    """Ask nodes until all of these clients have replied or the timeout passes; other nodes do not count."""
    end = time.monotonic() + join_timeout
    clients: list[ClientRecord] = []
    failed: dict[int, str] = {}
    while True:
        others = len(failed) + sum(client.label not in labels for client in clients)
        left = max(0.0, end - time.monotonic())
        nodes = wait_for_nodes(grid, len(labels) + others, left, on_wait, least=0)
        new = sorted(set(nodes) - {client.node for client in clients} - set(failed))
        if not new:
            return clients, failed
        new_clients, new_failed = send_handshake(grid, new, experiment, timeout)
        # Others may have reconnected elsewhere; a node that was lost during the handshake may come back under its id.
        connected = set(grid.get_node_ids()) if new_failed else set(nodes)
        clients = [client for client in clients if client.node in nodes] + new_clients
        failed = {node: reason for node, reason in (failed | new_failed).items() if node in connected}
        if set(labels) <= {client.label for client in clients}:
            return clients, failed


def not_in_run(client: ClientRecord) -> str:
    """Return why a client that the run does not have is refused."""
    return f"client-id {client.label} on node {client.node} is not part of this run"
