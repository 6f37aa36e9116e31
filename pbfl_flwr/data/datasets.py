"""DATASETS, the table of all datasets.

A dataset is one function ``(DataSettings) -> Pool`` in its own module and one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pbfl_flwr.config import DataSettings, Scalar
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.own.columns import SUFFIXES
from pbfl_flwr.data.own.hugging_face import flwr_datasets, is_saved_dataset
from pbfl_flwr.data.own.image_folder import image_folder
from pbfl_flwr.data.own.npz import har, npz
from pbfl_flwr.data.own.pflib import pflib
from pbfl_flwr.data.own.table import table
from pbfl_flwr.data.sources.ag_news import ag_news
from pbfl_flwr.data.sources.cifar import cifar10, cifar100
from pbfl_flwr.data.sources.digits import digits
from pbfl_flwr.data.sources.femnist import femnist
from pbfl_flwr.data.sources.idx_files import emnist, fashion_mnist, mnist
from pbfl_flwr.data.sources.photos import flowers102, gtsrb
from pbfl_flwr.data.sources.spiral import spiral
from pbfl_flwr.data.sources.tiny_imagenet import tiny_imagenet
from pbfl_flwr.errors import PbflError


@dataclass(frozen=True)
class Dataset:
    """An entry of the table of datasets: its loader and a one-line description."""

    load: Callable[[DataSettings], Pool]
    description: str


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(digits, "1,797 handwritten digits of scikit-learn, 1x16x16, 10 classes; no files needed"),
    "spiral": Dataset(spiral, "30,000 points on six spiral arms, (2,), 6 classes; no files needed"),
    "mnist": Dataset(mnist, "70,000 handwritten digits, 1x28x28, 10 classes"),
    "fashion-mnist": Dataset(fashion_mnist, "70,000 pieces of clothing, 1x28x28, 10 classes; also Debian's package"),
    "emnist": Dataset(emnist, "131,600 handwritten characters (balanced split), 1x28x28, 47 classes"),
    "femnist": Dataset(femnist, "handwritten characters by writer, 1x28x28, 62 classes; LEAF's files, no download"),
    "cifar10": Dataset(cifar10, "60,000 images, 3x32x32, 10 classes; torchvision's files or an image folder"),
    "cifar100": Dataset(cifar100, "60,000 images, 3x32x32, 100 classes; torchvision's files or an image folder"),
    "flowers102": Dataset(flowers102, "8,189 photographs of flowers, resized to 3x64x64, 102 classes"),
    "gtsrb": Dataset(gtsrb, "39,270 traffic signs, resized to 3x32x32, 43 classes"),
    "tiny-imagenet": Dataset(tiny_imagenet, "110,000 images, 3x64x64, 200 classes; no download"),
    "har": Dataset(har, "10,299 windows of 30 people's smartphones, (9, 128), 6 classes; data-dir is the .npz"),
    "ag-news": Dataset(ag_news, "127,600 news articles, (200,) token ids, 4 classes; CSV files, no download"),
    "image-folder": Dataset(image_folder, "images in data-dir/train/<class> and test/<class>, or data-dir/<class>"),
    "npz": Dataset(npz, "arrays x, y and optionally client; data-dir is the .npz file"),
    "table": Dataset(table, "features and a class column in a CSV or Parquet file; data-dir is the file"),
    "flwr-datasets": Dataset(flwr_datasets, "Hugging Face's format, Flower's partitioners; folder or hf://<id>"),
    "pflib": Dataset(pflib, "a PFLlib/HtFLlib dataset folder with its own clients and splits; data-dir is the folder"),
}  # fmt: skip

_DATASET_OF_SUFFIX = {".npz": "npz", **dict.fromkeys(SUFFIXES, "table")}


def dealt(configuration: Mapping[str, Scalar]) -> str:
    """Return how the samples of a run were dealt to its clients, in a few words, e.g. ``dirichlet(0.1)``."""
    if configuration["dataset"] == "pflib":
        return "clients and splits of its files"
    detail = {
        "dirichlet": f"({configuration['dirichlet-alpha']})",
        "pathological": f"({configuration['classes-per-client']} classes)",
        "way-shot": f"({configuration['ways']} ways, {configuration['shots']} shots)",
        "natural": f"({configuration['partitioner']})" if configuration.get("partitioner") else "",
    }.get(str(configuration["partition"]), "")
    return f"{configuration['partition']}{detail}"


def kind_of(path: Path) -> str:
    """Return the dataset that reads a path, by its suffix or content.

    Raises:
        PbflError: if it is a file of an unsupported kind.
    """
    if dataset := _DATASET_OF_SUFFIX.get(path.suffix.lower()):
        return dataset
    if path.exists() and not path.is_dir():
        raise PbflError(
            f"{path} is not a known kind of data; must be {', '.join(_DATASET_OF_SUFFIX)}, a folder of images, or a "
            "PFLlib folder"
        )
    if is_saved_dataset(path):
        return "flwr-datasets"
    return "pflib" if (path / "config.json").is_file() and (path / "train").is_dir() else "image-folder"
