"""A whole app in one process."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from flwr.clientapp import ClientApp

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.config.toml import flatten
from pbfl_flwr.flower.engines.local import federate_app
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS


def run_app(directory: Path, app: ClientApp, keys: Mapping[str, Scalar]) -> MethodStrategy:
    """Run the configured method on an app's clients in this process and return the strategy when it has finished.

    Nothing of the server is written. Clients write their states below ``keys["state-dir"]``.

    Args:
        directory: of the app, with its pyproject.toml.
        app: its clients.
        keys: what ``--run-config`` would change; ``num-clients`` must be one of them, or in the pyproject.toml.

    Raises:
        PbflError: as :func:`pbfl_flwr.flower.api.federate_app`.
    """
    project = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))
    config = {**flatten(project["tool"]["flwr"]["app"].get("config", {})), **keys}
    strategy = MethodStrategy(parse(config, SECTIONS))
    federate_app(strategy, app)
    return strategy
