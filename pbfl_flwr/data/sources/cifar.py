"""CIFAR-10 and CIFAR-100, 3x32x32, 50,000 + 10,000 images.

torchvision's files (``data-dir/cifar-10-batches-py``, ``cifar-100-python``) take precedence; without them data-dir
is read as an image folder (``train/<class>``, ``test/<class>``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.own.image_folder import image_folder
from pbfl_flwr.data.sources.files import damaged, data_root, fetch, files_under, torchvision_datasets


def cifar10(settings: DataSettings) -> Pool:
    """Return 60,000 images, 10 classes."""
    datasets = torchvision_datasets(settings)

    return _load(settings, datasets.CIFAR10)


def cifar100(settings: DataSettings) -> Pool:
    """Return 60,000 images, 100 fine classes."""
    datasets = torchvision_datasets(settings)

    return _load(settings, datasets.CIFAR100)


def _load(settings: DataSettings, dataset: Any) -> Pool:
    root = data_root(settings)
    folder = root / dataset.base_folder
    if not folder.exists() and (root / "train").is_dir():
        return image_folder(settings)
    names = [name for name, _ in [*dataset.train_list, *dataset.test_list]] + [dataset.meta["filename"]]
    fetch(settings, [folder / name for name in names], folder, lambda: dataset(root, download=True))

    def decode(allocate: Allocate) -> Pool:
        try:
            train, test = dataset(root, train=True), dataset(root, train=False)
        except RuntimeError as error:
            raise damaged(settings, folder, error) from error
        # torchvision has channels last.
        inputs = np.concatenate([train.data, test.data]).transpose(0, 3, 1, 2)
        labels = np.array([*train.targets, *test.targets], dtype=np.int64)
        return Pool(np.ascontiguousarray(inputs), labels, tuple(train.classes), num_train=len(train.targets))

    return cached(settings, files_under(folder), decode)
