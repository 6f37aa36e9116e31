"""The server side of a run: check the configuration, then the method's strategy on whatever grid there is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.serverapp import Grid

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.flower.storage.history import RunDirectory
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.places import run_directory


def serve(grid: Grid, run_config: Mapping[str, Scalar], run_id: int) -> None:
    """Run the federation to its end; why it ended early stands in the run directory.

    Args:
        grid: with the clients behind it.
        run_config: flat keys.
        run_id: Flower's, which names the run directory where the configuration does not.

    Raises:
        PbflError: if the configuration or the clients do not fit, or the run cannot go on.
    """
    run = RunDirectory(run_directory(str(run_config.get("run-dir", "")), run_id))
    try:
        settings = parse(run_config, SECTIONS)
        strategy = MethodStrategy(settings, run.path)
    except PbflError:
        if run.taken or not run.path.is_absolute():  # taken: by a run with which this has nothing to do
            raise
        with run.locked():
            raise
    torch.set_num_threads(1 if settings.training.threads == "auto" else settings.training.threads)
    strategy.start(grid)
