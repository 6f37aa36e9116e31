"""The ServerApp of every method."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pbfl_flwr.config import parse
from pbfl_flwr.flower.client import run_directory
from pbfl_flwr.flower.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the configuration, then run the method's strategy."""
    settings = parse(context.run_config, SECTIONS)
    torch.set_num_threads(settings.training.threads)
    MethodStrategy(settings, run_directory(settings, context.run_id)).start(grid)
