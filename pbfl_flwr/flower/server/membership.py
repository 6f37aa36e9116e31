"""Who takes part from round to round: clients that reconnect or join during a run, and those that are absent.

After a failure, or while others may join, every round begins with a handshake with new nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from pbfl_flwr.config import RunSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.code_version import differing_code_versions
from pbfl_flwr.flower.server.exchange import OverdueReplies
from pbfl_flwr.flower.server.grid import OnWait, poll
from pbfl_flwr.flower.server.handshake import (
    UNCHANGED,
    checked_roster,
    handshake,
    not_in_run,
    resumed_handshake,
    send_handshake,
)
from pbfl_flwr.flower.server.roster import NO_NODE, Roster, other_weights
from pbfl_flwr.runs.records import ClientRecord

RECONNECT_TIMEOUT = 60.0  # seconds at most, for the handshake of a node that connects during a run
NOT_CONNECTED = "its node is not connected"
MAX_RETRY_ROUNDS = 32  # at most, until a node that was refused gets another handshake

RosterCheck = Callable[[Roster], None]
"""Raises PbflError if the method does not support the clients of a roster together."""


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
        raise PbflError(not_in_run(client))
    try:
        return admission.admitted(roster, client)
    except PbflError as error:
        raise PbflError(f"{not_in_run(client)} and cannot join it: {error}") from None


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
