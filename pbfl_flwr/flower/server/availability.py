"""Which clients are available in a round: clients may reply late, disconnect, and reconnect on other nodes."""

from __future__ import annotations

from collections.abc import Collection
from logging import INFO

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from pbfl_flwr.flower.server.admission import Admission
from pbfl_flwr.flower.server.late_replies import OverdueReplies, OverdueReply
from pbfl_flwr.flower.server.rejoining import hello_to_new_nodes
from pbfl_flwr.flower.server.replies import Phase
from pbfl_flwr.flower.server.roster import NO_NODE, Roster, other_weights
from pbfl_flwr.flower.server.waiting import OnWait, poll

HELLO_TIMEOUT = 60.0  # seconds at most, for a node that connects during a run
NOT_CONNECTED = "its node is not connected"
MAX_RETRY_ROUNDS = 32  # at most, until a node that was refused gets another hello


class Availability:
    """Tracks the clients of a run from round to round.

    Args:
        roster: the clients that answered the hello before round 1.
        experiment: id of the run.
        hello_timeout: seconds to wait for the hello of a node that connects during the run; capped at a minute.
        admission: decides which other devices may join; None if none may.

    Attributes:
        roster: all clients and their current nodes.
    """

    def __init__(
        self, roster: Roster, experiment: str, hello_timeout: float, admission: Admission | None = None
    ) -> None:
        self.roster, self._admission = roster, admission
        self._experiment, self._hello_timeout = experiment, min(hello_timeout, HELLO_TIMEOUT)
        self._overdue = OverdueReplies()
        self._failed: frozenset[int] = frozenset()
        self._refusals: set[str] = set()  # reasons already noted, of nodes that were refused
        # Refused node -> (pause in rounds after the next refusal, round from which it may get another hello).
        self._refused_nodes: dict[int, tuple[int, int]] = {}
        self._late: list[tuple[OverdueReply, Message]] = []  # late replies returned for the last phase
        self._notes: list[str] = []
        self._joined: list[str] = []

    def absent(self, grid: Grid, server_round: int, check: bool = False) -> dict[int, str]:
        """Return client -> why it cannot get a message now, after looking for clients that reconnected.

        To avoid querying the nodes in every round, it looks only after a round with failures, while a client has been
        missing since the run was resumed, while others may join, or if ``check`` is set.

        Args:
            grid: Flower's.
            server_round: from 1.
            check: always look; for clients that had no message since the hello.
        """
        self.collect(grid)
        missing = any(member.node == NO_NODE for member in self.roster.members.values())
        may_join = self._admission is not None and self._admission.has_room(self.roster)
        if not (self._failed or missing or may_join or check):
            return {}
        online = set(grid.get_node_ids())
        self._look_for_clients(grid, online, server_round)
        disconnected = {
            client: NOT_CONNECTED
            for client, member in self.roster.members.items()
            if member.node not in online
        }
        busy = {
            client: f"still busy with round {number}"
            for client, number in self._overdue.outstanding(server_round).items()
        }
        return {**busy, **disconnected}

    def _look_for_clients(self, grid: Grid, online: Collection[int], server_round: int) -> None:
        """Send a hello to new nodes.

        A node that is refused or does not answer gets another hello after a pause, which doubles each time, or as soon
        as a client has failed, since that client may have reconnected there.
        """
        self._refused_nodes = {node: retry for node, retry in self._refused_nodes.items() if node in online}
        early = [node for node, (_, since) in self._refused_nodes.items() if server_round < since]
        skipped = [] if self._failed else early
        before = self.roster
        self.roster, refused = hello_to_new_nodes(
            grid,
            before,
            online,
            self._failed,
            self._experiment,
            self._hello_timeout,
            self._admission,
            skipped,
        )
        self.note_refused(refused.values())
        for node in refused:
            pause, _ = self._refused_nodes.get(node, (1, 0))
            self._refused_nodes[node] = (min(2 * pause, MAX_RETRY_ROUNDS), server_round + pause)
        for client, member in self.roster.members.items():
            if client not in before.members:
                self.note_joined([member.label])
            elif member.node != before.members[client].node:
                log(INFO, "round %s: client %s has reconnected as another node", server_round, member.label)
                self._overdue.forget(client)
        known = other_weights(before.members.values())
        for line in other_weights(self.roster.members.values()):
            if line not in known:
                self.note(line)

    def collect(self, grid: Grid) -> None:
        """Fetch late replies that have arrived."""
        self._overdue.collect(grid)

    def settle(self, phase: Phase, replies: list[Message]) -> list[tuple[OverdueReply, Message]]:
        """Record the missing replies of a phase; if clients train in it, return late replies to earlier phases."""
        self._late = self._overdue.take() if phase.training else []
        self._overdue.add(phase.unanswered(replies))
        return self._late

    def note_refused(self, reasons: Collection[str]) -> None:
        """Add a note for each reason why new nodes were refused that has not been noted before."""
        self._notes += [f"a new node is not used: {why}" for why in sorted(set(reasons) - self._refusals)]
        self._refusals |= set(reasons)

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

    def undo_round(self, joined: Collection[str]) -> None:
        """Restore late replies and joined clients of a round that is repeated, since its line is replaced.

        Args:
            joined: labels of the clients that joined in it.
        """
        self._overdue.restore(self._late)
        self.note_joined(joined)
        self.note("round repeated because too many nodes were unreachable")

    def note(self, line: str) -> None:
        """Add a note."""
        self._notes.append(line)

    def notes(self) -> list[str]:
        """Return the notes added since the last call."""
        found, self._notes = self._notes, []
        return found

    def note_joined(self, labels: Collection[str]) -> None:
        """Record clients that have joined; in a resumed run also those that joined in the unfinished round."""
        self._notes += [f"client {label} has joined the run" for label in labels]
        self._joined += labels

    def joined(self) -> list[str]:
        """Return the labels of the clients that have joined since the last call."""
        found, self._joined = self._joined, []
        return found

    def set_failed(self, clients: Collection[int]) -> None:
        """Set the clients that failed in the last round."""
        self._failed = frozenset(clients)
