"""TensorBoard: event files in ``<run-dir>/tensorboard``."""

from __future__ import annotations

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from pbfl_flwr.runs.records import RunRecord
from pbfl_flwr.sinks import Ending, Metrics

FOLDER = "tensorboard"


class TensorBoard:
    """Event-file writer; TensorBoard reads all event files of the folder as one run."""

    def __init__(self, run_dir: Path, about: RunRecord) -> None:
        folder = run_dir / FOLDER
        new = not folder.exists()
        self._writer = SummaryWriter(str(folder))
        if new:
            self._writer.add_text("configuration", f"```\n{json.dumps(about.configuration, indent=1)}\n```")

    def log(self, step: int, metrics: Metrics) -> None:
        """Write and flush scalars, to show them at once."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        """Close the event file."""
        self._writer.close()
