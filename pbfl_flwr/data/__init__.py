"""Datasets and their way to the clients: decoded once, partitioned, loaded as tensors.

A dataset is one function ``(DataSettings) -> Pool`` in its own module and one entry of :data:`DATASETS`.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pbfl_flwr import seeds
from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.clients import materialise
from pbfl_flwr.data.contract import ClientData, Dataset, Partition, Pool, Shard, Split
from pbfl_flwr.data.labels import names_file, read_names, renumbered
from pbfl_flwr.data.own.columns import SUFFIXES
from pbfl_flwr.data.own.hugging_face import flwr_datasets, is_saved_dataset
from pbfl_flwr.data.own.image_folder import image_folder
from pbfl_flwr.data.own.npz import har, npz
from pbfl_flwr.data.own.pflib import export_pfl_directory, pflib, pflib_client
from pbfl_flwr.data.own.table import table
from pbfl_flwr.data.own.texts import text
from pbfl_flwr.data.partition.assign import make_partition
from pbfl_flwr.data.sources.ag_news import ag_news
from pbfl_flwr.data.sources.cifar import cifar10, cifar100
from pbfl_flwr.data.sources.digits import digits
from pbfl_flwr.data.sources.femnist import femnist
from pbfl_flwr.data.sources.idx_files import emnist, fashion_mnist, mnist
from pbfl_flwr.data.sources.photos import flowers102, gtsrb
from pbfl_flwr.data.sources.spiral import spiral
from pbfl_flwr.data.sources.tiny_imagenet import tiny_imagenet
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.paths import home

DATASETS: dict[str, Dataset] = {
    "digits": Dataset(
        digits, "1,797 handwritten digits of scikit-learn, 1x16x16, 10 classes; no files needed"
    ),
    "spiral": Dataset(spiral, "30,000 points on six spiral arms, (2,), 6 classes; no files needed"),
    "mnist": Dataset(mnist, "70,000 handwritten digits, 1x28x28, 10 classes"),
    "fashion-mnist": Dataset(
        fashion_mnist,
        "70,000 pieces of clothing, 1x28x28, 10 classes; also found in Debian's package if data-dir is empty",
    ),
    "emnist": Dataset(emnist, "131,600 handwritten characters (balanced split), 1x28x28, 47 classes"),
    "femnist": Dataset(
        femnist,
        "handwritten characters by writer, 1x28x28, 62 classes; LEAF's JSON files, no automatic download",
    ),
    "cifar10": Dataset(cifar10, "60,000 images, 3x32x32, 10 classes; torchvision's files or an image folder"),
    "cifar100": Dataset(
        cifar100, "60,000 images, 3x32x32, 100 classes; torchvision's files or an image folder"
    ),
    "flowers102": Dataset(flowers102, "8,189 photographs of flowers, resized to 3x64x64, 102 classes"),
    "gtsrb": Dataset(gtsrb, "39,270 traffic signs, resized to 3x32x32, 43 classes"),
    "tiny-imagenet": Dataset(tiny_imagenet, "110,000 images, 3x64x64, 200 classes; no automatic download"),
    "har": Dataset(
        har, "10,299 windows of smartphone sensors, 30 people, (9, 128), 6 classes; data-dir is the .npz"
    ),
    "ag-news": Dataset(
        ag_news,
        "127,600 news articles, (200,) token ids, 4 classes; train.csv and test.csv, no automatic download",
    ),
    "image-folder": Dataset(
        image_folder, "images in data-dir/train/<class> and test/<class>, or data-dir/<class>"
    ),
    "npz": Dataset(npz, "arrays x, y and optionally client; data-dir is the .npz file"),
    "table": Dataset(table, "features and a class column in a CSV or Parquet file; data-dir is the file"),
    "text": Dataset(
        text,
        "texts and classes in a CSV or Parquet file, (200,) token ids by a vocabulary file; data-dir is "
        "the file",
    ),
    "flwr-datasets": Dataset(
        flwr_datasets,
        "a dataset in Hugging Face's format, with Flower's partitioners; data-dir is a folder or hf://<id on the hub>",
    ),
    "pflib": Dataset(
        pflib, "a PFLlib/HtFLlib dataset folder with its own clients and splits; data-dir is the folder"
    ),
}

_DATASET_OF_SUFFIX = {".npz": "npz", **dict.fromkeys(SUFFIXES, "table")}


def kind_of(path: Path, *, texts: bool = False) -> str:
    """Return the dataset that reads a path, by its suffix or content; ``texts``: read tables as text.

    Raises:
        PbflError: if it is a file of an unsupported kind.
    """
    if dataset := _DATASET_OF_SUFFIX.get(path.suffix.lower()):
        return "text" if texts and dataset == "table" else dataset
    if path.exists() and not path.is_dir():
        raise PbflError(
            f"{path} is not a known kind of data; must be {', '.join(_DATASET_OF_SUFFIX)}, a folder of images, or a "
            "PFLlib folder"
        )
    if is_saved_dataset(path):
        return "flwr-datasets"
    return "pflib" if (path / "config.json").is_file() and (path / "train").is_dir() else "image-folder"


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
    "Dataset",
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
