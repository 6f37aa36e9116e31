"""The way of samples to the clients: decoded once, partitioned, loaded as tensors."""

from __future__ import annotations

import difflib
import hashlib
import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr import seeds
from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.clients import ClientData, Shard, materialise
from pbfl_flwr.data.contract import Partition, Pool, Split
from pbfl_flwr.data.datasets import DATASETS, kind_of
from pbfl_flwr.data.labels import names_file, read_names, renumbered
from pbfl_flwr.data.own.function import from_function
from pbfl_flwr.data.own.pflib import export_pfl_directory, pflib_client
from pbfl_flwr.data.partition.assign import make_partition
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.user_code import is_external

ROUNDING = 1e-3  # of a whole input; other samples differ by far more


def load_pool(settings: DataSettings) -> Pool:
    """Return all samples of the dataset.

    Raises:
        PbflError: if the dataset is unknown, its files are missing or unreadable, or its function does not give it.
    """
    if is_external(settings.dataset):
        return _fitting(from_function(settings), settings)
    if settings.dataset not in DATASETS:
        close = difflib.get_close_matches(settings.dataset, DATASETS, n=1)
        hint = (
            f"did you mean '{close[0]}'?"
            if close
            else f"must be one of {', '.join(DATASETS)}, or my_package.module:load"
        )
        raise PbflError(f"unknown dataset '{settings.dataset}'; {hint}")
    return _fitting(DATASETS[settings.dataset].load(settings), settings)


class LoadedData:
    """What one owner has read, and keeps: the last two datasets, their partitions, and the data of the last 64 clients.

    An owner is a worker, or a command that looks at the same data more than once. Files that change meanwhile are not
    read again.
    """

    def __init__(self) -> None:
        self._pools = lru_cache(maxsize=2)(load_pool)
        self._partitions = lru_cache(maxsize=2)(self._partition)
        self._deals = lru_cache(maxsize=2)(self._deal)
        self._clients = lru_cache(maxsize=64)(self._client)
        self._own = lru_cache(maxsize=64)(own_data)

    def pool(self, settings: DataSettings) -> Pool:
        """Return all samples of the dataset; see :func:`load_pool`."""
        return self._pools(settings)

    def partition(self, settings: DataSettings, num_clients: int) -> Partition:
        """Load and partition the data, so that errors in either are found before any training.

        Raises:
            PbflError: one line on what is wrong, where, and what is allowed.
        """
        return self._partitions(settings, num_clients)

    def deal(self, settings: DataSettings, num_clients: int) -> str:
        """Return which samples are whose, by which processes find out that a function did not repeat itself.

        It is a hash of the labels and rows, and numbers on some inputs, which may differ in rounding (torch's sums
        depend on the number of threads); compare with :func:`same_deal`. It is empty if neither dataset nor partition
        is a user's function.
        """
        return self._deals(settings, num_clients)

    def is_of_run(self, settings: DataSettings, num_clients: int, fingerprint: str | None, deal: str) -> bool:
        """Whether a run has these samples, and dealt them so.

        Args:
            settings: the data and its partition.
            num_clients: M.
            fingerprint: that the run recorded; None if it recorded none. What a user's function gives may differ in
                rounding, so it is compared by ``deal`` alone.
            deal: that it recorded; empty if neither dataset nor partition is a user's function.
        """
        if deal and not same_deal(deal, self.deal(settings, num_clients)):
            return False
        if fingerprint is None or is_external(settings.dataset):
            return True
        return self.pool(settings).fingerprint == fingerprint

    def client(self, settings: DataSettings, num_clients: int, client: int) -> ClientData:
        """Return one client's data.

        Args:
            settings: the data and its partition.
            num_clients: M.
            client: 0..M-1.

        Raises:
            PbflError: as :meth:`partition`, and if there is no such client.
        """
        if not 0 <= client < num_clients:
            raise PbflError(f"client {client} does not exist; must be 0..{num_clients - 1}")
        return self._clients(settings, num_clients, client)

    def own(self, settings: DataSettings, files: int | None) -> ClientData:
        """Return a device's own data as shards; see :func:`own_pool`."""
        return self._own(settings, files)

    def _partition(self, settings: DataSettings, num_clients: int) -> Partition:
        return make_partition(self.pool(settings), settings, num_clients)

    def _deal(self, settings: DataSettings, num_clients: int) -> str:
        if not is_external(settings.dataset) and not is_external(settings.partition):
            return ""
        pool = self.pool(settings)
        digest, inputs = hashlib.sha256(f"{pool.inputs.dtype} {pool.label_names}".encode()), pool.inputs
        digest.update(np.ascontiguousarray(pool.labels).data)
        for split in self.partition(settings, num_clients).splits:
            for rows in (split.train, split.test):
                digest.update(len(rows).to_bytes(8, "little") + np.ascontiguousarray(rows).data)
        return " ".join([digest.hexdigest()[:16], *(f"{number:.6g}" for number in _sketch(inputs))])

    def _client(self, settings: DataSettings, num_clients: int, client: int) -> ClientData:
        partition = self.partition(settings, num_clients)
        name = partition.natural_ids[client] if partition.natural_ids else ""
        seed = seeds.derive(settings.partition_seed, "validation", client)
        split = partition.splits[client]
        return materialise(self.pool(settings), split, settings.validation_share, seed, name)


def same_deal(one: str, other: str) -> bool:
    """Return whether two processes have dealt the same samples, which may differ in rounding."""
    (hash_one, *ones), (hash_other, *others) = one.split(" "), other.split(" ")
    try:
        pairs = [(float(a), float(b)) for a, b in zip(ones, others, strict=True)]
    except ValueError:  # from another machine it may be any text
        return False
    norms, directions = pairs[:1], pairs[1:]
    close = all(math.isclose(a, b, rel_tol=ROUNDING) for a, b in norms)
    close = close and all(math.isclose(a, b, abs_tol=ROUNDING, rel_tol=0) for a, b in directions)
    return hash_one == hash_other and close


def _sketch(inputs: NDArray[Any]) -> list[float]:
    """Return the mean norm of 16 evenly spaced inputs, and four means of their projections on one direction.

    Projections are relative to the input's norm, so that both differ little if the inputs differ little.
    """
    some = [each.reshape(-1).astype(np.float64) for each in inputs[:: max(1, len(inputs) // 16)][:16]]
    norms = [float(np.linalg.norm(each)) for each in some]
    direction = np.cos(np.arange(1, some[0].size + 1, dtype=np.float64) ** 2) if some else np.empty(0)
    projections = [each @ direction / (norm or 1.0) for each, norm in zip(some, norms, strict=True)]
    return [float(np.mean(norms or [0.0])), *(float(np.mean(projections[i::4] or [0.0])) for i in range(4))]


def check_data(settings: DataSettings, num_clients: int) -> Partition:
    """Load and partition the data once; see :meth:`LoadedData.partition`."""
    return LoadedData().partition(settings, num_clients)


def client_data(settings: DataSettings, num_clients: int, client: int) -> ClientData:
    """Load one client's data once; see :meth:`LoadedData.client`."""
    return LoadedData().client(settings, num_clients, client)


def own_pool(settings: DataSettings, files: int | None = None) -> Pool:
    """Return all samples of a device's own data.

    Args:
        settings: the data; ``dataset`` is the result of :func:`kind_of` for ``data_dir``, or another one.
        files: for a PFLlib folder, the client whose files are read; None: the only client in the folder.

    Raises:
        PbflError: as :func:`load_pool`.
    """
    return (
        _fitting(pflib_client(settings, files), settings)
        if settings.dataset == "pflib"
        else load_pool(settings)
    )


def own_data(settings: DataSettings, files: int | None = None) -> ClientData:
    """Return a device's own data as shards; see :func:`own_pool`."""
    pool = own_pool(settings, files)
    seed = seeds.derive(settings.partition_seed, "validation", 0)  # as client 0 of 1
    return materialise(pool, make_partition(pool, settings, 1).splits[0], settings.validation_share, seed)


def _fitting(pool: Pool, settings: DataSettings) -> Pool:
    """Check ``input-shape`` and renumber the labels by ``labels``, where these are set."""
    if settings.shape and pool.input_shape != settings.shape:
        raise PbflError(
            f"input-shape = '{settings.input_shape}': dataset '{settings.dataset}' has inputs of shape "
            f"{pool.input_shape}; only images of a folder and rows of a table can be given another"
        )
    if not settings.classes or pool.label_names == settings.classes:
        return pool
    return renumbered(pool, settings.classes, f"dataset '{settings.dataset}'")


__all__ = [
    "DATASETS",
    "ClientData",
    "LoadedData",
    "Partition",
    "Pool",
    "Shard",
    "Split",
    "check_data",
    "client_data",
    "export_pfl_directory",
    "kind_of",
    "load_pool",
    "make_partition",
    "names_file",
    "own_data",
    "own_pool",
    "read_names",
]
