"""A client's identity and the settings of its own machine: id, data, architecture, device, state directory.

In a simulation all of it follows from the run configuration and Flower's ``partition-id``. On a device it comes from
the operator's ``--node-config``; the run configuration, which the server sends, can neither name paths nor import code.
Simulation workers are Ray actors or declare themselves with :func:`as_worker`; any other process is a device,
regardless of its node configuration.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import torch
from flwr.app import Context
from threadpoolctl import threadpool_limits

from pbfl_flwr.config import Scalar, Settings, parse
from pbfl_flwr.data import kind_of, read_names
from pbfl_flwr.errors import PbflError, expanded, quoting_data
from pbfl_flwr.flower.messages.identity import ALLOWED_ID, NAME, is_number
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.runs.client_store import EXPERIMENT
from pbfl_flwr.util.paths import home, run_directory
from pbfl_flwr.util.user_code import code_in

# Keys allowed in --node-config -> the run-config key that each overrides on this device ("" for none).
NODE_KEYS = {
    "client-id": "",
    "state-dir": "",
    "data-path": "data-dir",
    "dataset": "dataset",
    "data-client": "",
    "allow-code": "",
    "labels": "labels",
    "label-column": "label-column",
    "input-shape": "input-shape",
    "model": "models",
    "batch-size": "batch-size",
    "eval-batch-size": "eval-batch-size",
    "device": "device",
    "threads": "threads",
    "layout": "layout",
    "precision": "precision",
}


@dataclass(frozen=True)
class Identity:
    """A client's identity, from its node configuration.

    Attributes:
        client: 0..M-1, or the name of a device that brings its own data.
        simulated: whether it is one of the simulation's virtual nodes.
        own_data: whether it uses all of the data at its data-path, instead of a share of a common dataset.
        files: number of its files in a PFLlib folder at its data-path; None if the folder has only one client's files.
        state_dir: directory of its state.
    """

    client: int | str
    simulated: bool
    own_data: bool
    state_dir: Path
    files: int | None = None


def identify(context: Context, settings: Settings, experiment: str) -> Identity:
    """Return the client's identity.

    Raises:
        PbflError: if the node has no id, its state-dir is not an absolute path, or the experiment's name is not allowed
            as a directory name.
    """
    if not EXPERIMENT.fullmatch(experiment):
        raise PbflError(f"experiment = {experiment[:100]!r}: must be letters, digits, '-' and '_'")
    node: Mapping[str, Any] = context.node_config
    client, files = client_id_of(node)
    if simulated(node):
        run = settings.run
        state = (
            Path(run.state_dir) if run.state_dir else run_directory(run.run_dir, context.run_id) / "clients"
        )
        return Identity(client, True, False, state / experiment)
    state = _own_path(node, "state-dir") or home() / "state"
    return Identity(client, False, "data-path" in node, state / experiment, files)


def client_id_of(node: Mapping[str, Any]) -> tuple[int | str, int | None]:
    """Return the id of a node's client, and the number of its files in a PFLlib folder, None if unset.

    Raises:
        PbflError: if there is no id, or one of the two is not allowed.
    """
    client = node.get("client-id", node.get("partition-id"))
    if client is None:
        raise PbflError(f"client-id is missing in --node-config; must be {ALLOWED_ID}")
    if not is_number(client) and not (isinstance(client, str) and NAME.fullmatch(client)):
        raise PbflError(f"client-id = {client!r} in --node-config: must be {ALLOWED_ID}")
    files = node.get("data-client", client if is_number(client) else None)
    if files is not None and not is_number(files):
        raise PbflError(f"data-client = {files!r} in --node-config: must be a whole number from 0")
    return client, files


def _own_path(node: Mapping[str, Any], key: str) -> Path | None:
    """Return a path from --node-config, with ~ as the home directory of the user that runs the SuperNode."""
    if key not in node:
        return None
    path = expanded(str(node[key]))
    if not path.is_absolute():
        raise PbflError(f"{key} = '{node[key]}' in --node-config: must be an absolute path")
    return path


def simulated(node: Mapping[str, Any]) -> bool:
    """Whether this is a virtual node of a simulation; the keys alone prove nothing, since an operator may set them."""
    return "client-id" not in node and "partition-id" in node and in_worker()


_CORES: ContextVar[int | None] = ContextVar("cores of a worker", default=None)


@contextmanager
def as_worker(cores: int) -> Iterator[None]:
    """Declare this process a worker of the simulation that uses this many cores; called by its entry point."""
    token = _CORES.set(cores)
    try:
        with threadpool_limits(cores):
            yield
    finally:
        _CORES.reset(token)


def in_worker() -> bool:
    """Whether this process runs simulated clients: it is a Ray actor, or inside :func:`as_worker`."""
    if _CORES.get() is not None:
        return True
    ray = sys.modules.get("ray")  # always imported in a Ray worker; a device need not have it installed
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def own_settings(settings: Settings, node: Mapping[str, Any]) -> Settings:
    """Return the settings of this client: the run's, with the overrides of its node configuration.

    A device with a ``data-path`` uses all data there as its own: an ``.npz``, ``.csv`` or ``.parquet`` file, an image
    folder, its files of a PFLlib folder, or the given ``dataset``. Its ``labels`` may be a file with one name per line.

    Of the functions that may be imported, the run's settings name none: only ``model``, ``dataset`` and ``allow-code``
    do.

    Raises:
        PbflError: if --node-config has a key or value that is not allowed.
    """
    if simulated(node):
        return settings
    if unknown := sorted(set(node) - set(NODE_KEYS) - {"partition-id", "num-partitions"}):
        raise PbflError(f"--node-config: unknown key '{unknown[0]}'; must be one of {', '.join(NODE_KEYS)}")
    changed: dict[str, Scalar] = {"data-dir": "", "download": False}
    changed |= {key: node[name] for name, key in NODE_KEYS.items() if key and name in node}
    if (path := _own_path(node, "data-path")) is not None:
        changed["data-dir"] = str(path)
        changed["partition"] = "iid"  # for a single client: all data is its own
        if "dataset" not in node:
            changed["dataset"] = kind_of(path)
    if Path(labels := str(node.get("labels", ""))).is_absolute():
        with quoting_data(f"labels = '{labels}' in --node-config"):
            changed["labels"] = read_names(Path(labels))
            parse({"labels": changed["labels"]}, SECTIONS)
    code = code_in(node.get(key) for key in ("model", "dataset", "allow-code"))
    changed_settings = parse({**settings.as_dict(), **changed}, SECTIONS).allowing(code)
    networks = dict.fromkeys(architectures(changed_settings.models.models))
    if isinstance(node.get("client-id"), str) and len(networks) > 1:
        raise PbflError(
            f"client-id = '{node['client-id']}' in --node-config: models = '{changed_settings.models.models}' "
            f"assigns {', '.join(networks)} by client number, and a name has none; add "
            f"model='{next(iter(networks))}', or another"
        )
    return changed_settings


def share_of_cores() -> int:
    """Return the number of cores for this process: those that the engine assigned to a worker, else all usable ones."""
    if (cores := _CORES.get()) is not None:
        return cores
    ray = sys.modules.get("ray")
    if ray is None or not in_worker():
        return int(joblib.cpu_count())  # respects container limits and the affinity mask
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


def choose_device(name: str) -> torch.device:
    """Return the client's device: the configured one; for "auto" the GPU that Flower assigned, else the CPU.

    Raises:
        PbflError: if the configured device is not available; there is no fallback.
    """
    # Torch may have read an earlier value of this variable, and caches it.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    cuda, mps = not hidden and torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "cuda" and not cuda:
        raise PbflError(
            "device = 'cuda': this client sees no CUDA device; in a simulation Flower gives it one with "
            "client-resources-num-gpus above 0 (pbfl run --gpus-per-client 0.25); must be 'cpu' or 'auto' here"
        )
    if name == "mps" and not mps:
        raise PbflError("device = 'mps': this machine has no Metal device; must be 'cpu' or 'auto' here")
    if name == "auto":
        name = "cuda" if cuda else "cpu"
    return torch.device(name)


def make_deterministic() -> None:
    """Let equal runs give equal bits on a GPU, as far as torch can; it warns of operations for which it cannot.

    Equivalent to ``torch.use_deterministic_algorithms(True, warn_only=True)``, which imports torch's compiler. The
    environment variable that torch requires comes too late, and stays, in a process that has already used cuBLAS.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # it would cost a kernel for every tensor


def peak_gpu_memory() -> float:
    """Return the peak GPU memory in MB reserved by torch in this process, 0 if it uses no GPU.

    CUDA's own context, some hundred MB per process, is not included.
    """
    if not torch.cuda.is_initialized():
        return 0.0
    return float(torch.cuda.max_memory_reserved()) / 2**20


def release_gpu_memory() -> bool:
    """Release the GPU memory that torch caches, after a failure, for other processes on the GPU.

    Returns:
        Whether this process can still use the GPU; after some errors every CUDA call fails.
    """
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
