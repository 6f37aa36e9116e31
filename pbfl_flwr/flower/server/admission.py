"""Devices that join a run that is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.hello import checked_roster
from pbfl_flwr.flower.server.roster import Member, Roster

Fits = Callable[[Roster], None]
"""Raises PbflError if the method cannot have such clients together."""


@dataclass(frozen=True)
class Admission:
    """Who may join a run.

    Attributes:
        num_clients: M, how many clients it can have.
        fits: whether the method can have such clients together.
    """

    num_clients: int
    fits: Fits

    def has_room(self, roster: Roster) -> bool:
        """Return whether there are fewer clients than the run can have."""
        return len(roster.members) < self.num_clients

    def admitted(self, roster: Roster, member: Member) -> Roster:
        """Return the roster with one client more: under its own number, or, if it has a name, the lowest free one.

        Args:
            roster: so far; the client is not among them.
            member: who came.

        Raises:
            PbflError: saying why it cannot join.
        """
        if not self.has_room(roster):
            raise PbflError(f"the run has all its num-clients = {self.num_clients} clients already")
        if member.simulated:
            raise PbflError("simulated clients are there when their run begins")
        if member.name:
            free = next(number for number in range(self.num_clients) if number not in roster.members)
            member = replace(member, client=free)
        if member.client >= self.num_clients:
            raise PbflError(
                f"allowed are client-ids 0 to {self.num_clients - 1}, since num-clients = {self.num_clients}"
            )
        found = checked_roster([*roster.members.values(), member])
        self.fits(found)
        return found
