"""TensorBoard: event files in ``<run-dir>/tensorboard``.

Written here and not by torch's SummaryWriter, whose thread prints its own traceback and may keep an error to itself.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text

from pbfl_flwr.runs.records import RunRecord
from pbfl_flwr.sinks import Ending, Metrics
from pbfl_flwr.util.atomic_files import make_directory, private_opener

FOLDER = "tensorboard"


class TensorBoard:
    """One event file per start of a run; TensorBoard reads all event files of the folder as one run."""

    def __init__(self, run_dir: Path, about: RunRecord) -> None:
        folder = run_dir / FOLDER
        new = not folder.exists()
        make_directory(folder)
        self._file = (
            folder / f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        )
        self._add(file_version="brain.Event:2")
        if new:
            settings = json.dumps(about.configuration, indent=1)
            self._add(summary=text("configuration", f"```\n{settings}\n```"))

    def log(self, step: int, metrics: Metrics) -> None:
        """Write scalars; they are in the file when this returns."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step=step, summary=Summary(value=values))

    def _add(self, **fields: Any) -> None:
        event = Event(wall_time=time.time(), **fields)
        with open(self._file, "ab", opener=private_opener) as file:
            RecordWriter(file).write(event.SerializeToString())

    def close(self, ending: Ending) -> None:
        """Do nothing: every step is in the file."""
