"""MLflow: a file store in ``<run-dir>/mlruns``, or the store at MLFLOW_TRACKING_URI.

MLflow's file store is in maintenance and requires MLFLOW_ALLOW_FILE_STORE=true, also for ``mlflow ui``. It is used here
because it needs no database and no server; ``mlflow migrate-filestore`` moves it into a database.

MLflow's client would try for minutes to reach a server that is away. Unless the environment says otherwise it gives up
after about half a minute.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pbfl_flwr.runs.records import RunRecord
from pbfl_flwr.sinks import Ending, Metrics
from pbfl_flwr.util.atomic_files import make_directory

TAG = "pbfl.experiment"
EXPERIMENT = "pbfl-flwr"
PATIENCE = {  # four attempts of 5 s, and 12 s between them
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "2",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}


class Mlflow:
    """One MLflow run, resumed by a tag with the run's experiment id."""

    def __init__(self, run_dir: Path, about: RunRecord) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            store = run_dir.absolute() / "mlruns"
            make_directory(store)  # MLflow's own mode is the umask's
            uri = store.as_uri()  # only an absolute path has one
        self._client = MlflowClient(uri)
        place = self._experiment()
        if resumed := self._runs(place, about.experiment):
            self._run = resumed[0]
            self._client.update_run(self._run, "RUNNING")
            return
        tags = {TAG: about.experiment}
        self._run = self._client.create_run(place, tags=tags, run_name=run_dir.name).info.run_id
        # MLflow's client asks a slow server again, which then makes a second run.
        for repeated in self._runs(place, about.experiment):
            if repeated != self._run:
                self._client.delete_run(repeated)
        settings = [Param(key, str(value)) for key, value in about.configuration.items()]
        self._client.log_batch(self._run, params=settings)

    def _runs(self, place: str, experiment: str) -> list[str]:
        """Return the ids of an experiment's runs; first those with most settings, which an unused one lacks."""
        found = self._client.search_runs([place], f"tags.`{TAG}` = '{experiment}'")
        return [run.info.run_id for run in sorted(found, key=lambda run: -len(run.data.params))]

    def _experiment(self) -> str:
        """Return the id of EXPERIMENT, created if it is missing; runs that start together may all create it."""
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            try:
                return str(self._client.create_experiment(EXPERIMENT))
            except MlflowException:
                found = self._client.get_experiment_by_name(EXPERIMENT)
                if found is None:
                    raise
        return str(found.experiment_id)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log a step."""
        now = int(1000 * time.time())
        entries = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=entries)

    def close(self, ending: Ending) -> None:
        """Mark the run as FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self._run, ending.upper())
