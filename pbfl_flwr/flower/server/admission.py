"""Devices that join a running federation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.handshake import checked_roster
from pbfl_flwr.flower.server.roster import Member, Roster

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
        return len(roster.members) < self.num_clients

    def admitted(self, roster: Roster, member: Member) -> Roster:
        """Return the roster with one more client, under its own number or, if it has a name, the lowest free one.

        Args:
            roster: so far, without the client.
            member: the client that wants to join.

        Raises:
            PbflError: if it cannot join; gives the reason.
        """
        if not self.has_room(roster):
            raise PbflError(f"the run already has its num-clients = {self.num_clients} clients")
        if member.simulated:
            raise PbflError("simulated clients cannot join a running federation")
        if member.name:
            free = next(number for number in range(self.num_clients) if number not in roster.members)
            member = replace(member, client=free)
        if member.client >= self.num_clients:
            raise PbflError(
                f"allowed are client-ids 0 to {self.num_clients - 1}, since num-clients = {self.num_clients}"
            )
        found = checked_roster([*roster.members.values(), member])
        self.check_roster(found)
        return found
