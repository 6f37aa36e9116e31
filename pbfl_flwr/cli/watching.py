"""``pbfl watch``: follow a run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from pbfl_flwr.cli.common import COMPLETED, FAILED, INTERRUPTED, RunDir, ended
from pbfl_flwr.errors import PbflError, expanded, reading
from pbfl_flwr.experiments.text.numbers import screen


def watch(
    run: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands and end.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show a run while somebody else makes it: progress, time left, accuracies, bytes, failures; ends with the run."""
    from pbfl_flwr.experiments.running import watch as watching

    console = screen()
    try:
        path = expanded(run).absolute()
        with reading(str(path)):
            if once:
                view = watching.look(path, time.time())
                console.print(watching.frame(view))
                state = view.state
            else:
                state = watching.follow(path, console, interval)
    except PbflError as error:
        raise ended(error) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(FAILED if state in ("failed", "stopped") else COMPLETED)
