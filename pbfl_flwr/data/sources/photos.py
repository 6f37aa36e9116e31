"""Photographs from torchvision, decoded and resized once: Oxford Flowers-102 (64x64) and GTSRB (32x32).

Sizes and pooled parts are those of the references: Flowers train+val+test (8,189 images), GTSRB
torchvision's 26,640 + 12,630. Official test parts: Flowers' test (training is train+val), GTSRB's final test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.own.images import decode_images
from pbfl_flwr.data.sources.files import damaged, data_root, fetch, files_under, torchvision_datasets

_GTSRB_CLASSES = 43


def flowers102(settings: DataSettings) -> Pool:
    """Return 8,189 photographs, 3x64x64, 102 classes."""
    datasets = torchvision_datasets(settings)

    folder = data_root(settings) / "flowers-102"
    needed = [folder / name for name in ("jpg", "imagelabels.mat", "setid.mat")]
    names = tuple(datasets.Flowers102.classes)
    return _load(settings, datasets.Flowers102, ("train", "val", "test"), folder, needed, 64, names)


def gtsrb(settings: DataSettings) -> Pool:
    """Return 39,270 traffic signs, 3x32x32, 43 classes."""
    datasets = torchvision_datasets(settings)

    folder = data_root(settings) / "gtsrb"
    needed = [folder / "GTSRB" / "Training", folder / "GTSRB" / "Final_Test", folder / "GT-final_test.csv"]
    names = tuple(f"sign {k}" for k in range(_GTSRB_CLASSES))
    return _load(settings, datasets.GTSRB, ("train", "test"), folder, needed, 32, names)


def _load(
    settings: DataSettings,
    dataset: Callable[..., Any],
    splits: tuple[str, ...],
    folder: Path,
    needed: list[Path],
    side: int,
    label_names: tuple[str, ...],
) -> Pool:
    root = data_root(settings)
    fetch(settings, needed, folder, lambda: [dataset(root, split=split, download=True) for split in splits])

    def decode(allocate: Allocate) -> Pool:
        try:
            parts = [dataset(root, split=split) for split in splits]
        except (RuntimeError, OSError, KeyError, ValueError) as error:
            raise damaged(settings, folder, error) from error
        samples = (part[index] for part in parts for index in range(len(part)))
        total = sum(map(len, parts))
        inputs, labels, _ = decode_images(samples, total, allocate, (side, side), folder)
        return Pool(inputs, labels, label_names, num_train=total - len(parts[-1]))

    return cached(settings, files_under(folder), decode)
