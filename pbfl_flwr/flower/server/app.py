"""The server side of a run: parse the configuration, then run the method's strategy on the given grid."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.serverapp import Grid

from pbfl_flwr.config import RunSettings, Scalar, parse
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.handshake import count_simulated_nodes
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.util.paths import run_directory


def serve(
    grid: Grid, run_config: Mapping[str, Scalar], run_id: int, loaded: LoadedData | None = None
) -> None:
    """Run the federation to its end; if it fails, the error is also written to the run directory.

    In a simulation num-clients = 0 stands for all nodes. Flower's run id names the run directory unless the
    configuration does. ``loaded`` is data that this process has read before.

    Raises:
        PbflError: if the configuration is invalid, the clients are incompatible, or the run cannot continue.
    """
    run = RunDirectory(run_directory(str(run_config.get("run-dir", "")), run_id))
    try:
        if run_config.get("num-clients") == 0:
            run_config = {
                **run_config,
                "num-clients": count_simulated_nodes(grid, RunSettings().join_timeout),
            }
        settings = parse(run_config, SECTIONS)
        strategy = MethodStrategy(settings, run.path, loaded)
    except PbflError:
        if run.taken or not run.path.is_absolute():  # taken: the directory belongs to another run
            raise
        with run.locked():
            raise
    torch.set_num_threads(1 if settings.training.threads == "auto" else settings.training.threads)
    strategy.start(grid)
