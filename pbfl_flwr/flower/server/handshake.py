"""The handshake: waiting for nodes, and asking them who they are and what they have."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from flwr.app import ConfigRecord, Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from pbfl_flwr.errors import LONGEST, PbflError, printable
from pbfl_flwr.flower.code_version import code_version
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.identity import digest_of_key
from pbfl_flwr.flower.server.grid import OnWait, ignore, lifetime, poll, simulates
from pbfl_flwr.flower.server.replies import LOST, error_reason
from pbfl_flwr.flower.server.roster import MAX_TEXT, client_from_reply
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.runs.records import ClientRecord

JOIN_PAUSE = 2.0  # seconds; Flower's simulation registers its nodes in a loop without pauses
MAX_NODES_NAMED = 3  # in one line
CLIENT_ID = "client-id = "  # contained in a reason if it already identifies the client


def wait_for_nodes(
    grid: Grid, target: int, timeout: float, on_wait: OnWait = ignore, without: Collection[int] = ()
) -> list[int]:
    """Return the ids of the connected nodes once there are enough of them, or when the timeout has passed.

    In a simulation also once no more have joined for a while, since then none will. Nodes in ``without`` do not count.
    The timeout is in seconds; ``on_wait`` is called with a line on how many there are.
    """
    nodes: list[int] = []
    since = time.monotonic()

    def status() -> str:
        return f"waiting for nodes: {len(nodes)} of {target} have joined"

    for _ in poll(timeout, status, on_wait):
        before, nodes = nodes, sorted(set(grid.get_node_ids()).difference(without))
        if nodes != before:
            since = time.monotonic()
        complete = simulates(grid) and nodes and time.monotonic() - since >= JOIN_PAUSE
        if complete or len(nodes) >= target:
            break
    return nodes


def count_simulated_nodes(grid: Grid, timeout: float) -> int:
    """Return how many nodes a simulation has: those that are there once no more have joined for a while.

    The timeout, in seconds, is for the first one.

    Raises:
        PbflError: if none has joined when the timeout has passed.
    """
    count = len(wait_for_nodes(grid, 1, timeout))
    if not count:
        raise PbflError(f"num-clients = 0, but no node joined within {timeout:.0f} s")
    deadline = time.monotonic() + JOIN_PAUSE
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if (now := len(list(grid.get_node_ids()))) != count:
            deadline, count = time.monotonic() + JOIN_PAUSE, now
    return count


def send_handshake(
    grid: Grid, nodes: Sequence[int], experiment: str, timeout: float
) -> tuple[list[ClientRecord], dict[int, str], dict[int, str]]:
    """Ask nodes who they are and what they have, and wait for so many seconds.

    Returns:
        The clients with a valid reply, and node -> reason for those that cannot take part or are silent, and for those
        that Flower has lost, which may come back.
    """
    messages = [
        Message(
            wire.content(config=ConfigRecord({"experiment": experiment, "code-version": code_version()})),
            dst_node_id=node,
            message_type="query",
            ttl=lifetime(timeout),
            group_id="handshake",
        )
        for node in nodes
    ]
    known = {node.node_id: node for node in grid.get_nodes()}
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    clients: list[ClientRecord] = []
    refused = dict.fromkeys(nodes, f"no answer within {timeout:.0f} s")
    lost: dict[int, str] = {}
    for reply in replies:
        node = node_of.get(reply.metadata.reply_to_message_id, 0)
        if reply.has_error():
            refused.pop(node, None)
            (lost if reply.error.code in LOST else refused)[node] = error_reason(reply)
            continue
        try:
            if not reply.has_content() or wire.CONFIG not in reply.content.config_records:
                raise RejectedPayload("its handshake reply is empty")
            if node not in known:
                raise RejectedPayload("its node was not connected when it was asked")
            client = client_from_reply(node, reply.content.config_records[wire.CONFIG])
            clients.append(_with_key(client, known[node]))
            refused.pop(node, None)
        except RejectedPayload as error:
            refused[node] = printable(str(error)[:LONGEST])
    return clients, refused, lost


def _with_key(client: ClientRecord, node: NodeInfo) -> ClientRecord:
    """Return a device with the key of its node; Flower's simulation gives its nodes random bytes instead.

    Every SuperNode signs its calls with its key, also one without a key of its own, which makes a new one at every
    start. Only a registered key can have a name, which the operator gave it.
    """
    if client.simulated or not node.public_key:
        return client
    return client.with_key(digest_of_key(node.public_key), printable(node.name[:MAX_TEXT]))


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
