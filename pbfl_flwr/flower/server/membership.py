"""Who takes part: the clients of a new and of a resumed run, those that reconnect or join, and those that are absent.

A known client moves to its new node, another one joins, always by :meth:`Membership._place`. After a failure, or while
others may join, every round begins with a handshake with new nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from pbfl_flwr.config import RunSettings
from pbfl_flwr.errors import PbflError, abbreviate, printable
from pbfl_flwr.flower.code_version import differing_code_versions
from pbfl_flwr.flower.messages.traffic import NO_BYTES
from pbfl_flwr.flower.server.agreement import (
    check_agreement,
    check_key,
    check_unchanged,
    contested,
    has_its_key,
    label_order,
    largest,
    majority,
)
from pbfl_flwr.flower.server.grid import OnWait, ignore, simulates
from pbfl_flwr.flower.server.handshake import refusals, send_handshake, wait_for_nodes
from pbfl_flwr.flower.server.overdue import OverdueReplies
from pbfl_flwr.flower.server.replies import size_of
from pbfl_flwr.flower.server.roster import NO_NODE, NOBODY, Roster, dominant, other_weights
from pbfl_flwr.runs.directory import RunRefused
from pbfl_flwr.runs.records import BUSY, NOT_CONNECTED, Bytes, ClientRecord

RECONNECT_TIMEOUT = 60.0  # seconds at most, for the handshake of a node that connects during a run
MAX_RETRY_ROUNDS = 32  # at most, until a node that was refused gets another handshake

RosterCheck = Callable[[Roster], None]
"""Raises PbflError if the method does not support the clients of a roster together."""


@dataclass
class Membership:
    """The clients of a run from round to round: their nodes, overdue replies, and what a round's record says of them.

    ``warnings``, ``joined``, ``lost_up`` and ``lost_down`` collect until :meth:`recorded` says that the record of a
    round holds them, so a repeated round loses nothing.

    Attributes:
        run: number of clients, timeouts, whether devices may join.
        experiment: id of the run.
        check_roster: raises PbflError if the method does not support a roster.
        on_wait: called with a line that names what the server waits for; an empty one means nothing.
        roster: all clients and their current nodes.
        overdue: replies that missed the deadline of their round.
        failed: clients that failed in the last exchange; they may have reconnected as new nodes.
        warnings: for the user, not yet in a record.
        joined: labels of the clients that have joined, not yet in a record.
        lost_up, lost_down: bytes of replies that came after the deadline of their round, and of failed tries of a
            round, not yet in a record.
    """

    run: RunSettings
    experiment: str
    check_roster: RosterCheck
    on_wait: OnWait = ignore
    roster: Roster = NOBODY
    overdue: OverdueReplies = field(default_factory=OverdueReplies)
    failed: frozenset[int] = frozenset()
    warnings: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    lost_up: Bytes = NO_BYTES
    lost_down: Bytes = NO_BYTES
    _refusals: set[str] = field(default_factory=set)  # reasons that are already in a warning
    # Refused node -> (pause in rounds after the next refusal, round from which it is asked again).
    _refused_nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Client -> (its node, which is refused, how it has changed).
    _changed: dict[int, tuple[int, str]] = field(default_factory=dict)

    def collect(self, grid: Grid, recorded: Sequence[ClientRecord] | None) -> None:
        """Run the handshake of a new or a resumed run.

        ``recorded`` are the run's clients so far, as in run.json; None for a new run.

        Raises:
            PbflError: if too few clients answer or they are incompatible; names them.
        """
        refused = self._start(grid) if recorded is None else self._resume(grid, recorded)
        self.on_wait("")
        self.check_roster(self.roster)
        self._warn_of_refused(refused)
        clients = self.roster.clients.values()
        self.warnings += [*differing_code_versions(clients), *other_weights(clients), *dominant(clients)]

    def _handshake(
        self, grid: Grid, nodes: Sequence[int], longest: float = math.inf
    ) -> tuple[list[ClientRecord], dict[int, str], dict[int, str]]:
        """Ask nodes, at the start as long as their processes may take to start, else at most ``longest`` seconds."""
        timeout = min(max(self.run.round_timeout, self.run.join_timeout), longest)
        return send_handshake(grid, nodes, self.experiment, timeout)

    def _start(self, grid: Grid) -> list[str]:
        """Ask every node of a new run and return a line for every node that is not used."""
        run, M, least = self.run, self.run.num_clients, self.run.min_clients
        needed = least or M
        end = time.monotonic() + run.join_timeout
        nodes = wait_for_nodes(grid, M, run.join_timeout, self.on_wait)
        if len(nodes) != M and simulates(grid):
            raise PbflError(
                f"num-clients = {M}, but the simulation has num-supernodes = {len(nodes)}: must be the same number; "
                f"--federation-config 'num-supernodes={M}' sets it (pbfl run does), num-clients = 0 takes all nodes"
            )
        if len(nodes) < needed:
            few = f"but only {len(nodes)} nodes joined within {run.join_timeout:.0f} s"
            if least:
                raise PbflError(f"min-clients = {least}, {few}")
            raise PbflError(f"num-clients = {M}, {few}; a deployment needs {M} running SuperNodes")
        clients, refused = self._ask_until_present(grid, end, {})
        asked = len(clients) + len(refused)
        if len(clients) < needed:
            left = [
                f"{needed} clients are needed, but only {len(clients)} were still connected after the handshake"
            ]
            raise PbflError("\n".join(refusals(refused, asked) or left))
        unfit = [*dict.fromkeys(map(str, self._place(clients, {c.node for c in clients}).values()))]
        placed = self.roster.clients.values()
        if unfit and len(placed) < needed:
            too_few = [f"min-clients = {least}, but only {len(placed)} of {asked} devices can take part"]
            raise PbflError("\n".join([*(too_few if least else []), *unfit]))
        if len(placed) < M and any(client.simulated for client in placed):
            raise PbflError(
                f"min-clients = {least}: must be 0 in a simulation, where all num-clients = {M} must start; "
                f"{len(placed)} did"
            )
        return [*unfit, *(f"node {node}: {reason}" for node, reason in refused.items())]

    def _resume(self, grid: Grid, recorded: Sequence[ClientRecord]) -> list[str]:
        """Ask the clients of a resumed run, of which missing ones may reconnect later.

        Returns:
            A line for every other node; none for those that may join in the next round.

        Raises:
            RunRefused: if too few are left because clients have changed.
            PbflError: if too few connected, naming the missing ones.
        """
        run = self.run
        self.roster = Roster({client.client: client.on_node(NO_NODE) for client in recorded})
        labels = {client.label for client in recorded}
        end = time.monotonic() + run.join_timeout
        known = {client.label: client for client in self.roster.clients.values()}
        clients, silent = self._ask_until_present(grid, end, known)
        present = [client for client in clients if client.label in labels]
        others = [client for client in clients if client.label not in labels]
        refused = [*self._place(present, {client.node for client in present}).values()]
        unfit = [*dict.fromkeys(map(str, refused))]
        missing = {client.label for client in self.roster.clients.values() if client.node == NO_NODE}
        strict = run.failure_policy == "stop" or any(client.simulated for client in recorded)
        least = len(recorded) if strict else run.min_replies
        if len(recorded) - len(missing) < least:
            line = f"resuming this run needs at least {least} of its {len(recorded)} clients; missing: "
            line += ", ".join(sorted(missing))
            if others:
                line += f"; other clients connected: {', '.join(sorted({client.label for client in others}))}"
            lines = [line, *unfit, *refusals(silent, len(clients) + len(silent))]
            changed = any(isinstance(error, RunRefused) for error in refused)
            raise (RunRefused if changed else PbflError)("\n".join(lines))
        if self._may_join:
            return unfit
        unknown = [f"node {node}: {reason}" for node, reason in silent.items()]
        return [*unfit, *map(_not_in_run, others), *unknown]

    def _ask_until_present(
        self, grid: Grid, end: float, known: Mapping[str, ClientRecord]
    ) -> tuple[list[ClientRecord], dict[int, str]]:
        """Ask nodes until the run's clients have replied, or no node is left to ask at the time ``end``.

        A node that is lost meanwhile is asked again if it comes back, under its id or another one.

        ``known`` is label -> client of a resumed run, where no other node counts. A new run has none: it waits for
        ``num-clients`` nodes, whatever they answer.

        Returns:
            The clients that have replied, and node -> reason for other nodes, lost ones only if clients are missing.
        """
        target = len(known) or self.run.num_clients
        clients: list[ClientRecord] = []
        refused: dict[int, str] = {}
        lost: dict[int, str] = {}
        while True:
            here = [
                c.label for c in clients if not known or (c.label in known and has_its_key(c, known[c.label]))
            ]
            if len(set(here)) >= target:
                return clients, refused
            others = len(refused) + len(clients) - len(here) if known else 0
            left = max(0.0, end - time.monotonic())
            nodes = wait_for_nodes(grid, target + others, left, self.on_wait)
            new = set(nodes) - {client.node for client in clients} - set(refused)
            if not new or not (left or new - set(lost)):
                return clients, lost | refused
            new_clients, new_refused, new_lost = self._handshake(grid, sorted(new))
            # Others may have disconnected meanwhile, and reconnected as one of the new nodes.
            clients = [client for client in clients if client.node in nodes] + new_clients
            reasons, online = lost | refused | new_refused | new_lost, set(grid.get_node_ids())
            refused = {node: why for node, why in (refused | new_refused).items() if node in online}
            settled = {*refused, *(client.node for client in clients)}
            lost = {node: why for node, why in reasons.items() if node not in settled}

    def _place(self, clients: Collection[ClientRecord], online: Collection[int]) -> dict[int, PbflError]:
        """Move known clients to their new nodes, let others join, and return node -> why for those that are refused.

        A client moves if its old node is disconnected or failed in the last round; otherwise two nodes claim the same
        client, and the new one is refused. It moves to another key only if its old node is disconnected and its old key
        is not registered under a name; a warning says so.
        """
        members = dict(self.roster.clients)
        numbers = {client.label: number for number, client in members.items()}
        keys = {client.label: client.key for client in members.values()}
        refused = contested(clients, numbers)
        candidates = [client for client in clients if client.node not in refused]
        odd = set() if members else self._odd(candidates)
        other_keys: list[str] = []
        moved: set[int] = set()

        def order(client: ClientRecord) -> tuple[bool, bool, tuple[str, int, int]]:
            return client.node in odd, client.key != keys.get(client.label, client.key), label_order(client)

        # Independent of the order of replies; clients with their own numbers come before names, which get free numbers.
        for client in sorted(candidates, key=order):
            try:
                if (number := numbers.get(client.label)) is None:
                    checked = bool(self.roster.clients) or client.node in odd
                    client = self._joined(members, client, checked)
                    numbers[client.label] = client.client
                else:
                    client = client.numbered(number)
                    old = members[number]
                    check_key(client, old)
                    failed = number in self.failed - moved and client.key == old.key
                    if old.node in online and not failed:
                        raise PbflError(
                            f"client-id {client.label} is used by two nodes, {old.node} and {client.node}"
                        )
                    check_unchanged(client, old)
                    if client.key == old.key:  # also if Flower has forgotten its name
                        client = client.with_key(old.key, client.registered or old.registered)
                    if old.node != NO_NODE:
                        client = client.counting(
                            old
                        )  # its bounds are those of the start, or of the last resume
                    other_keys += [client.label] * (client.key != old.key)
                    moved.add(number)
                members[client.client] = client
            except PbflError as error:
                refused[client.node] = error
                if isinstance(error, RunRefused) and client.key == keys[client.label]:  # nobody else's node
                    self._changed[client.client] = client.node, str(error)
        self.roster = Roster(dict(sorted(members.items())))
        if other_keys:
            self.warnings.append(
                f"client {abbreviate(other_keys)} came back with another key: the first one has no registered name, so "
                "nobody can tell whether it is the same device"
            )
        return refused

    def _odd(self, clients: Collection[ClientRecord]) -> set[int]:
        """Return the nodes of a new run that the others outvote; also by architecture if the method wants one."""
        agreed = majority(clients)
        if self.run.min_clients and agreed:
            try:
                self.check_roster(Roster(dict(enumerate(agreed))))
            except PbflError:
                agreed = largest(agreed, lambda client: client.architecture)
        return {client.node for client in clients} - {client.node for client in agreed}

    def _joined(
        self, members: Mapping[int, ClientRecord], client: ClientRecord, checked: bool
    ) -> ClientRecord:
        """Return a client that joins, with its own number or, if it has a name, the lowest free one.

        ``checked`` says whether the method is asked about it alone, not about all clients of a new run together.

        Raises:
            PbflError: if it cannot join; gives the reason.
        """
        new_run = not self.roster.clients
        if not new_run and not self.run.min_clients:
            raise PbflError(_not_in_run(client))
        try:
            if client.simulated and not new_run:
                raise PbflError("simulated clients cannot join a running federation")
            check_agreement(members, client)
            if len(members) >= self.run.num_clients:
                raise PbflError(f"the run already has its num-clients = {self.run.num_clients} clients")
            if client.name:
                client = client.numbered(next(n for n in range(self.run.num_clients) if n not in members))
            if client.client >= self.run.num_clients:
                raise PbflError(
                    f"client-ids must be 0 to {self.run.num_clients - 1}, since num-clients = {self.run.num_clients}"
                )
            if (other := members.get(client.client)) is not None:
                raise PbflError(
                    f"number {client.client} (of client-ids {other.label} and {client.label}) is used by two nodes, "
                    f"{other.node} and {client.node}"
                )
            if checked:
                self.check_roster(Roster(dict(sorted({**members, client.client: client}.items()))))
        except PbflError as error:
            raise PbflError(
                f"client-id {client.label} on node {client.node} cannot join the run: {error}"
            ) from None
        return client

    @property
    def _may_join(self) -> bool:
        return bool(self.run.min_clients) and len(self.roster.clients) < self.run.num_clients

    def absent(self, grid: Grid, server_round: int) -> dict[int, str]:
        """Return client -> why it cannot get a message now, after looking for clients that reconnected.

        To avoid querying the nodes in every round, it looks only after a round with failures, while a client has been
        missing since the run was resumed, or while others may join.
        """
        self.collect_overdue(grid)
        missing = any(client.node == NO_NODE for client in self.roster.clients.values())
        if not (self.failed or missing or self._may_join):
            return {}
        online = set(grid.get_node_ids())
        self._look_for_clients(grid, online, server_round)
        changed = {number: reason for number, (node, reason) in self._changed.items() if node in online}
        disconnected = {
            number: changed.get(number, NOT_CONNECTED)
            for number, client in self.roster.clients.items()
            if client.node not in online
        }
        busy = {
            number: f"{BUSY} {of_round}"
            for number, of_round in self.overdue.outstanding(server_round).items()
        }
        return {**busy, **disconnected}

    def _look_for_clients(self, grid: Grid, online: Collection[int], server_round: int) -> None:
        """Ask new nodes.

        A node that is refused or does not answer is asked again after a pause, which doubles each time, or as soon
        as a client has failed, since that client may have reconnected there.
        """
        self._refused_nodes = {node: retry for node, retry in self._refused_nodes.items() if node in online}
        before = self.roster
        new = set(online) - {client.node for client in before.clients.values()}
        if not self.failed:
            new -= {node for node, (_, since) in self._refused_nodes.items() if server_round < since}
        if not new:
            return
        clients, silent, lost = self._handshake(grid, sorted(new), RECONNECT_TIMEOUT)
        silent |= lost
        names = {node.node_id: printable(node.name) for node in grid.get_nodes()} if silent else {}
        titles = {node: f"{node} ({name})" if (name := names.get(node)) else str(node) for node in silent}
        refused = {node: f"node {titles[node]}: {reason}" for node, reason in silent.items()}
        refused |= {node: str(error) for node, error in self._place(clients, online).items()}
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
        for warn in (other_weights, differing_code_versions, dominant):
            known = warn(before.clients.values())
            self.warnings += [line for line in warn(self.roster.clients.values()) if line not in known]

    def wait_for_nodes(self, grid: Grid, target: int) -> int:
        """Return how many nodes are connected and not refused, once it is the target or join-timeout has passed."""
        nodes = wait_for_nodes(grid, target, self.run.join_timeout, self.on_wait, self._refused_nodes)
        self.on_wait("")
        return len(nodes)

    def add_joined(self, labels: Collection[str]) -> None:
        """Add clients that have joined; in a resumed run also those that joined in the unfinished round."""
        self.warnings += [f"client {label} has joined the run" for label in labels]
        self.joined += labels

    def collect_overdue(self, grid: Grid) -> None:
        """Fetch, name and discard the replies that came after the deadline of their round; clients then are free."""
        for overdue, reply in self.overdue.collect(grid):
            if reply.has_error():
                continue  # the client's failure stands in the record of that round
            label = self.roster.clients[overdue.client].label
            self.warnings.append(
                f"client {label}: its reply to round {overdue.round} came too late and is discarded"
            )
            size = size_of(reply)
            self.lost_up += size if isinstance(size, Bytes) else NO_BYTES

    def recorded(self) -> None:
        """Forget the warnings, joined clients and lost bytes, which now stand in a round's record."""
        self.warnings, self.joined = [], []
        self.lost_up = self.lost_down = NO_BYTES

    def _warn_of_refused(self, reasons: Collection[str]) -> None:
        """Add a warning for each reason why new nodes were refused that has not been in one before."""
        self.warnings += [f"a new node is not used: {why}" for why in sorted(set(reasons) - self._refusals)]
        self._refusals |= set(reasons)


def _not_in_run(client: ClientRecord) -> str:
    return f"client-id {client.label} on node {client.node} is not part of this run"
