"""What a comparison, a sweep or a reproduction would make, before it makes anything: ``--dry-run``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import configuration
from pbfl_flwr.experiments.compare import Planned, to_make
from pbfl_flwr.experiments.figures import say
from pbfl_flwr.experiments.narrow import print_blocks
from pbfl_flwr.flower.history import RunDirectory

COLUMNS = ("run", "method", "state", "seed", "rounds", "directory")


def show(planned: Sequence[Planned], console: Console) -> bool:
    """Print a line for every run: how many rounds of it are there and are wanted, and what would be done.

    Returns:
        Whether all of them could be made.
    """
    rows, refusals = [], []
    for run in planned:
        settings = configuration.check(run.wishes).run
        try:
            state = "is there" if (wishes := to_make(run)) is None else "goes on"
            there = len(RunDirectory(run.directory).rounds())
            if wishes is run.wishes:
                state = "to make"
        except PbflError as error:
            state, there = "refused", 0
            refusals.append(f"{run.name}: {error}")
        rounds = f"{there}/{settings.num_server_rounds}"
        rows.append((run.label, settings.method, state, str(run.seed), rounds, str(run.directory)))
    print_blocks(console, COLUMNS, rows, words=3)
    made = sum(row[2] == "is there" for row in rows)
    say(
        console, f"{len(rows) - made - len(refusals)} of {len(rows)} runs are to be made; nothing was started"
    )
    for line in refusals:
        say(console, line, "red")
    return not refusals
