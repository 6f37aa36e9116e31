"""The ServerApp of every method."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.device import run_directory
from pbfl_flwr.flower.history import RunDirectory
from pbfl_flwr.flower.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the configuration, then run the method's strategy; why it ended early stands in the run directory."""
    settings = parse(context.run_config, SECTIONS)
    torch.set_num_threads(1 if settings.training.threads == "auto" else settings.training.threads)
    run = RunDirectory(run_directory(settings, context.run_id))
    try:
        strategy = MethodStrategy(settings, run.path)
    except PbflError:
        if run.taken:  # by a run with which this has nothing to do
            raise
        with run.alone():
            raise
    strategy.start(grid)
