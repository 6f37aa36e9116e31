"""Before the first round: meet the clients of a new run, or those of one that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid

from pbfl_flwr.config import RunSettings
from pbfl_flwr.flower.attendance import Attendance
from pbfl_flwr.flower.edition import others as other_editions
from pbfl_flwr.flower.hello import meet
from pbfl_flwr.flower.joining import Fits, Joining
from pbfl_flwr.flower.returning import meet_again
from pbfl_flwr.flower.roster import other_weights
from pbfl_flwr.flower.waiting import Hear


def met(
    grid: Grid,
    run: RunSettings,
    experiment: str,
    fits: Fits,
    recorded: Sequence[Mapping[str, Any]] | None,
    hear: Hear,
) -> Attendance:
    """Return who takes part.

    Args:
        grid: Flower's.
        run: how many clients there are, and how long to wait for them.
        experiment: id of the run.
        fits: whether the method can have clients together that join later.
        recorded: who took part so far, as run.json has them; None for a new run.
        hear: is told for whom the server waits.

    Raises:
        PbflError: naming the clients without which the run cannot begin or go on, or what does not fit together.
    """
    patience = max(run.round_timeout, run.join_timeout)  # the first message finds a client process starting
    others = Joining(run.num_clients, fits) if run.min_clients else None
    if recorded is None:
        roster, unasked = meet(
            grid, run.num_clients, experiment, patience, run.join_timeout, hear, run.min_clients
        )
    else:
        strict = run.failure_policy == "stop" or any(was["simulated"] for was in recorded)
        least = len(recorded) if strict else run.min_replies
        roster, unasked = meet_again(grid, recorded, experiment, patience, run.join_timeout, least, hear)
        if others is not None and others.has_room(roster):
            unasked = []  # they may join in the next round
    attendance = Attendance(roster, experiment, patience, others)
    attendance.refuse(unasked)
    for line in (*other_editions(roster.members.values()), *other_weights(roster.members.values())):
        attendance.note(line)
    return attendance
