"""Before the first round: the hello round of a new or a resumed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid

from pbfl_flwr.config import RunSettings
from pbfl_flwr.flower.code_version import differing_code_versions
from pbfl_flwr.flower.server.admission import Admission, RosterCheck
from pbfl_flwr.flower.server.availability import Availability
from pbfl_flwr.flower.server.handshake import hello_round
from pbfl_flwr.flower.server.rejoining import resume_hello
from pbfl_flwr.flower.server.roster import other_weights
from pbfl_flwr.flower.server.waiting import OnWait


def collect_clients(
    grid: Grid,
    run: RunSettings,
    experiment: str,
    check_roster: RosterCheck,
    recorded: Sequence[Mapping[str, Any]] | None,
    on_wait: OnWait,
) -> Availability:
    """Run the hello round and return the clients that take part.

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
        roster, refused = hello_round(
            grid, run.num_clients, experiment, timeout, run.join_timeout, on_wait, run.min_clients
        )
    else:
        strict = run.failure_policy == "stop" or any(entry["simulated"] for entry in recorded)
        least = len(recorded) if strict else run.min_replies
        roster, refused = resume_hello(grid, recorded, experiment, timeout, run.join_timeout, least, on_wait)
        if admission is not None and admission.has_room(roster):
            refused = []  # they may join in the next round
    availability = Availability(roster, experiment, timeout, admission)
    availability.note_refused(refused)
    for line in (*differing_code_versions(roster.members.values()), *other_weights(roster.members.values())):
        availability.note(line)
    return availability
