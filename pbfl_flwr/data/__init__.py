"""The way of samples to the clients: decoded once, partitioned, loaded as tensors."""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import lru_cache

from pbfl_flwr import seeds
from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.clients import ClientData, Shard, materialise
from pbfl_flwr.data.contract import Partition, Pool, Split
from pbfl_flwr.data.datasets import DATASETS, kind_of
from pbfl_flwr.data.labels import names_file, read_names, renumbered
from pbfl_flwr.data.own.pflib import export_pfl_directory, pflib_client
from pbfl_flwr.data.partition.assign import make_partition
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.paths import home


def load_pool(settings: DataSettings) -> Pool:
    """Return all samples of the dataset; each process caches the last two pools.

    Raises:
        PbflError: if the dataset is unknown, or its files are missing or unreadable.
    """
    return _load_pool(
        DataSettings(
            dataset=settings.dataset,
            data_dir=settings.data_dir,
            download=settings.download,
            labels=settings.labels,
            label_column=settings.label_column,
            input_shape=settings.input_shape,
            text_column=settings.text_column,
            vocabulary=settings.vocabulary,
            partitioner=settings.partitioner,
            partitioner_settings=settings.partitioner_settings,
        ),
        str(home()),
    )


def check_data(settings: DataSettings, num_clients: int) -> Partition:
    """Load and partition the data, so that errors in either are found before any training.

    Raises:
        PbflError: one line on what is wrong, where, and what is allowed.
    """
    load_pool(settings)
    return _partition(settings, num_clients, str(home()))


def client_data(settings: DataSettings, num_clients: int, client: int) -> ClientData:
    """Return one client's data; each process caches the last 64 clients.

    Args:
        settings: the data and its partition.
        num_clients: M.
        client: 0..M-1.

    Raises:
        PbflError: as :func:`check_data`, and if there is no such client.
    """
    if not 0 <= client < num_clients:
        raise PbflError(f"client {client} does not exist; must be 0..{num_clients - 1}")
    return _client_data(settings, num_clients, client, str(home()))


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
    return _own_data(settings, files, str(home()))


# home_path is part of the cache key, so that a changed PBFL_HOME takes effect.
@lru_cache(maxsize=2)
def _load_pool(settings: DataSettings, home_path: str) -> Pool:
    if settings.dataset not in DATASETS:
        close = difflib.get_close_matches(settings.dataset, DATASETS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"must be one of {', '.join(DATASETS)}"
        raise PbflError(f"unknown dataset '{settings.dataset}'; {hint}")
    if settings.vocabulary and settings.dataset not in ("text", "flwr-datasets"):
        raise PbflError(
            f"vocabulary = '{settings.vocabulary}': dataset '{settings.dataset}' does not use one; allowed with "
            "dataset = 'text' or 'flwr-datasets'"
        )
    return _fitting(DATASETS[settings.dataset].load(settings), settings)


def _fitting(pool: Pool, settings: DataSettings) -> Pool:
    """Check ``input-shape`` and renumber the labels by ``labels``, where these are set."""
    if settings.shape and pool.input_shape != settings.shape:
        raise PbflError(
            f"input-shape = '{settings.input_shape}': dataset '{settings.dataset}' has inputs of shape "
            f"{pool.input_shape}; only images of a folder and rows of a table can be given another"
        )
    if not settings.classes or pool.label_names == settings.classes:
        return pool
    names, labels = renumbered(pool, settings.classes, f"dataset '{settings.dataset}'")
    return replace(pool, label_names=names, labels=labels)


@lru_cache(maxsize=64)
def _own_data(settings: DataSettings, files: int | None, home_path: str) -> ClientData:
    pool = own_pool(settings, files)
    seed = seeds.derive(settings.partition_seed, "validation", 0)  # as client 0 of 1
    return materialise(pool, make_partition(pool, settings, 1).splits[0], settings.validation_share, seed)


def forget_data() -> None:
    """Clear this process's dataset caches, since files may have been rewritten."""
    for cache in (_load_pool, _own_data, _partition, _client_data):
        cache.cache_clear()


@lru_cache(maxsize=2)
def _partition(settings: DataSettings, num_clients: int, home_path: str) -> Partition:
    return make_partition(load_pool(settings), settings, num_clients)


@lru_cache(maxsize=64)
def _client_data(settings: DataSettings, num_clients: int, client: int, home_path: str) -> ClientData:
    split = _partition(settings, num_clients, home_path).splits[client]
    seed = seeds.derive(settings.partition_seed, "validation", client)
    return materialise(load_pool(settings), split, settings.validation_share, seed)


__all__ = [
    "DATASETS",
    "ClientData",
    "Partition",
    "Pool",
    "Shard",
    "Split",
    "check_data",
    "client_data",
    "export_pfl_directory",
    "forget_data",
    "kind_of",
    "load_pool",
    "make_partition",
    "names_file",
    "own_data",
    "own_pool",
    "read_names",
]
