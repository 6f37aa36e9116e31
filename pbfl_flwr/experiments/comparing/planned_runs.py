"""What a comparison, a sweep or a reproduction would make, before it makes anything: ``--dry-run``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.comparing.compare import Planned, to_make
from pbfl_flwr.experiments.running import configuration
from pbfl_flwr.experiments.text.narrow import print_blocks
from pbfl_flwr.experiments.text.numbers import say
from pbfl_flwr.flower.storage.history import RunDirectory

COLUMNS = ("run", "method", "state", "seed", "rounds", "directory")


def show(planned: Sequence[Planned], console: Console) -> bool:
    """Print a line for every run: what would be done, and how many rounds of it are there and are wanted.

    Returns:
        Whether all of them could be made.
    """
    rows, refusals = [], []
    for run in planned:
        settings = configuration.check(run.wishes).run
        wanted = settings.num_server_rounds
        try:
            there = len(RunDirectory(run.directory).rounds())
            if (wishes := to_make(run)) is None:
                state, wanted = "is there", there  # which are fewer where patience ended it
            else:
                state = "to make" if wishes is run.wishes else "goes on"
            rounds = f"{there}/{wanted}"
        except PbflError as error:
            state, rounds = "refused", "-"
            refusals.append(f"{run.name}: {error}")
        rows.append((run.label, settings.method, state, str(run.seed), rounds, str(run.directory)))
    print_blocks(console, COLUMNS, rows, words=3)
    made = sum(row[2] == "is there" for row in rows)
    say(
        console, f"{len(rows) - made - len(refusals)} of {len(rows)} runs are to be made; nothing was started"
    )
    for line in refusals:
        say(console, line, "red")
    return not refusals
