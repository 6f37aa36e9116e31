"""The engine "flower": Flower's simulation, through ``flwr run``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pbfl_flwr.config import Scalar
from pbfl_flwr.flower.deploy.superlink import ManagedSuperLink
from pbfl_flwr.flower.engines.placement import Machine, Resources, places


class FlowerSimulation(ManagedSuperLink):
    """A private SuperLink with Flower's simulation engine."""

    def submit(self, app: Path, config: Mapping[str, Scalar], num_clients: int, resources: Resources) -> str:
        """Submit the app and return Flower's run id.

        Raises:
            PbflError: if Flower refuses the run, or the machine has too few resources for a worker.
        """
        # Flower sums over all GPUs: for two GPUs it makes 3 workers with 0.6 each, but Ray could never place the third.
        workers = len(places(Machine.here(resources), resources))
        federation = resources.federation(num_clients, workers)
        return self._run(app, config, "--federation-config", federation)

    def _options(self, address: str) -> list[str]:
        return ["--insecure", "--simulation"]
