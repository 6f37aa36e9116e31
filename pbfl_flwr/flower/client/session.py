"""What a client needs to handle a message: settings, data, stored state, network with its weights, method.

Each process builds the network of an architecture once and copies every client's weights into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from flwr.app import Context, Message
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.config import Scalar, Settings, TrainingSettings, parse
from pbfl_flwr.data import ClientData, client_data, own_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.device import (
    Identity,
    choose_device,
    identify,
    make_deterministic,
    own_settings,
    share_of_cores,
    simulated,
)
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.identity import check_identity
from pbfl_flwr.method import Client, Method
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.registry import architecture_of
from pbfl_flwr.runs.client_store import ClientState, ClientStore
from pbfl_flwr.task import Task
from pbfl_flwr.training.allocator import keep_freed_memory

DataSource = Callable[[Settings, int], ClientData]
"""(settings, client id) -> the client's data; pass a function of your own to use other data."""


@dataclass(frozen=True)
class ClientSource:
    """The source of data and settings for an app's clients."""

    data: DataSource
    settings: Settings | None

    def settings_of(self, context: Context) -> Settings:
        """Return the run's settings with the overrides of this node's configuration."""
        common = self.settings or _settings(tuple(sorted(_run_config(context).items())))
        return _own_settings(common.model_dump_json(), tuple(sorted(context.node_config.items())))

    def data_of(self, settings: Settings, identity: Identity) -> ClientData:
        """Return the client's shards.

        Raises:
            PbflError: if it has a name but no data of its own; also whatever the data source raises.
        """
        configured = self.data is configured_data
        if identity.own_data and configured:
            return own_data(settings.data, identity.files)
        if isinstance(identity.client, str):
            need = "data-path in --node-config" if configured else "a client-id that is a number"
            raise PbflError(
                f"client-id = '{identity.client}': a name is for devices that bring their own data; this one needs "
                f"{need}{', or a number instead, which takes that share of the common dataset' * configured}"
            )
        return self.data(settings, identity.client)


def _run_config(context: Context) -> dict[str, Scalar]:
    """Return the run configuration, where ``num-clients = 0`` stands for all nodes of a simulation."""
    config = dict(context.run_config)
    if config.get("num-clients") == 0:
        if not simulated(context.node_config):
            raise PbflError(
                "num-clients = 0: only in simulations; devices need their number, e.g. num-clients=3"
            )
        config["num-clients"] = context.node_config["num-partitions"]
    return config


def configured_data(settings: Settings, client: int) -> ClientData:
    """Return a client's share of the configured dataset."""
    return client_data(settings.data, settings.run.num_clients, client)


@dataclass(frozen=True)
class ClientSession:
    """A client with everything loaded for one message.

    Attributes:
        client: with its network and data on its device.
        method: of the run.
        settings: of the run, with the node's overrides.
        store: its state file.
        stored: the content of that file, None if the client has never trained.
        seconds: spent on loading the data, and on everything else.
    """

    client: Client
    method: Method[Any, Any, Any]
    settings: Settings
    store: ClientStore
    stored: ClientState | None
    seconds: tuple[float, float]


def store_of(message: Message, context: Context, source: ClientSource) -> ClientStore:
    """Return the client's state file for the experiment named in the message."""
    settings = source.settings_of(context)
    experiment = str(message.content.config_records[wire.CONFIG]["experiment"])
    identity = identify(context, settings, experiment)
    architecture = architecture_for(settings, identity)
    return ClientStore(identity.state_dir, experiment, identity.client, architecture, not identity.simulated)


def open_client(message: Message, context: Context, source: ClientSource) -> ClientSession:
    """Return the client with its state after its last round, or its initial state.

    Raises:
        PbflError: if its settings, data or state cannot be used.
    """
    started = time.perf_counter()
    settings = source.settings_of(context)
    keep_freed_memory()
    config = message.content.config_records[wire.CONFIG]
    experiment, number = str(config["experiment"]), int(str(config["round"]))
    identity = identify(context, settings, experiment)
    loading_started = time.perf_counter()
    data = source.data_of(settings, identity)
    loading = time.perf_counter() - loading_started
    check_identity(config, identity.client, data)
    task = data.task(settings.models.feature_dim)
    store = store_of(message, context, source)
    training = settings.training
    torch.set_num_threads(share_of_cores() if training.threads == "auto" else training.threads)
    stored = store.load()
    device = choose_device(training.device)
    if device.type == "cuda":
        make_deterministic()
    model, initial = _network(store.architecture, task, settings.run.seed, str(device), training)
    model.load_state_dict(dict(stored.model) if stored else initial)
    model.eval()  # the previous client of this process may have left another mode
    name = identity.client if isinstance(identity.client, str) else ""
    client = Client(
        identity.client if isinstance(identity.client, int) else int(str(config["client"])),
        number,
        task,
        model,
        data.on(device),
        training,
        settings.evaluation,
        settings.run.seed,
        stored.memory if stored else {},
        name,
    )
    if stored is None and settings.models.initial_weights == "own":
        fresh = build_model(store.architecture, task, seeds.derive(settings.run.seed, "weights", client.key))
        model.load_state_dict(fresh.state_dict())
    method = build_method(settings)
    opening = time.perf_counter() - started - loading
    return ClientSession(client, method, settings, store, stored, (loading, opening))


def architecture_for(settings: Settings, identity: Identity) -> str:
    """Return the client's architecture; for a named client, the settings have only one."""
    number = 0 if isinstance(identity.client, str) else identity.client
    return architecture_of(settings.models.models, number, settings.code)


@lru_cache(maxsize=4)
def _settings(run_config: tuple[tuple[str, Scalar], ...]) -> Settings:
    return parse(dict(run_config), SECTIONS)


@lru_cache(maxsize=64)
def _own_settings(settings: str, node: tuple[tuple[str, Scalar], ...]) -> Settings:
    return own_settings(Settings.model_validate_json(settings), dict(node))


def clear_networks() -> None:
    """Drop the cached networks of this process, e.g. after a GPU ran out of memory."""
    _network.cache_clear()


@lru_cache(maxsize=16)
def _network(
    architecture: str, task: Task, seed: int, device: str, training: TrainingSettings
) -> tuple[SplitModel, dict[str, Tensor]]:
    """Return the process's network of an architecture and its initial weights."""
    model = optimize_layout(build_model(architecture, task, seed), training.layout, training.precision).to(
        device
    )
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}
