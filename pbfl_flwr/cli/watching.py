"""``pbfl watch``: follow a run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from pbfl_flwr.cli.common import COMPLETED, FAILED, INTERRUPTED, RunDir, error_exit
from pbfl_flwr.errors import PbflError, expanded, reading
from pbfl_flwr.experiments.console import screen


def watch(
    run: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Follow a run of another process until it ends: progress, time left, accuracies, bytes, failures."""
    from pbfl_flwr.experiments.running import watch as watching

    console = screen()
    try:
        path = expanded(run).absolute()
        with reading(str(path)):
            if once:
                view = watching.snapshot(path, time.time())
                console.print(watching.frame(view))
                state = view.state
            else:
                state = watching.follow(path, console, interval)
    except PbflError as error:
        raise error_exit(error) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(FAILED if state in ("failed", "stopped") else COMPLETED)
