"""Lists the runs that a comparison, sweep or reproduction would execute: ``--dry-run``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.comparing.compare import Planned, pending_keys
from pbfl_flwr.experiments.console import print_blocks, say
from pbfl_flwr.experiments.running import configuration
from pbfl_flwr.runs.directory import RunDirectory

COLUMNS = ("run", "method", "state", "seed", "rounds", "directory")


def show(planned: Sequence[Planned], console: Console) -> bool:
    """Print a line per run: its state, and the number of finished and requested rounds.

    Returns:
        Whether all runs can be executed or are finished.
    """
    rows, refusals = [], []
    for run in planned:
        settings = configuration.check(run.requested).run
        wanted = settings.num_server_rounds
        try:
            finished = len(RunDirectory(run.directory).round_records())
            if (requested := pending_keys(run)) is None:
                state, wanted = "finished", finished  # fewer than configured if patience ended it
            else:
                state = "to run" if requested is run.requested else "to resume"
            rounds = f"{finished}/{wanted}"
        except PbflError as error:
            state, rounds = "refused", "-"
            refusals.append(f"{run.name}: {error}")
        rows.append((run.label, settings.method, state, str(run.seed), rounds, str(run.directory)))
    print_blocks(console, COLUMNS, rows, words=3)
    done = sum(row[2] == "finished" for row in rows)
    say(console, f"{len(rows) - done - len(refusals)} of {len(rows)} runs are to be run; nothing was started")
    for line in refusals:
        say(console, line, "red")
    return not refusals
