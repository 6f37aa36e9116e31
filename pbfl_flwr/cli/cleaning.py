"""``pbfl clean``: remove clients' states left behind by runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import NON_EMPTY_PATH
from pbfl_flwr.errors import reading
from pbfl_flwr.experiments.console import kilobytes, print_hanging, say, screen


def clean(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR...]",
            click_type=NON_EMPTY_PATH,
            help="Runs, directories of runs, state directories of devices; default: runs, <home>/runs, <home>/state.",
        ),
    ] = None,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="AGE", help="Minimum time since the last change: 30d, 12h, 0d."),
    ] = "1d",
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the files; otherwise they are only listed.")
    ] = False,
) -> None:
    """List the clients' networks and states of finished runs, on a device of all runs but the newest; --yes removes."""
    from pbfl_flwr.experiments import cleanup

    console = screen()
    seconds, freed = cleanup.parse_age(older_than), 0
    with reading("a directory"):
        every = list(cleanup.scan(directories or cleanup.default_directories(), seconds, time.time()))
        for states in every:
            size, reason = states.size, states.reason
            if not reason and yes and not states.remove():
                reason = "is in use"
            if reason:
                print_hanging(console, "left ", f"{states.path}: {reason}", 5)
                continue
            freed += size
            print_hanging(console, f"{kilobytes(size):>9}  ", str(states.path), 11)
    if not freed:
        say(console, "nothing to remove")
    elif yes:
        say(console, f"removed {kilobytes(freed)}")
    else:
        say(
            console,
            "a run without its clients' states can be shown, compared and reported, but not resumed or exported",
        )
        say(console, f"would remove {kilobytes(freed)}; remove with --yes")
