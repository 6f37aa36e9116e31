"""Who works where on one machine: CPUs and cards, shared out among the workers of a run and among runs.

Pure but for :meth:`Machine.here`. The check before a run, both engines and runs side by side ask here, so that none of
them takes for possible what another one cannot do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from pbfl_flwr.errors import PbflError

SMALLEST_SHARE = 1e-4  # Ray counts no finer
ROUNDING = 1e-9  # three workers with 1/3 each fill a card


@dataclass(frozen=True)
class Resources:
    """What a person wishes for the simulation's workers.

    Attributes:
        cpus_per_client: whole CPUs for a client.
        gpus_per_client: share of a GPU, or whole GPUs; 0 hides GPUs from the clients.
        workers: worker processes; None is one for every ``cpus_per_client`` CPUs.
        processes: whether :mod:`pbfl_flwr.flower.engines.local` runs them instead of Flower's simulation engine.
    """

    cpus_per_client: int = 1
    gpus_per_client: float = 0.0
    workers: int | None = None
    processes: bool = False

    def federation(self, num_clients: int) -> str:
        """Return the value of ``flwr run --federation-config``."""
        settings = {
            "num-supernodes": num_clients,
            "client-resources-num-cpus": self.cpus_per_client,
            "client-resources-num-gpus": float(self.gpus_per_client),
        }
        if self.workers is not None:
            settings["init-args-num-cpus"] = self.workers * self.cpus_per_client
        return " ".join(f"{key}={value}" for key, value in settings.items())


@dataclass(frozen=True)
class Machine:
    """What there is to be shared out.

    Attributes:
        cpus: that this process may use.
        cards: GPUs, as CUDA_VISIBLE_DEVICES names them.
    """

    cpus: int
    cards: tuple[str, ...] = ()

    @classmethod
    def here(cls, wishes: Resources) -> Machine:
        """Return this machine; its cards are only looked for where they are wished for."""
        import joblib

        cpus = int(joblib.cpu_count())  # those of the container or of the affinity mask, where there is one
        if not wishes.gpus_per_client:
            return cls(cpus)
        import torch

        # The driver counts cards that are too new or too old for this torch, which then computes on the CPU.
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in named.split(",")] if named else [str(i) for i in range(count)]
        return cls(cpus, tuple(names[:count]))


def idle_cards(wishes: Resources, device: str) -> str:
    """Return what a person should hear whose clients would take a card if they saw one; empty if all is well.

    Args:
        wishes: of the run.
        device: the run-config key.
    """
    if wishes.gpus_per_client or device != "auto":
        return ""
    import torch

    if not torch.cuda.device_count():
        return ""
    with warnings.catch_warnings():  # torch's own, of a driver that is too old
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if not usable:
        return "there is a GPU, but torch cannot use it, and clients train on the CPU; pbfl doctor says why"
    return "clients see no GPU and train on the CPU; --gpus-per-client 0.25 lets four of them share one"


@dataclass(frozen=True)
class Slot:
    """What one of several runs beside each other gets.

    Attributes:
        workers: its worker processes.
        cards: what CUDA_VISIBLE_DEVICES is to be; empty where no cards are wished for.
    """

    workers: int
    cards: str = ""


def places(machine: Machine, wishes: Resources) -> list[str]:
    """Return for each worker of a run what CUDA_VISIBLE_DEVICES is to be; empty hides all cards.

    There are as many as wished for, or else as CPUs allow, and no more than cards allow: a share is of one card. Cards
    take turns, so that none is shared while another one is idle.

    Raises:
        PbflError: if there is no room for one worker, or the wish is no share.
    """
    if wishes.workers is None and wishes.cpus_per_client > machine.cpus:
        raise PbflError(
            f"--cpus-per-client {wishes.cpus_per_client}: allowed is up to {machine.cpus}, the CPUs here"
        )
    wanted = wishes.workers or machine.cpus // wishes.cpus_per_client
    if not wishes.gpus_per_client:
        return [""] * wanted
    units, fit = _units(machine.cards, wishes.gpus_per_client)
    return (units * fit)[:wanted]


def slots(machine: Machine, wishes: Resources, runs: int) -> list[Slot]:
    """Return what each of so many runs beside each other gets; none if CPUs or cards have no room for them.

    Each has cards of its own while there are enough of them, else runs share a card.

    Raises:
        PbflError: see :func:`places`.
    """
    if runs > machine.cpus:
        return []
    workers = wishes.workers or max(1, machine.cpus // runs // wishes.cpus_per_client)
    if not wishes.gpus_per_client:
        return [Slot(workers)] * runs
    units, fit = _units(machine.cards, wishes.gpus_per_client)
    if runs <= len(units):
        own = [units[run::runs] for run in range(runs)]
        return [Slot(min(workers, fit * len(cards)), ",".join(cards)) for cards in own]
    if runs > len(units) * fit:
        return []
    on_its_card = [len(range(run % len(units), runs, len(units))) for run in range(runs)]
    return [Slot(min(workers, fit // on_its_card[run]), units[run % len(units)]) for run in range(runs)]


def _units(cards: Sequence[str], share: float) -> tuple[list[str], int]:
    """Return cards, or as many together as a worker needs, and how many workers fit on each."""
    if not (SMALLEST_SHARE <= share < 1 or (share >= 1 and share % 1 == 0)):
        raise PbflError(
            f"--gpus-per-client {share:g}: allowed are 0, a share of one card from {SMALLEST_SHARE:g} on, or a whole "
            "number of cards"
        )
    if not cards:
        raise PbflError(f"--gpus-per-client {share:g}: torch sees no CUDA device here; pbfl doctor says more")
    if share > len(cards):
        raise PbflError(f"--gpus-per-client {share:g}: allowed is up to {len(cards)}, the CUDA devices here")
    if share < 1:
        return list(cards), int(1 / share + ROUNDING)
    size = int(share)
    return [",".join(cards[at : at + size]) for at in range(0, len(cards) - size + 1, size)], 1
