"""Read and write dataset directories of PFLlib and HtFLlib, to run both tools on the identical partition.

``config.json`` has ``num_clients`` and ``num_classes``; ``train/<i>.npz`` and ``test/<i>.npz`` hold one
pickled dict ``data`` with ``x`` (n, C, H, W) float32, already normalised, and ``y`` (n,). Client i is file i,
and the files fix its split: partition settings do not apply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import MAX_CLASSES, DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.clients import materialise
from pbfl_flwr.data.contract import Partition, Pool, Rows
from pbfl_flwr.data.labels import numbered_classes
from pbfl_flwr.data.own.restricted_pickle import load_arrays
from pbfl_flwr.data.sources.files import given_path
from pbfl_flwr.data.validation import check_labels
from pbfl_flwr.errors import PbflError, abbreviate
from pbfl_flwr.util.atomic_files import create_private, make_directory
from pbfl_flwr.util.paths import files_in

PARTS = ("train", "test")
DEALT = ("non_iid", "balance", "partition", "alpha")  # what config.json says of how the samples were dealt
MAX_CLIENTS = 100_000  # as num-clients


def pflib(settings: DataSettings) -> Pool:
    """Return all clients' samples, client 0's training part first, then its test part, then client 1, ...

    Raises:
        PbflError: if a file is missing, is refused by the restricted unpickler, or has another shape than the
            rest, or ``labels`` has more or fewer names than there are classes.
    """
    root = given_path(
        settings, "a PFLlib/HtFLlib dataset folder with config.json, train/<i>.npz and test/<i>.npz"
    )
    config = _read_config(root / "config.json")
    hint = f"though {root / 'config.json'} says num_clients = {config.num_clients}"
    return _pool(settings, root, range(config.num_clients), config, hint)


def pflib_client(settings: DataSettings, client: int | None) -> Pool:
    """Return the samples of one client of such a folder, as its only client; other clients' files may be missing.

    Args:
        settings: data-dir is the folder.
        client: number of its files; None: the only client in the folder.

    Raises:
        PbflError: as :func:`pflib`, and if ``client`` is None and the folder holds several clients, or none.
    """
    root = given_path(settings, "a PFLlib/HtFLlib dataset folder with config.json and train/<i>.npz")
    config = _read_config(root / "config.json")
    if client is None:
        clients = clients_in(root)
        if len(clients) != 1:
            raise PbflError(
                f"{root / 'train'} holds the files of {len(clients)} clients; set data-client (a whole number) to "
                "one of them"
            )
        client = clients[0]
    hint = "set data-client (a whole number) to another client of the folder"
    return _pool(settings, root, [client], config, hint)


def clients_in(root: Path) -> list[int]:
    """Return the numbers of the clients whose training files lie in such a folder, in ascending order."""
    names = (path.stem for path in files_in(root / "train", ".npz"))
    return sorted(int(name) for name in names if name.isdecimal())


def _pool(settings: DataSettings, root: Path, clients: Iterable[int], config: _Config, hint: str) -> Pool:
    """Return the samples of these clients; ``hint`` is for the error if a file is missing."""
    files = [root / part / f"{client}.npz" for client in clients for part in PARTS]
    names = _names(settings, config.num_classes, root)
    for path in files:
        if not path.is_file():
            raise PbflError(f"there is no {path}; {hint}")

    def decode(allocate: Allocate) -> Pool:
        labels: list[Rows] = []
        shape: tuple[int, ...] | None = None
        for path in files:  # reads the files twice, to hold only one in memory
            x, y = _read_part(path)
            y = _numbered(y, config.num_classes, settings, path)
            shape = shape or (x.shape[1:] if len(y) else None)
            if len(y) and x.shape[1:] != shape:
                raise PbflError(f"{path} has inputs of shape {x.shape[1:]}; the previous files have {shape}")
            labels.append(y)
        if shape is None:
            raise PbflError(f"no sample in {abbreviate([*map(str, files)])}; must be one or more")
        sizes = [len(y) for y in labels]
        inputs = allocate((sum(sizes), *shape), np.float32)
        start = 0
        for path, size in zip(files, sizes, strict=True):
            if size:
                with np.errstate(over="ignore"):
                    inputs[start : start + size] = _read_part(path)[0]
                finite = np.isfinite(inputs[start : start + size]).all(axis=tuple(range(1, inputs.ndim)))
                if not finite.all():
                    raise PbflError(
                        f"{path}: x[{int(finite.argmin())}] holds NaN, infinity or a number beyond float32 (3.4e38); "
                        "must be finite numbers"
                    )
            start += size
        return Pool(
            inputs,
            np.concatenate(labels),
            names,
            num_train=sum(sizes),
            owner=np.repeat(np.arange(len(files)) // 2, sizes),
            in_train=np.repeat(np.arange(len(files)) % 2 == 0, sizes),
            notes=config.notes,
        )

    return cached(settings, [root / "config.json", *files], decode)


def export_pfl_directory(partition: Partition, pool: Pool, path: Path) -> None:
    """Write a partition as a dataset directory that PFLlib and HtFLlib read.

    Inputs are written as model input: float32, normalised.

    Args:
        partition: of ``pool``.
        pool: the samples.
        path: a folder without a dataset; created if missing.

    Raises:
        PbflError: if the folder holds a dataset already, or inputs are text, which those tools store differently.
    """
    if pool.vocabulary_size:
        raise PbflError("PFLlib folders cannot be written for texts; must be a dataset of numbers or images")
    if any((path / name).exists() for name in ("config.json", *PARTS)):
        raise PbflError(f"{path} already holds a dataset; must be a new folder")
    make_directory(path)
    for part in PARTS:
        make_directory(path / part)
    for client, split in enumerate(partition.splits):
        data = materialise(pool, split)
        for part, shard in zip(PARTS, (data.train, data.test), strict=True):
            content = {"x": data.prepare(shard.inputs).numpy(), "y": shard.labels.numpy()}
            np.savez_compressed(
                create_private(path / part / f"{client}.npz"), data=np.array(content, dtype=object)
            )
    table = [[[int(k), int(row[k])] for k in np.flatnonzero(row)] for row in partition.counts]
    config = {
        "num_clients": len(partition.splits),
        "num_classes": pool.num_classes,
        "Size of samples for labels in clients": table,
    }
    create_private(path / "config.json").write_text(json.dumps(config), encoding="utf-8")


@dataclass(frozen=True)
class _Config:
    """What config.json says."""

    num_clients: int
    num_classes: int
    notes: tuple[str, ...]


def _read_config(path: Path) -> _Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        num_clients, num_classes = int(config["num_clients"]), int(config["num_classes"])
        said = [f"{key} = {json.dumps(config[key])[:40]}" for key in DEALT if key in config]
    except FileNotFoundError as error:
        raise PbflError(f"there is no {path}, which every PFLlib/HtFLlib dataset folder has") from error
    except OSError as error:
        raise PbflError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PbflError(f"{path} must be JSON with num_clients and num_classes ({error!r})") from error
    if not (1 <= num_clients <= MAX_CLIENTS and 2 <= num_classes <= MAX_CLASSES):
        raise PbflError(
            f"{path}: num_clients = {num_clients}, num_classes = {num_classes}; must be 1 to {MAX_CLIENTS} and "
            f"2 to {MAX_CLASSES}"
        )
    return _Config(num_clients, num_classes, (f"config.json says {', '.join(said)}",) if said else ())


def _names(settings: DataSettings, num_classes: int, root: Path) -> tuple[str, ...]:
    """Return the names of the classes, which the files only number."""
    names = settings.classes or tuple(str(k) for k in range(num_classes))
    if len(names) != num_classes:
        raise PbflError(
            f"labels has {len(names)} names, but {root / 'config.json'} says num_classes = {num_classes}"
        )
    return names


def _numbered(y: Rows, num_classes: int, settings: DataSettings, path: Path) -> Rows:
    """Return the labels of one file as indices into the names of the classes."""
    if not settings.classes:
        check_labels(y, f"{path}: y", num_classes, "num_classes in config.json")
        return y
    distinct, codes = np.unique(y, return_inverse=True)
    return numbered_classes([*map(str, distinct)], codes, settings.classes, f"{path}: y")[1]


def _read_part(path: Path) -> tuple[NDArray[Any], Rows]:
    x, y = load_arrays(path, "data", ("x", "y"))
    if x.ndim < 1 or y.shape != (len(x),):
        raise PbflError(
            f"{path}: x is {x.dtype} {x.shape}, y {y.dtype} {y.shape}; they must be (n, ...) and (n,)"
        )
    with np.errstate(invalid="ignore"):
        whole = y.astype(np.int64)
    if (wrong := whole != y).any():
        row = int(wrong.argmax())
        raise PbflError(f"{path}: y[{row}]: {y[row]} is not a whole number; a class is expected")
    return x, whole
