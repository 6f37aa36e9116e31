"""Weights & Biases: offline unless WANDB_MODE=online, in ``<run-dir>/wandb``.

``wandb sync <run-dir>/wandb/offline-run-*`` uploads it; a resumed run has one folder per start, all with the same run
id, which the sync joins. Online, it waits half a minute for its server, or for somebody to log in at the terminal,
unless the environment says otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path

import wandb

from pbfl_flwr.runs.records import RunRecord
from pbfl_flwr.sinks import Ending, Metrics
from pbfl_flwr.util.atomic_files import make_directory

FOLDER = "wandb"
PATIENCE = {"WANDB_LOGIN_TIMEOUT": "10", "WANDB_INIT_TIMEOUT": "20", "WANDB_FINISH_TIMEOUT": "30"}  # seconds


class WeightsAndBiases:
    """One wandb run; a resumed run continues it."""

    def __init__(self, run_dir: Path, about: RunRecord) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        make_directory(run_dir / FOLDER)  # wandb's own mode is the umask's
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pbfl-flwr"),
            id=about.experiment,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(about.configuration),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """Log a step."""
        self._run.log(metrics, step=step)

    def close(self, ending: Ending) -> None:
        """Finish the run; with exit code 1 if it is not complete."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)
