"""Before the first round: meet the clients of a new run, or those of one that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid

from pbfl_flwr.config import RunSettings
from pbfl_flwr.flower.edition import others as other_editions
from pbfl_flwr.flower.server.admission import Admission, Fits
from pbfl_flwr.flower.server.availability import Availability
from pbfl_flwr.flower.server.hello import hello_round
from pbfl_flwr.flower.server.rejoining import resume_hello
from pbfl_flwr.flower.server.roster import other_weights
from pbfl_flwr.flower.server.waiting import OnWait


def meet_clients(
    grid: Grid,
    run: RunSettings,
    experiment: str,
    fits: Fits,
    recorded: Sequence[Mapping[str, Any]] | None,
    on_wait: OnWait,
) -> Availability:
    """Return who takes part.

    Args:
        grid: Flower's.
        run: how many clients there are, and how long to wait for them.
        experiment: id of the run.
        fits: whether the method can have clients together that join later.
        recorded: who took part so far, as run.json has them; None for a new run.
        on_wait: is told for whom the server waits.

    Raises:
        PbflError: naming the clients without which the run cannot begin or go on, or what does not fit together.
    """
    patience = max(run.round_timeout, run.join_timeout)  # the first message finds a client process starting
    others = Admission(run.num_clients, fits) if run.min_clients else None
    if recorded is None:
        roster, unasked = hello_round(
            grid, run.num_clients, experiment, patience, run.join_timeout, on_wait, run.min_clients
        )
    else:
        strict = run.failure_policy == "stop" or any(was["simulated"] for was in recorded)
        least = len(recorded) if strict else run.min_replies
        roster, unasked = resume_hello(grid, recorded, experiment, patience, run.join_timeout, least, on_wait)
        if others is not None and others.has_room(roster):
            unasked = []  # they may join in the next round
    availability = Availability(roster, experiment, patience, others)
    availability.note_refused(unasked)
    for line in (*other_editions(roster.members.values()), *other_weights(roster.members.values())):
        availability.note(line)
    return availability
