"""Assignment of CPUs and GPUs of a machine to the workers of a run, and to parallel runs.

The check before a run, both engines and parallel runs all use these functions, so that they agree on what is possible.
Only :meth:`Machine.here` and :func:`idle_cards` inspect the machine.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pbfl_flwr.errors import PbflError

SMALLEST_SHARE = 1e-4  # the resolution of Ray's resources
EngineName = Literal["processes", "ray", "flower"]
ROUNDING = 1e-9  # so that three workers with 1/3 each fit on a GPU


@dataclass(frozen=True)
class Resources:
    """The resources requested for a simulation's workers.

    Attributes:
        cpus_per_client: whole CPUs per client.
        gpus_per_client: share of a GPU, or whole GPUs; 0 hides GPUs from the clients.
        workers: number of worker processes; None makes one for every ``cpus_per_client`` CPUs.
        engine: what runs the clients, see :mod:`pbfl_flwr.flower.engines`.
        ray_address: of the cluster that the engine "ray" uses; empty starts a Ray on this machine.
    """

    cpus_per_client: int = 1
    gpus_per_client: float = 0.0
    workers: int | None = None
    engine: EngineName = "processes"
    ray_address: str = ""

    @property
    def options(self) -> list[str]:
        """The options of ``pbfl run`` that name the engine; none for the default one."""
        engine = [] if self.engine == "processes" else ["--engine", self.engine]
        return engine + (["--ray-address", self.ray_address] if self.ray_address else [])

    def federation(self, num_clients: int, workers: int) -> str:
        """Return the value of ``flwr run --federation-config``."""
        settings = {
            "num-supernodes": num_clients,
            "client-resources-num-cpus": self.cpus_per_client,
            "client-resources-num-gpus": float(self.gpus_per_client),
            "init-args-num-cpus": workers * self.cpus_per_client,
        }
        return " ".join(f"{key}={value}" for key, value in settings.items())


@dataclass(frozen=True)
class Machine:
    """The available resources of a machine.

    Attributes:
        cpus: number of CPUs that this process may use.
        cards: GPUs, as named in CUDA_VISIBLE_DEVICES.
    """

    cpus: int
    cards: tuple[str, ...] = ()

    @classmethod
    def here(cls, requested: Resources) -> Machine:
        """Return this machine, or the cluster if one is named; GPUs are detected only if some are requested."""
        if requested.ray_address:
            from pbfl_flwr.flower.engines.ray_cluster import cluster_resources

            cpus, gpus = cluster_resources(
                requested.ray_address, requested.cpus_per_client, requested.gpus_per_client
            )
            return cls(cpus, tuple(map(str, range(gpus))))
        import joblib

        cpus = int(joblib.cpu_count())  # respects container limits and the affinity mask
        if not requested.gpus_per_client:
            return cls(cpus)
        import torch

        # device_count includes GPUs that this version of torch does not support and on which it would not compute.
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in named.split(",")] if named else [str(i) for i in range(count)]
        return cls(cpus, tuple(names[:count]))


def idle_cards(requested: Resources, device: str) -> str:
    """Return a warning if device is "auto" and the machine has GPUs, but the clients do not use them; else ""."""
    if requested.gpus_per_client or device != "auto":
        return ""
    import torch

    if not torch.cuda.device_count():
        return ""
    with warnings.catch_warnings():  # torch warns about drivers that are too old
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if not usable:
        return "there is a GPU, but torch cannot use it, and clients train on the CPU; pbfl doctor says why"
    return "clients see no GPU and train on the CPU; --gpus-per-client 0.25 lets four of them share one"


@dataclass(frozen=True)
class Slot:
    """The resources of one of several parallel runs.

    Attributes:
        workers: number of its worker processes.
        cards: value of CUDA_VISIBLE_DEVICES; empty if no GPUs are requested.
    """

    workers: int
    cards: str = ""


def places(machine: Machine, requested: Resources) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each worker of a run; empty hides all GPUs.

    The number of workers is the requested one, or what the CPUs allow, and at most what the GPUs allow; a share is of a
    single GPU. Workers are assigned to GPUs in turn, so that none is shared while another one is idle.

    Raises:
        PbflError: if there are too few resources for one worker, or gpus_per_client is invalid.
    """
    if requested.workers is None and requested.cpus_per_client > machine.cpus:
        raise PbflError(
            f"--cpus-per-client {requested.cpus_per_client}: must be at most {machine.cpus}, the CPUs here"
        )
    workers = requested.workers or machine.cpus // requested.cpus_per_client
    if not requested.gpus_per_client:
        return [""] * workers
    units, fit = _units(machine.cards, requested.gpus_per_client)
    return (units * fit)[:workers]


def slots(machine: Machine, requested: Resources, runs: int) -> list[Slot]:
    """Return the resources of each of ``runs`` parallel runs; an empty list if CPUs or GPUs do not suffice.

    Every run has its own GPUs if there are enough, otherwise runs share GPUs.

    Raises:
        PbflError: see :func:`places`.
    """
    if runs > machine.cpus:
        return []
    workers = requested.workers or max(1, machine.cpus // runs // requested.cpus_per_client)
    if not requested.gpus_per_client:
        return [Slot(workers)] * runs
    units, fit = _units(machine.cards, requested.gpus_per_client)
    if runs <= len(units):
        own = [units[run::runs] for run in range(runs)]
        return [Slot(min(workers, fit * len(cards)), ",".join(cards)) for cards in own]
    if runs > len(units) * fit:
        return []
    runs_on_gpu = [len(range(run % len(units), runs, len(units))) for run in range(runs)]
    return [Slot(min(workers, fit // runs_on_gpu[run]), units[run % len(units)]) for run in range(runs)]


def _units(cards: Sequence[str], share: float) -> tuple[list[str], int]:
    """Return units of GPUs, each a GPU or as many as a worker needs, and how many workers fit on a unit."""
    if not (SMALLEST_SHARE <= share < 1 or (share >= 1 and share % 1 == 0)):
        raise PbflError(
            f"--gpus-per-client {share:g}: must be 0, a share of one GPU from {SMALLEST_SHARE:g} on, or a whole "
            "number of GPUs"
        )
    if not cards:
        raise PbflError(f"--gpus-per-client {share:g}: torch sees no CUDA device here; pbfl doctor says more")
    if share > len(cards):
        raise PbflError(f"--gpus-per-client {share:g}: must be at most {len(cards)}, the CUDA devices here")
    if share < 1:
        return list(cards), int(1 / share + ROUNDING)
    size = int(share)
    return [",".join(cards[at : at + size]) for at in range(0, len(cards) - size + 1, size)], 1
