"""Decode a dataset's files once, into memory maps that all processes of a machine share.

A cache entry is the folder ``<home>/cache/<dataset>-<hash>`` with ``inputs.npy``, ``labels.npy``, ``meta.json`` and,
where the source has them, ``owner.npy`` and ``in_train.npy``. The hash covers the settings and names of folders that a
decoder may read, and path, size and modification time of every source file, so changed files are decoded again. Entries
may be deleted whenever no run is in progress. They are readable by their owner alone, whatever the files' mode was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tokenize
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.validation import validate
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import MAX_VALUES
from pbfl_flwr.util.atomic_files import create_private, make_directory
from pbfl_flwr.util.locks import Lock
from pbfl_flwr.util.paths import home

FORMAT = 14
"""Incremented when the stored content changes, so that older entries are not read."""

DECODING = ("data_dir", "labels", "label_column", "input_shape", "partitioner", "partitioner_settings")
"""The settings that a decoder may read in addition to its files."""


Allocate = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]
"""(shape, dtype) -> a writable array inside the new cache entry; large inputs go straight to disk."""

log = logging.getLogger(__name__)


def cached(
    settings: DataSettings,
    sources: Iterable[Path],
    decode: Callable[[Allocate], Pool],
    folders: Sequence[str] = (),
) -> Pool:
    """Return the pool of a dataset, decoding its files if no process of this machine has done so before.

    Args:
        settings: of the data; ``decode`` may depend on the dataset and on those in DECODING.
        sources: every file that ``decode`` reads.
        decode: reads the files; called under a lock, by one process only.
        folders: names of folders, also empty ones, on which ``decode`` depends.

    Raises:
        PbflError: if a source is missing, or the cache cannot be written or is damaged; also what ``decode`` and
            the validation raise.
    """
    entry = home() / "cache" / f"{settings.dataset}-{_fingerprint(settings, sources, folders)}"
    if not entry.is_dir():
        try:
            make_directory(entry.parent)
            with Lock(entry.with_name(entry.name + ".lock")):
                if not entry.is_dir():
                    _fill(settings.dataset, entry, decode)
        except OSError as error:
            raise PbflError(
                f"cannot write the cache of decoded data at {entry.parent} ({error}); "
                "the environment variable PBFL_HOME can set another directory"
            ) from error
    return _open(entry)


def _fingerprint(settings: DataSettings, sources: Iterable[Path], folders: Sequence[str]) -> str:
    content = [FORMAT, *(getattr(settings, key) for key in DECODING), *folders]
    digest = hashlib.sha256(json.dumps(content).encode())
    for path in sorted(sources):
        try:
            status = path.stat()
        except OSError as error:  # a broken link, or a file removed meanwhile
            raise PbflError(f"{path} cannot be read ({error.strerror})") from error
        digest.update(os.fsencode(path.absolute()))  # a name need not be UTF-8
        digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _fill(name: str, entry: Path, decode: Callable[[Allocate], Pool]) -> None:
    partial = entry.with_name(entry.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    make_directory(partial)

    def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        if (values := math.prod(shape[1:])) > MAX_VALUES:
            raise PbflError(
                f"dataset '{name}': an input of shape {shape[1:]} has {values:,} values; must be at most "
                f"{MAX_VALUES:,}; images of a folder can be given another size with input-shape"
            )
        _need(partial, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.lib.format.open_memmap(
            create_private(partial / "inputs.npy"), mode="w+", dtype=dtype, shape=shape
        )

    log.info("decoding %s into %s, once", name, entry)
    try:
        pool = decode(allocate)
        validate(pool, name)
        _write(pool, partial)
        os.replace(partial, entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _need(folder: Path, size: int) -> None:
    # A memory map on a full disk kills the process (SIGBUS) where a write would raise.
    free = shutil.disk_usage(folder).free
    if size > free:
        raise PbflError(
            f"decoded data needs {size / 2**20:,.0f} MiB at {folder.parent}, {free / 2**20:,.0f} MiB are "
            "free; the environment variable PBFL_HOME can set another directory"
        )


def _write(pool: Pool, folder: Path) -> None:
    if isinstance(pool.inputs, np.memmap):
        pool.inputs.flush()
    else:
        _need(folder, pool.inputs.nbytes)
        np.save(create_private(folder / "inputs.npy"), pool.inputs)
    np.save(create_private(folder / "labels.npy"), pool.labels)
    for column in ("owner", "in_train"):
        values = getattr(pool, column)
        if values is not None:
            np.save(create_private(folder / f"{column}.npy"), values)
    keys = ("label_names", "num_train", "owner_names", "notes", "columns", "vocabulary_size")
    meta = {key: getattr(pool, key) for key in keys}
    create_private(folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    for file in folder.iterdir():  # a power cut must not leave an entry without its content
        with file.open("rb+") as content:
            os.fsync(content.fileno())


def _open(entry: Path) -> Pool:
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        pool = Pool(
            # Copy on write: pages stay shared, and torch wraps slices without copying.
            inputs=np.load(entry / "inputs.npy", mmap_mode="c"),
            labels=np.load(entry / "labels.npy"),
            label_names=tuple(meta["label_names"]),
            num_train=meta["num_train"],
            owner=_column(entry / "owner.npy"),
            owner_names=tuple(meta["owner_names"]),
            in_train=_column(entry / "in_train.npy"),
            notes=tuple(meta["notes"]),
            columns=tuple(meta["columns"]),
            vocabulary_size=meta["vocabulary_size"],
        )
        columns = (pool.inputs, pool.labels, pool.owner, pool.in_train)
        if len({len(column) for column in columns if column is not None}) > 1:
            raise ValueError("its arrays are of different lengths")
        return pool
    except PermissionError as error:
        raise PbflError(
            f"{error.filename} cannot be read ({error.strerror}); set PBFL_HOME to a folder of your own"
        ) from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, tokenize.TokenError) as error:
        raise PbflError(
            f"the cache entry {entry} is damaged ({error}); delete it, then it is decoded again"
        ) from error


def _column(path: Path) -> Any:
    return np.load(path) if path.exists() else None
