"""``pbfl watch``: follow a run."""

from __future__ import annotations

from typing import Annotated

import typer

from pbfl_flwr.cli.common import COMPLETED, FAILED, INTERRUPTED, RunDir
from pbfl_flwr.errors import expanded, reading
from pbfl_flwr.experiments.console import screen


def watch(
    run: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Follow a run of another process until it ends: a line per round, failures, and how it ended."""
    from pbfl_flwr.experiments.execute.progress import Follower, follow, show_status
    from pbfl_flwr.experiments.status import snapshot

    console = screen()
    path = expanded(run).absolute()
    try:
        with reading(str(path)):
            if once:
                Follower(path, 0, console, from_start=True).update()
                status = snapshot(path)
                show_status(status, console)
                state = status.state
            else:
                state = follow(path, console, interval)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(FAILED if state in ("failed", "stopped") else COMPLETED)
