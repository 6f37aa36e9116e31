"""The ServerApp of every method."""

from contextlib import suppress

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.device import run_directory
from pbfl_flwr.flower.engine import ERROR
from pbfl_flwr.flower.store import UnsavedState, write_atomically
from pbfl_flwr.flower.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the configuration, then run the method's strategy; why it ended early stands in the run directory."""
    settings = parse(context.run_config, SECTIONS)
    torch.set_num_threads(1 if settings.training.threads == "auto" else settings.training.threads)
    directory = run_directory(settings, context.run_id)
    (directory / ERROR).unlink(missing_ok=True)
    try:
        MethodStrategy(settings, directory).start(grid)
    except PbflError as error:
        with suppress(UnsavedState):  # a full disk may be the very reason
            write_atomically(directory / ERROR, f"{error}\n".encode())
        raise
