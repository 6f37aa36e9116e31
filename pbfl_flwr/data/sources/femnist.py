"""FEMNIST: handwritten digits and letters by their writers, 1x28x28, 62 classes, in LEAF's JSON files.

LEAF's ``preprocess.sh`` writes ``train/*.json`` and ``test/*.json`` into its ``data`` folder, and ``all_data/*.json``
before it splits. Such a file has ``users`` and ``user_data``: writer -> ``x``, lists of 784 numbers in [0, 1], and
``y``, 0 to 61 (digits, upper case, lower case). ``train`` is the official training part; the writers are the natural
clients. Pixels are converted back to uint8 (LEAF divides them by 255); the background is white, as in the files.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool, Rows
from pbfl_flwr.data.labels import owner_names
from pbfl_flwr.data.sources.files import check_memory, data_root, missing
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.paths import files_in

LABELS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
SIDE = 28
# In JSON a pixel takes at least 5 characters; as a Python number in a list it takes 32 bytes.
_BYTES_A_CHARACTER = 8


def femnist(settings: DataSettings) -> Pool:
    """Return all samples, the training part first; searches data-dir and in it data, femnist and femnist/data.

    Raises:
        PbflError: if there are no such files, or a file is not in LEAF's format.
    """
    root = data_root(settings)
    places = (root, root / "data", root / "femnist", root / "femnist" / "data")
    train, test = next((parts for place in places if (parts := _files(place))), ([], []))
    if not train:
        raise missing(settings, [place / "train" / "*.json" for place in places], None)

    def decode(allocate: Allocate) -> Pool:
        parts = [[shard for path in paths for shard in _read(path)] for paths in (train, test)]
        shards = [shard for part in parts for shard in part]
        sizes = [len(labels) for _, _, labels in shards]
        if not sum(sizes):
            raise PbflError(f"no file of {train[0].parent} holds a sample")
        inputs = allocate((sum(sizes), 1, SIDE, SIDE), np.uint8)
        for (_, images, _), end in zip(shards, np.cumsum(sizes), strict=True):
            inputs[end - len(images) : end] = images
        names, writers = np.unique([writer for writer, _, _ in shards], return_inverse=True)
        return Pool(
            inputs,
            np.concatenate([labels for _, _, labels in shards]),
            LABELS,
            num_train=sum(len(labels) for _, _, labels in parts[0]),
            owner=np.repeat(writers, sizes).astype(np.int64),
            owner_names=owner_names(names.tolist()),
        )

    return cached(settings, [*train, *test], decode)


def _files(place: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the files of the training and the test part in a folder, None if it has none."""
    train, test, together = (files_in(place / name, ".json") for name in ("train", "test", "all_data"))
    parts = (train, test) if train else (together or files_in(place, ".json"), [])
    return parts if parts[0] else None


def _read(path: Path) -> list[tuple[str, NDArray[np.uint8], Rows]]:
    """Return (writer, images (n, 1, 28, 28), labels (n,)) of every writer in a file."""
    check_memory(_BYTES_A_CHARACTER * path.stat().st_size, path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        data = content["user_data"]
        if not all(str(user).strip() for user in content["users"]):
            raise ValueError("a user has no name")
        return [(str(user), *_samples(data[user]["x"], data[user]["y"])) for user in content["users"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        raise PbflError(
            f"{path} is not a file of LEAF's FEMNIST ({reason}); it should hold users and user_data: x, lists of "
            f"{SIDE * SIDE} numbers from 0 to 1, and y, 0 to {len(LABELS) - 1}"
        ) from error


def _samples(x: Sequence[Any], y: Sequence[Any]) -> tuple[NDArray[np.uint8], Rows]:
    pixels, labels = np.asarray(x, dtype=np.float32), np.asarray(y)
    if not len(labels):
        return np.empty((0, 1, SIDE, SIDE), np.uint8), labels.astype(np.int64)
    if labels.dtype.kind not in "iu":
        raise ValueError("y does not consist of whole numbers")
    if pixels.shape != (len(labels), SIDE * SIDE) or labels.ndim != 1:
        raise ValueError(f"x is {pixels.shape}, y {labels.shape}")
    if not (pixels.min() >= 0 and pixels.max() <= 1):  # NaN is neither
        raise ValueError(f"x ranges from {pixels.min():g} to {pixels.max():g}")
    if labels.min() < 0 or labels.max() >= len(LABELS):
        raise ValueError(f"y ranges from {labels.min()} to {labels.max()}")
    return np.rint(255 * pixels).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)
