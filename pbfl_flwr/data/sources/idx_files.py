"""MNIST, Fashion-MNIST and EMNIST: idx files, plain or gzipped, 1x28x28.

Searches data-dir, ``data-dir/<Name>/raw`` (torchvision's location) and, for Fashion-MNIST without data-dir, the
location of Debian's package ``dataset-fashion-mnist``. EMNIST is the "balanced" split: 131,600 characters, 47 classes;
its images stay transposed, as in the files and in torchvision.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.sources.files import UNREADABLE, damaged, data_root, fetch, missing, unpack

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
    from torchvision import datasets

    return _load(
        settings, "MNIST", _MNIST_FILES, tuple("0123456789"), lambda root: datasets.MNIST(root, download=True)
    )


def fashion_mnist(settings: DataSettings) -> Pool:
    """Return 60,000 + 10,000 pieces of clothing."""
    from torchvision import datasets

    names = tuple(datasets.FashionMNIST.classes)
    return _load(settings, "FashionMNIST", _MNIST_FILES, names, _download_fashion, (DEBIAN_FASHION_MNIST,))


def _download_fashion(root: Path) -> object:
    from torchvision import datasets

    return datasets.FashionMNIST(root, download=True)


def emnist(settings: DataSettings) -> Pool:
    """Return 112,800 + 18,800 characters, 47 classes."""
    from torchvision import datasets

    names = tuple(datasets.EMNIST.classes_split_dict["balanced"])
    return _load(
        settings,
        "EMNIST",
        _EMNIST_FILES,
        names,
        lambda root: datasets.EMNIST(root, "balanced", download=True),
    )


def _load(
    settings: DataSettings,
    folder: str,
    files: tuple[str, ...],
    label_names: tuple[str, ...],
    download: Callable[[Path], Any],
    elsewhere: tuple[Path, ...] = (),
) -> Pool:
    from torchvision.datasets.mnist import read_image_file, read_label_file

    root = data_root(settings)
    raw = root / folder / "raw"
    places = (root, raw) if settings.data_dir else (root, raw, *elsewhere)
    chosen = next((paths for place in places if (paths := _idx_files(place, files))), None)
    if chosen is None:
        if not settings.download:
            raise missing(settings, [place / files[0] for place in places], raw)
        fetch(settings, [raw / file for file in files], raw, lambda: download(root))
        chosen = [raw / file for file in files]

    def decode(allocate: Allocate) -> Pool:
        parts = [(_read(read_image_file, chosen[i]), _read(read_label_file, chosen[i + 1])) for i in (0, 2)]
        inputs = np.concatenate([images for images, _ in parts])[:, None]
        labels = np.concatenate([labels for _, labels in parts])
        return Pool(inputs, labels, label_names, num_train=len(parts[0][1]))

    def _read(reader: Callable[[str], Any], path: Path) -> Any:
        try:
            if path.suffix != ".gz":
                return reader(str(path)).numpy()
            with tempfile.TemporaryDirectory() as scratch:  # torchvision's reader takes plain files only
                plain = Path(scratch) / path.stem
                with gzip.open(path) as source, plain.open("wb") as target:
                    unpack(source, target, path)
                return reader(str(plain)).numpy()
        except (*UNREADABLE, TypeError, KeyError, AssertionError) as error:
            raise damaged(settings, path, error) from error

    return cached(settings.dataset, chosen, decode)


def _idx_files(place: Path, files: tuple[str, ...]) -> list[Path]:
    """Return the files in a folder, preferring plain over gzipped; empty unless all of them exist."""
    paths = [next((path for path in (place / f, place / f"{f}.gz") if path.is_file()), None) for f in files]
    return [path for path in paths if path is not None] if None not in paths else []
