"""What a client needs to handle a message: settings, data, stored state, network with its weights, method."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context, Message

from pbfl_flwr import seeds
from pbfl_flwr.config import Settings
from pbfl_flwr.flower.client.device import (
    Identity,
    choose_device,
    identify,
    make_deterministic,
    share_of_cores,
)
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.identity import check_deal, check_identity, check_network
from pbfl_flwr.method import Client, Method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import count_parameters
from pbfl_flwr.models.registry import architecture_of
from pbfl_flwr.runs.client_store import ClientState, ClientStore
from pbfl_flwr.training.allocator import keep_freed_memory


@dataclass(frozen=True)
class ClientSession:
    """A client with everything loaded for one message.

    Attributes:
        client: with its network and data on its device.
        method: of the run.
        settings: of the run, with the node's overrides.
        store: its state file.
        stored: the content of that file, None if the client has never trained.
        server_state: digest of the server's state that a training message's broadcast is made of; empty if untold.
        seconds: spent so far, by step of :data:`~pbfl_flwr.flower.messages.report.SPENT`.
    """

    client: Client
    method: Method[Any, Any, Any]
    settings: Settings
    store: ClientStore
    stored: ClientState | None
    server_state: str
    seconds: dict[str, float]

    @property
    def participations(self) -> int:
        """In how many rounds the client has trained, as its state says."""
        return self.stored.participations if self.stored else 0

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Measure a step."""
        started = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - started


def store_of(message: Message, context: Context, settings: Settings) -> ClientStore:
    """Return the client's state file for the experiment named in the message."""
    experiment = str(message.content.config_records[wire.CONFIG]["experiment"])
    identity = identify(context, settings, experiment)
    architecture = architecture_for(settings, identity)
    return ClientStore(identity.state_dir, experiment, identity.client, architecture, not identity.simulated)


def open_client(message: Message, context: Context, worker: Worker) -> ClientSession:
    """Return the client with its state after its last round, or its initial state.

    Raises:
        PbflError: if its settings, data or state cannot be used.
    """
    started = time.perf_counter()
    run = worker.run_of(context)
    settings = run.settings
    keep_freed_memory()
    config = message.content.config_records[wire.CONFIG]
    experiment, number = str(config["experiment"]), int(str(config["round"]))
    identity = identify(context, settings, experiment)
    loading_started = time.perf_counter()
    data = worker.data_of(settings, identity)
    loading = time.perf_counter() - loading_started
    task = data.task(settings.models.feature_dim)
    store = store_of(message, context, settings)
    configured = worker.configured and not identity.own_data
    check_identity(config, identity.client, configured, data, task, store.architecture)
    check_deal(config, worker.deal_of(settings, identity))
    training = settings.training
    torch.set_num_threads(share_of_cores() if training.threads == "auto" else training.threads)
    stored = store.load()
    device = choose_device(training.device)
    if device.type == "cuda":
        make_deterministic()
    built = worker.network(store.architecture, task, settings, device)
    model = built.network
    check_network(config, store.architecture, count_parameters(model))
    model.load_state_dict(dict(stored.model if stored else built.initial))
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
        worker.recordings,
    )
    if stored is None and settings.models.initial_weights == "own":
        fresh = build_model(store.architecture, task, seeds.derive(settings.run.seed, "weights", client.key))
        model.load_state_dict(fresh.state_dict())
    opening = time.perf_counter() - started - loading
    seconds, server_state = {"data": loading, "open": opening}, str(config.get(wire.STATE, ""))
    return ClientSession(client, run.method, settings, store, stored, server_state, seconds)


def architecture_for(settings: Settings, identity: Identity) -> str:
    """Return the client's architecture; for a named client, the settings have only one."""
    number = 0 if isinstance(identity.client, str) else identity.client
    return architecture_of(settings.models.models, number, settings.code)
