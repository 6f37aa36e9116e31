"""Who can be asked in a round, in a federation whose clients answer late, disappear and come back on other nodes."""

from __future__ import annotations

from collections.abc import Collection
from logging import INFO

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from pbfl_flwr.flower.late import Debt, Debts
from pbfl_flwr.flower.replies import Phase
from pbfl_flwr.flower.returning import welcome_back
from pbfl_flwr.flower.roster import NOWHERE, Roster

GREETING_SECONDS = 60.0  # for a node that comes in the middle of a run


class Attendance:
    """Follows the clients of a run from round to round.

    Args:
        roster: who said hello before round 1.
        experiment: id of the run.
        join_timeout: seconds that a node may take to join.

    Attributes:
        roster: who is who now.
    """

    def __init__(self, roster: Roster, experiment: str, join_timeout: float) -> None:
        self.roster = roster
        self._experiment, self._patience = experiment, min(join_timeout, GREETING_SECONDS)
        self._debts = Debts()
        self._failed: frozenset[int] = frozenset()
        self._refused: set[str] = set()  # what was said of nodes that are not greeted as clients
        self._notes: list[str] = []

    def absent(self, grid: Grid, server_round: int) -> dict[int, str]:
        """Return the clients that cannot be asked and why, having looked for those that came back.

        Only after a round in which somebody failed, or while somebody has been missing since the run was resumed: a
        healthy federation is not asked for its nodes every round.
        """
        self.collect(grid)
        missing = any(member.node == NOWHERE for member in self.roster.members.values())
        if not self._failed and not missing:
            return {}
        online, before = set(grid.get_node_ids()), self.roster
        self.roster, refused = welcome_back(
            grid, before, online, self._failed, self._experiment, self._patience
        )
        self.refuse(refused)
        for client, member in self.roster.members.items():
            if member.node != before.members[client].node:
                log(INFO, "round %s: client %s is back, on another node", server_round, member.label)
                self._debts.forget(client)
        gone = {
            client: "its node is not connected"
            for client, member in self.roster.members.items()
            if member.node not in online
        }
        busy = {c: f"still busy with round {owed}" for c, owed in self._debts.owing(server_round).items()}
        return {**busy, **gone}

    def collect(self, grid: Grid) -> None:
        """Fetch the answers that have come since their round."""
        self._debts.collect(grid)

    def settle(self, phase: Phase, replies: list[Message]) -> list[tuple[Debt, Message]]:
        """Write down who did not answer a phase, and return what came late of earlier ones, if it trains."""
        late = self._debts.take() if phase.training else []
        self._debts.note(phase.unanswered(replies))
        return late

    def refuse(self, reasons: Collection[str]) -> None:
        """Note why nodes that came are not asked, each reason once."""
        self._notes += [f"a new node is not asked: {why}" for why in sorted(set(reasons) - self._refused)]
        self._refused |= set(reasons)

    def notes(self) -> list[str]:
        """Return what there is to say since the last call."""
        found, self._notes = self._notes, []
        return found

    def failed(self, clients: Collection[int]) -> None:
        """Say who failed in the last round."""
        self._failed = frozenset(clients)
