"""Who can be asked in a round, in a federation whose clients answer late, disappear and come back on other nodes."""

from __future__ import annotations

from collections.abc import Collection
from logging import INFO

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from pbfl_flwr.flower.server.admission import Admission
from pbfl_flwr.flower.server.late_replies import OverdueReplies, OverdueReply
from pbfl_flwr.flower.server.rejoining import greet_new_nodes
from pbfl_flwr.flower.server.replies import Phase
from pbfl_flwr.flower.server.roster import NOWHERE, Roster, other_weights
from pbfl_flwr.flower.server.waiting import OnWait, poll

GREETING_SECONDS = 60.0  # for a node that comes in the middle of a run
NOT_CONNECTED = "its node is not connected"
LONGEST_PAUSE = 32  # rounds in which a node that is no client is not greeted again


class Availability:
    """Follows the clients of a run from round to round.

    Args:
        roster: who said hello before round 1.
        experiment: id of the run.
        patience: seconds to wait for the hello of a node that comes in the middle of the run, at most a minute.
        joining: which other devices may join; None if none may.

    Attributes:
        roster: who is who now.
    """

    def __init__(
        self, roster: Roster, experiment: str, patience: float, admission: Admission | None = None
    ) -> None:
        self.roster, self._admission = roster, admission
        self._experiment, self._patience = experiment, min(patience, GREETING_SECONDS)
        self._overdue = OverdueReplies()
        self._failed: frozenset[int] = frozenset()
        self._refused: set[str] = set()  # what was said of nodes that are not greeted as clients
        # Of nodes that are no clients: the next pause, and the round from which they may be greeted again.
        self._strange: dict[int, tuple[int, int]] = {}
        self._late: list[tuple[OverdueReply, Message]] = []  # what was handed over for the last phase
        self._notes: list[str] = []
        self._joined: list[str] = []

    def absent(self, grid: Grid, server_round: int, unheard: bool = False) -> dict[int, str]:
        """Return the clients that cannot be asked and why, having looked for those that came back.

        Only after a round in which somebody failed, while somebody has been missing since the run was resumed, while
        others may join, or where nobody has heard of a client for long: a healthy federation is not asked for its
        nodes every round.

        Args:
            grid: Flower's.
            server_round: from 1.
            unheard: whether clients are asked that nobody has heard of since the hello.
        """
        self.collect(grid)
        missing = any(member.node == NOWHERE for member in self.roster.members.values())
        open_to_others = self._admission is not None and self._admission.has_room(self.roster)
        if not (self._failed or missing or open_to_others or unheard):
            return {}
        online = set(grid.get_node_ids())
        self._look_for_clients(grid, online, server_round)
        gone = {
            client: NOT_CONNECTED
            for client, member in self.roster.members.items()
            if member.node not in online
        }
        busy = {
            c: f"still busy with round {owed}" for c, owed in self._overdue.outstanding(server_round).items()
        }
        return {**busy, **gone}

    def _look_for_clients(self, grid: Grid, online: Collection[int], server_round: int) -> None:
        """Greet the nodes that are new.

        One that is no client, or says nothing, is greeted again after a pause, each twice as long as the last, or when
        somebody failed, who may have come back there.
        """
        self._strange = {node: when for node, when in self._strange.items() if node in online}
        early = [node for node, (_, since) in self._strange.items() if server_round < since]
        resting = [] if self._failed else early
        before = self.roster
        self.roster, refused = greet_new_nodes(
            grid, before, online, self._failed, self._experiment, self._patience, self._admission, resting
        )
        self.note_refused(refused.values())
        for node in refused:
            pause, _ = self._strange.get(node, (1, 0))
            self._strange[node] = (min(2 * pause, LONGEST_PAUSE), server_round + pause)
        for client, member in self.roster.members.items():
            if client not in before.members:
                self.note_joined([member.label])
            elif member.node != before.members[client].node:
                log(INFO, "round %s: client %s is back, on another node", server_round, member.label)
                self._overdue.forget(client)
        known = other_weights(before.members.values())
        for line in other_weights(self.roster.members.values()):
            if line not in known:
                self.note(line)

    def collect(self, grid: Grid) -> None:
        """Fetch the answers that have come since their round."""
        self._overdue.collect(grid)

    def settle(self, phase: Phase, replies: list[Message]) -> list[tuple[OverdueReply, Message]]:
        """Write down who did not answer a phase, and return what came late of earlier ones, if it trains."""
        self._late = self._overdue.take() if phase.training else []
        self._overdue.note(phase.unanswered(replies))
        return self._late

    def note_refused(self, reasons: Collection[str]) -> None:
        """Note why nodes that came are not asked, each reason once."""
        self._notes += [f"a new node is not asked: {why}" for why in sorted(set(reasons) - self._refused)]
        self._refused |= set(reasons)

    def wait_for_nodes(self, grid: Grid, asked: int, least: int, timeout: float, on_wait: OnWait) -> bool:
        """Wait until as many nodes are connected as were asked, and return whether enough are.

        Args:
            grid: Flower's.
            asked: nodes that were lost, or whose answers were.
            least: nodes that are enough when the time is over.
            timeout: seconds.
            on_wait: is told how many there are, and nothing when that is over.
        """
        wanted, online = max(asked, least), 0

        def say() -> str:
            return f"{online} of {wanted} nodes are connected"

        for _ in poll(timeout, say, on_wait):
            if (online := len(set(grid.get_node_ids()) - set(self._strange))) >= wanted:
                break
        on_wait("")
        return online >= least

    def undo_round(self, joined: Collection[str]) -> None:
        """Take back what was handed over for a round that is asked again, since its line is replaced.

        Args:
            joined: labels of those who had joined in it.
        """
        self._overdue.restore(self._late)
        self.note_joined(joined)
        self.note("asked again, since too many nodes were out of reach")

    def note(self, line: str) -> None:
        """Add to what there is to say."""
        self._notes.append(line)

    def notes(self) -> list[str]:
        """Return what there is to say since the last call."""
        found, self._notes = self._notes, []
        return found

    def note_joined(self, labels: Collection[str]) -> None:
        """Remember who has joined; of a run that goes on, in the round that was not finished."""
        self._notes += [f"client {label} has joined the run" for label in labels]
        self._joined += labels

    def joined(self) -> list[str]:
        """Return the labels of those who have joined since the last call."""
        found, self._joined = self._joined, []
        return found

    def failed(self, clients: Collection[int]) -> None:
        """Say who failed in the last round."""
        self._failed = frozenset(clients)
