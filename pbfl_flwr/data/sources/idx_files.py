"""MNIST, Fashion-MNIST and EMNIST: idx files, plain or gzipped, 1x28x28.

Searches data-dir, ``data-dir/<Name>/raw`` (torchvision's location) and, for Fashion-MNIST without data-dir, the
location of Debian's package ``dataset-fashion-mnist``. EMNIST is the "balanced" split: 131,600 characters, 47 classes;
its images stay transposed, as in the files and in torchvision.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.sources.files import (
    UNREADABLE,
    check_memory,
    damaged,
    data_root,
    fetch,
    missing,
    torchvision_datasets,
)

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_MNIST_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
_EMNIST_FILES = tuple(
    f"emnist-balanced-{part}-{kind}-ubyte"
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
)


def mnist(settings: DataSettings) -> Pool:
    """Return 60,000 + 10,000 digits."""
    return _load(
        settings,
        "MNIST",
        _MNIST_FILES,
        tuple("0123456789"),
        lambda root: torchvision_datasets(settings).MNIST(root, download=True),
    )


def fashion_mnist(settings: DataSettings) -> Pool:
    """Return 60,000 + 10,000 pieces of clothing."""
    dataset = torchvision_datasets(settings).FashionMNIST
    return _load(
        settings,
        "FashionMNIST",
        _MNIST_FILES,
        tuple(dataset.classes),
        lambda root: dataset(root, download=True),
        (DEBIAN_FASHION_MNIST,),
    )


def emnist(settings: DataSettings) -> Pool:
    """Return 112,800 + 18,800 characters, 47 classes."""
    dataset = torchvision_datasets(settings).EMNIST
    return _load(
        settings,
        "EMNIST",
        _EMNIST_FILES,
        tuple(dataset.classes_split_dict["balanced"]),
        lambda root: dataset(root, "balanced", download=True),
    )


def _load(
    settings: DataSettings,
    folder: str,
    files: tuple[str, ...],
    label_names: tuple[str, ...],
    download: Callable[[Path], Any],
    elsewhere: tuple[Path, ...] = (),
) -> Pool:
    root = data_root(settings)
    raw = root / folder / "raw"
    places = (root, raw) if settings.data_dir else (root, raw, *elsewhere)
    sources = next((paths for place in places if (paths := _idx_files(place, files))), None)
    if sources is None:
        if not settings.download:
            raise missing(settings, [place / files[0] for place in places], raw)
        fetch(settings, [raw / file for file in files], raw, lambda: download(root))
        sources = [raw / file for file in files]

    def decode(allocate: Allocate) -> Pool:
        arrays = []
        for number, path in enumerate(sources):
            try:
                arrays.append(_read(path, axes=1 if number % 2 else 3))
            except UNREADABLE as error:
                raise damaged(settings, path, error) from error
        inputs, labels = np.concatenate(arrays[::2])[:, None], np.concatenate(arrays[1::2]).astype(np.int64)
        return Pool(inputs, labels, label_names, num_train=len(arrays[1]))

    return cached(settings, sources, decode)


def _read(path: Path, axes: int) -> NDArray[np.uint8]:
    """Return the array of an idx file: 0, 0, 8 (uint8), the number of axes, their lengths as big-endian int32, bytes.

    Raises:
        ValueError: if it holds fewer bytes than its header says, other numbers, or another number of axes.
        PbflError: if it is larger than this machine's memory.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        magic = file.read(4)
        if magic != bytes([0, 0, 8, axes]):
            raise ValueError(f"{path.name} is no idx file of bytes with {axes} axes")
        shape = np.frombuffer(file.read(4 * axes), ">u4").astype(int).tolist()
        check_memory(math.prod(shape), path)
        return np.frombuffer(file.read(math.prod(shape)), np.uint8).reshape(shape)


def _idx_files(place: Path, files: tuple[str, ...]) -> list[Path]:
    """Return the files in a folder, preferring plain over gzipped; empty unless all of them exist."""
    paths = [next((path for path in (place / f, place / f"{f}.gz") if path.is_file()), None) for f in files]
    return [path for path in paths if path is not None] if None not in paths else []
