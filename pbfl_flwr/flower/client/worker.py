"""What the process of a client keeps between messages: its owner is one ClientApp, and it goes with it.

Nothing of it changes a result: networks begin every message as they were built, and what is kept is what would be
computed again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar
from uuid import uuid4

import torch
from flwr.app import ArrayRecord, Context
from torch import Tensor

from pbfl_flwr.config import Scalar, Settings, parse
from pbfl_flwr.data import ClientData, LoadedData
from pbfl_flwr.errors import PbflError, quoting_data
from pbfl_flwr.flower.client.device import Identity, own_settings, simulated
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.method import Method
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.isolation import is_copyable, ties_kept
from pbfl_flwr.models.precision import set_precision
from pbfl_flwr.payloads import Payload
from pbfl_flwr.task import Task
from pbfl_flwr.util.cuda_graph import Recordings
from pbfl_flwr.util.user_code import UserCode, import_function, is_external

P = TypeVar("P", bound=Payload)
DataSource = Callable[[Settings, int], ClientData]
"""(settings, client id) -> the client's data; pass a function of your own to use other data."""
Items = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True)
class Run:
    """What a process knows of a run: its settings, with the overrides of the node, and the method built from them."""

    settings: Settings
    method: Method[Any, Any, Any]


@dataclass(frozen=True)
class Built:
    """A network as it was built, on its device, and its initial weights."""

    network: SplitModel
    initial: Mapping[str, Tensor]


class Worker:
    """Everything that a process keeps between messages: runs, data, networks, recordings, the last broadcast.

    Attributes:
        recordings: of training steps as CUDA graphs.
        checked: what a handshake has tried before.
        source: of the data, if it is the app's own.

    Args:
        data: of the app; None means the configured dataset and partition.
        settings: of the app; None means those of the run configuration.
        loaded: data that was read before.
    """

    def __init__(
        self,
        data: DataSource | None = None,
        settings: Settings | None = None,
        loaded: LoadedData | None = None,
    ) -> None:
        self._name = uuid4().hex
        self.recordings = Recordings()
        self.checked: set[tuple[object, ...]] = set()
        self.source, self._given = data, settings
        self._loaded = loaded or LoadedData()
        self._runs = lru_cache(maxsize=64)(self._run)
        self._networks: dict[tuple[object, ...], Built] = {}
        self._last: Callable[[], SplitModel | None] = lambda: (
            None
        )  # that was handed out and is kept by nobody
        self._broadcast: tuple[object, Payload] | None = None

    def __reduce__(self) -> tuple[Callable[..., Worker], tuple[str, DataSource | None, Settings | None]]:
        """Travel without what is kept; see :func:`arrived`."""
        return arrived, (self._name, self.source, self._given)

    # Runs ---------------------------------------------------------------------------------------------------

    def run_of(self, context: Context) -> Run:
        """Return the run's settings, with the overrides of this node's configuration, and its method.

        A method from outside the package is built anew for every message, since it may keep something to itself.

        Raises:
            PbflError: if they are invalid, or this node does not allow them.
        """
        config = () if self._given else tuple(sorted(_run_config(context).items()))
        of_simulation = simulated(context.node_config)
        node = () if of_simulation else tuple(sorted(context.node_config.items()))
        run = self._runs(config, node, of_simulation)
        return (
            replace(run, method=build_method(run.settings)) if is_external(run.settings.run.method) else run
        )

    def _run(self, config: Items, node: Items, of_simulation: bool) -> Run:
        common = self._given or parse(dict(config), SECTIONS)
        settings = common if of_simulation else own_settings(common, dict(node))
        return Run(settings, build_method(settings))

    # Data ---------------------------------------------------------------------------------------------------

    @property
    def configured(self) -> bool:
        """Whether the app has no data of its own, so that clients take the configured dataset or their node's."""
        return self.source is None

    def data_of(self, settings: Settings, identity: Identity) -> ClientData:
        """Return the client's shards.

        Raises:
            QuotesData: if data that a device may have for itself cannot be used.
            PbflError: if it has a name but no data of its own; also whatever the app's data function raises.
        """
        data = settings.data
        if of_code := self.configured and is_external(data.dataset):
            import_function("dataset", data.dataset)  # what is wrong with it does not quote data
        if identity.own_data and self.configured:
            with quoting_data(f"the data at {data.data_dir}"):
                return self._loaded.own(data, identity.files)
        if isinstance(identity.client, str):
            reason = (
                "a name is for devices that bring their own data; this one needs data-path in --node-config, or a "
                "number instead, which takes that share of the common dataset"
                if self.configured
                else "the data function of this app is called with a number; must be a whole number from 0"
            )
            raise PbflError(f"client-id = '{identity.client}': {reason}")
        if self.source is None:
            own = of_code or "\n" in data.labels  # of a file
            with quoting_data(f"dataset = '{data.dataset}'") if own else nullcontext():
                return self._loaded.client(data, settings.run.num_clients, identity.client)
        with quoting_data("the data of the app"):
            return self.source(settings, identity.client)

    def deal_of(self, settings: Settings, identity: Identity) -> str:
        """Return the hash of which samples are whose; empty for data that are the client's alone, or of the app."""
        if not self.configured or identity.own_data:
            return ""
        return self._loaded.deal(settings.data, settings.run.num_clients)

    # Networks -----------------------------------------------------------------------------------------------

    def network(self, architecture: str, task: Task, settings: Settings, device: torch.device) -> Built:
        """Return the process's network of an architecture, whose weights may be those of another client.

        A network from outside the package may keep more than its weights and buffers, and so may any network to which a
        method from outside does something: then every call returns another one as it was built, a copy if that is
        :func:`apart <pbfl_flwr.models.isolation.is_copyable>` from all others.
        """
        training, seed = settings.training, settings.run.seed
        # A function within it that refers to it keeps it, and what it has on a GPU, until a collection.
        if self._last() is not None:
            gc.collect()
        of_user = isinstance(architecture, UserCode) or is_external(settings.run.method)
        key = (architecture, task, seed, device, training.layout, training.precision, of_user)
        if key not in self._networks:
            built = _built(architecture, task, settings, device)
            if of_user and not is_copyable(built.network):
                self._last = weakref.ref(built.network)
                return built  # kept by nobody: the next message builds another
            self._networks[key] = built
        built = self._networks[key]
        if of_user:
            built = replace(built, network=deepcopy(built.network))
            self._last = weakref.ref(built.network)
        return built

    def release_networks(self) -> None:
        """Drop all networks, e.g. after a GPU ran out of memory."""
        self._networks.clear()

    # Broadcasts ---------------------------------------------------------------------------------------------

    def broadcast(self, record: ArrayRecord, payload: type[P], task: Task) -> P:
        """Decode a broadcast, once for all clients of this process that get the same one.

        Its tensors must not be changed; see :func:`pbfl_flwr.flower.messages.wire.decode`.
        """
        key = ([(array.stype, array.data) for array in record.values()], payload, task)
        if self._broadcast is None or self._broadcast[0] != key:
            self._broadcast = key, wire.decode(record, payload, task)
        last = self._broadcast[1]
        assert isinstance(last, payload)
        return last


_ARRIVED: dict[str, Worker] = {}


def arrived(name: str, data: DataSource | None, settings: Settings | None) -> Worker:
    """Return the worker of an app that was sent to this process: the one that it has had since the app's first message.

    Flower's simulation sends the app with every message.
    """
    if name not in _ARRIVED:
        _ARRIVED.clear()  # of an earlier run
        _ARRIVED[name] = Worker(data, settings)
    return _ARRIVED[name]


def _built(architecture: str, task: Task, settings: Settings, device: torch.device) -> Built:
    training = settings.training
    model = build_model(architecture, task, settings.run.seed)
    with ties_kept(architecture, model):
        model = set_precision(optimize_layout(model, training.layout), training.precision).to(device)
    return Built(model, {name: tensor.clone() for name, tensor in model.state_dict().items()})


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
