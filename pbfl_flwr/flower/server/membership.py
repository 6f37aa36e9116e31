"""Who takes part: the handshake before round 1, clients that reconnect or join during a run, and those that are absent.

::

    new run       handshake with every node -> checked roster
    resumed run   handshake with the recorded clients; missing ones may reconnect later
    every round   after a failure, or while others may join: handshake with new nodes -> moved and joined clients
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from pbfl_flwr.config import RunSettings
from pbfl_flwr.errors import LONGEST, PbflError, printable
from pbfl_flwr.flower.code_version import code_version, differing_code_versions
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.exchange import OverdueReplies, error_reason
from pbfl_flwr.flower.server.grid import OnWait, ignore, poll
from pbfl_flwr.flower.server.roster import NO_NODE, Roster, client_from_reply, other_weights
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
RECONNECT_TIMEOUT = 60.0  # seconds at most, for the handshake of a node that connects during a run
NOT_CONNECTED = "its node is not connected"
MAX_RETRY_ROUNDS = 32  # at most, until a node that was refused gets another handshake
UNCHANGED = ("task", "labels", "columns", "architecture", "weights", "parameters")  # when a client reconnects
UNCHANGED_ON_RESUME = ("simulated", "name", "configured_data", *UNCHANGED)

RosterCheck = Callable[[Roster], None]
"""Raises PbflError if the method does not support the clients of a roster together."""


# The handshake ----------------------------------------------------------------------------------------------


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
    refused = [_not_in_run(client) for client in clients if client.label not in numbers]
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


def _not_in_run(client: ClientRecord) -> str:
    return f"client-id {client.label} on node {client.node} is not part of this run"


# During a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admission:
    """Decides whether a device may join a running federation.

    Attributes:
        num_clients: M, the largest number of clients.
        check_roster: checks that the method supports a roster.
    """

    num_clients: int
    check_roster: RosterCheck

    def has_room(self, roster: Roster) -> bool:
        """Return whether there are fewer clients than the run can have."""
        return len(roster.clients) < self.num_clients

    def admitted(self, roster: Roster, client: ClientRecord) -> Roster:
        """Return the roster with one more client, under its own number or, if it has a name, the lowest free one.

        Args:
            roster: so far, without the client.
            client: that wants to join.

        Raises:
            PbflError: if it cannot join; gives the reason.
        """
        if not self.has_room(roster):
            raise PbflError(f"the run already has its num-clients = {self.num_clients} clients")
        if client.simulated:
            raise PbflError("simulated clients cannot join a running federation")
        if client.name:
            client = client.numbered(
                next(number for number in range(self.num_clients) if number not in roster.clients)
            )
        if client.client >= self.num_clients:
            raise PbflError(
                f"client-ids must be 0 to {self.num_clients - 1}, since num-clients = {self.num_clients}"
            )
        extended = checked_roster([*roster.clients.values(), client])
        self.check_roster(extended)
        return extended


def handshake_with_new_nodes(
    grid: Grid,
    roster: Roster,
    online: Collection[int],
    failed: Collection[int],
    experiment: str,
    timeout: float,
    admission: Admission | None = None,
    skipped: Collection[int] = (),
) -> tuple[Roster, dict[int, str]]:
    """Ask nodes that are not in the roster, e.g. a restarted SuperNode, which has a new node id.

    A client moves to a new node if its old one is disconnected or failed in the last round; otherwise two nodes claim
    the same client, and the new one is refused. Other clients join the run if they may.

    Args:
        grid: Flower's.
        roster: so far.
        online: ids of the connected nodes.
        failed: clients that failed in the last round.
        experiment: id of the run.
        timeout: seconds to wait for the replies.
        admission: decides who may join the run; None if no one may.
        skipped: nodes that are not asked.

    Returns:
        The roster with moved and joined clients, and node -> reason for refused nodes.
    """
    new = sorted(set(online) - {client.node for client in roster.clients.values()} - set(skipped))
    if not new:
        return roster, {}
    clients, silent = send_handshake(grid, new, experiment, timeout)
    refused = {node: f"node {node}: {reason}" for node, reason in silent.items()}
    # Independent of the order of replies; clients with their own numbers come before names, which get free numbers.
    for client in sorted(clients, key=lambda client: (client.name, client.client, client.node)):
        number = next((n for n, known in roster.clients.items() if known.label == client.label), None)
        try:
            if number is None:
                roster = _joined(roster, client, admission)
            else:
                moved = _moved(client.numbered(number), roster.clients[number], online, failed)
                roster = Roster({**roster.clients, number: moved})
                failed = set(failed) - {number}  # so a second new node cannot take over the same client
        except PbflError as error:
            refused[client.node] = str(error)
    return roster, refused


def _joined(roster: Roster, client: ClientRecord, admission: Admission | None) -> Roster:
    if admission is None:
        raise PbflError(_not_in_run(client))
    try:
        return admission.admitted(roster, client)
    except PbflError as error:
        raise PbflError(f"{_not_in_run(client)} and cannot join it: {error}") from None


def _moved(
    new: ClientRecord, old: ClientRecord, online: Collection[int], failed: Collection[int]
) -> ClientRecord:
    """Return the client on its new node, if its properties are unchanged and its old node is no longer in use."""
    changed = [key for key in UNCHANGED if getattr(new, key) != getattr(old, key)]
    if changed:
        raise PbflError(
            f"client {new.label} reconnected with another {changed[0]}: {getattr(new, changed[0])}, it had "
            f"{getattr(old, changed[0])}"
        )
    if old.node in online and old.client not in failed:
        raise PbflError(f"client-id {new.label} is used by two nodes, {old.node} and {new.node}")
    return new


@dataclass
class Membership:
    """The clients of a run from round to round: their nodes, overdue replies, and what a round's record says of them.

    ``warnings`` and ``joined`` collect until :meth:`recorded` says that the record of a round holds them, so a repeated
    round loses nothing.

    Attributes:
        roster: all clients and their current nodes.
        experiment: id of the run.
        timeout: seconds to wait for the handshake of a node that connects during the run.
        admission: decides which other devices may join; None if none may.
        overdue: replies that missed the deadline of their round.
        failed: clients that failed in the last exchange; they may have reconnected as new nodes.
        warnings: for the user, not yet in a record.
        joined: labels of the clients that have joined, not yet in a record.
    """

    roster: Roster
    experiment: str
    timeout: float
    admission: Admission | None = None
    overdue: OverdueReplies = field(default_factory=OverdueReplies)
    failed: frozenset[int] = frozenset()
    warnings: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    _refusals: set[str] = field(
        default_factory=set
    )  # reasons already in a warning, of nodes that were refused
    # Refused node -> (pause in rounds after the next refusal, round from which it is asked again).
    _refused_nodes: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def collect(
        cls,
        grid: Grid,
        run: RunSettings,
        experiment: str,
        check_roster: RosterCheck,
        recorded: Sequence[ClientRecord] | None,
        on_wait: OnWait,
    ) -> Membership:
        """Run the handshake of a new or a resumed run and return the clients that take part.

        Args:
            grid: Flower's.
            run: gives the number of clients and the timeouts.
            experiment: id of the run.
            check_roster: checks that the method supports a roster, when a client joins later.
            recorded: the run's clients so far, as in run.json; None for a new run.
            on_wait: called with a line that names what the server waits for.

        Raises:
            PbflError: if too few clients answer or they are incompatible; names them.
        """
        timeout = max(run.round_timeout, run.join_timeout)  # client processes may still be starting
        admission = Admission(run.num_clients, check_roster) if run.min_clients else None
        if recorded is None:
            roster, refused = handshake(
                grid, run.num_clients, experiment, timeout, run.join_timeout, on_wait, run.min_clients
            )
        else:
            strict = run.failure_policy == "stop" or any(client.simulated for client in recorded)
            least = len(recorded) if strict else run.min_replies
            roster, refused = resumed_handshake(
                grid, recorded, experiment, timeout, run.join_timeout, least, on_wait
            )
            if admission is not None and admission.has_room(roster):
                refused = []  # they may join in the next round
        membership = cls(roster, experiment, min(timeout, RECONNECT_TIMEOUT), admission)
        membership._warn_of_refused(refused)
        clients = roster.clients.values()
        membership.warnings += [*differing_code_versions(clients), *other_weights(clients)]
        return membership

    def absent(self, grid: Grid, server_round: int, check: bool = False) -> dict[int, str]:
        """Return client -> why it cannot get a message now, after looking for clients that reconnected.

        To avoid querying the nodes in every round, it looks only after a round with failures, while a client has been
        missing since the run was resumed, while others may join, or if ``check`` is set.

        Args:
            grid: Flower's.
            server_round: from 1.
            check: always look; for clients that had no message since the handshake.
        """
        self.overdue.collect(grid)
        missing = any(client.node == NO_NODE for client in self.roster.clients.values())
        may_join = self.admission is not None and self.admission.has_room(self.roster)
        if not (self.failed or missing or may_join or check):
            return {}
        online = set(grid.get_node_ids())
        self._look_for_clients(grid, online, server_round)
        disconnected = {
            number: NOT_CONNECTED
            for number, client in self.roster.clients.items()
            if client.node not in online
        }
        busy = {
            number: f"still busy with round {of_round}"
            for number, of_round in self.overdue.outstanding(server_round).items()
        }
        return {**busy, **disconnected}

    def _look_for_clients(self, grid: Grid, online: Collection[int], server_round: int) -> None:
        """Ask new nodes.

        A node that is refused or does not answer is asked again after a pause, which doubles each time, or as soon
        as a client has failed, since that client may have reconnected there.
        """
        self._refused_nodes = {node: retry for node, retry in self._refused_nodes.items() if node in online}
        early = [node for node, (_, since) in self._refused_nodes.items() if server_round < since]
        before = self.roster
        self.roster, refused = handshake_with_new_nodes(
            grid,
            before,
            online,
            self.failed,
            self.experiment,
            self.timeout,
            self.admission,
            [] if self.failed else early,
        )
        self._warn_of_refused(refused.values())
        for node in refused:
            pause, _ = self._refused_nodes.get(node, (1, 0))
            self._refused_nodes[node] = (min(2 * pause, MAX_RETRY_ROUNDS), server_round + pause)
        for number, client in self.roster.clients.items():
            if number not in before.clients:
                self.add_joined([client.label])
            elif client.node != before.clients[number].node:
                log(INFO, "round %s: client %s has reconnected as another node", server_round, client.label)
                self.overdue.forget(number)
        known = other_weights(before.clients.values())
        self.warnings += [line for line in other_weights(self.roster.clients.values()) if line not in known]

    def wait_for_nodes(self, grid: Grid, sent: int, least: int, timeout: float, on_wait: OnWait) -> bool:
        """Wait until as many nodes are connected as messages were sent, and return whether at least ``least`` are.

        Args:
            grid: Flower's.
            sent: messages of the phase in which nodes or replies were lost.
            least: nodes that suffice when the timeout has passed.
            timeout: seconds.
            on_wait: called with a line on how many are connected, and with an empty one at the end.
        """
        target, online = max(sent, least), 0

        def status() -> str:
            return f"{online} of {target} nodes are connected"

        for _ in poll(timeout, status, on_wait):
            if (online := len(set(grid.get_node_ids()) - set(self._refused_nodes))) >= target:
                break
        on_wait("")
        return online >= least

    def add_joined(self, labels: Collection[str]) -> None:
        """Add clients that have joined; in a resumed run also those that joined in the unfinished round."""
        self.warnings += [f"client {label} has joined the run" for label in labels]
        self.joined += labels

    def recorded(self) -> None:
        """Forget the warnings and the joined clients, which now stand in a round's record."""
        self.warnings, self.joined = [], []

    def _warn_of_refused(self, reasons: Collection[str]) -> None:
        """Add a warning for each reason why new nodes were refused that has not been in one before."""
        self.warnings += [f"a new node is not used: {why}" for why in sorted(set(reasons) - self._refusals)]
        self._refusals |= set(reasons)
