"""Locate, check and download source files."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pbfl_flwr.config import DataSettings
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.util.atomic_files import make_directory
from pbfl_flwr.util.extras import torchvision_for
from pbfl_flwr.util.locks import Lock
from pbfl_flwr.util.paths import home

# Raised by a compressed file that is damaged, encrypted, compressed by an unsupported method, or whose header claims
# arrays larger than any memory.
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    MemoryError,
    OverflowError,
    zipfile.BadZipFile,
    zlib.error,
)


def torchvision_datasets(settings: DataSettings) -> ModuleType:
    """Return ``torchvision.datasets``; see :func:`.torchvision_for`."""
    datasets: ModuleType = torchvision_for(f"dataset '{settings.dataset}'").datasets
    return datasets


def data_root(settings: DataSettings) -> Path:
    """Return data-dir, or <home>/data when it is empty; absolute."""
    return expanded(settings.data_dir).absolute() if settings.data_dir else home() / "data"


def given_path(settings: DataSettings, what: str) -> Path:
    """Return data-dir for a dataset that requires it.

    Raises:
        PbflError: if data-dir is empty or does not exist.
    """
    if not settings.data_dir:
        raise PbflError(f"dataset '{settings.dataset}' needs data-dir: {what}")
    path = data_root(settings)
    if not path.exists():
        raise PbflError(f"dataset '{settings.dataset}': {path} does not exist; it should be {what}")
    return path


def check_no_path(settings: DataSettings) -> None:
    """Refuse data-dir for a dataset that needs no files, since another dataset must be meant.

    Raises:
        PbflError: naming both.
    """
    if settings.data_dir:
        raise PbflError(
            f"data-dir = '{settings.data_dir}': dataset = '{settings.dataset}' needs no files and ignores it; set "
            "dataset to the one stored there (pbfl list datasets), or omit data-dir"
        )


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (directory, names of its files) of every directory in a folder, following links as torchvision does.

    Raises:
        PbflError: if a directory may not be read, or a link leads back to one above it, so that the same files would
            come again and again.
    """

    def refuse(error: OSError) -> None:
        if f"{os.sep}." not in str(error.filename)[len(str(folder)) :] and os.path.isdir(error.filename):
            raise PbflError(f"{error.filename} cannot be read ({error.strerror})")

    above: dict[str, tuple[str, ...]] = {
        str(folder): (os.path.realpath(folder),)
    }  # a directory and all that contain it
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        here = above.pop(place)
        for below in [os.path.join(place, name) for name in folders]:
            if (real := os.path.realpath(below)) in here:
                if f"{os.sep}." in below[len(str(folder)) :]:
                    folders.remove(os.path.basename(below))  # nobody reads hidden folders
                    continue
                raise PbflError(f"{below} is a link back to {real}, which contains it; remove the link")
            above[below] = (*here, real)
        yield place, names


def files_under(folder: Path) -> list[Path]:
    """Return every file below a folder; see :func:`walk`."""
    paths = (Path(place, name) for place, names in walk(folder) for name in names)
    return [path for path in paths if path.is_file()]


def check_memory(size: int, path: Path) -> None:
    """Refuse a file whose content is larger than this machine's memory, before it is read.

    Raises:
        PbflError: naming both sizes.
    """
    if not hasattr(os, "sysconf"):  # not on Windows
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise PbflError(
            f"{path} holds {size / 2**20:,.0f} MiB, more than this machine's memory of {memory / 2**20:,.0f} MiB"
        )


def missing(settings: DataSettings, looked: Sequence[Path], goes_to: Path | None) -> PbflError:
    """Return the error for missing data."""
    line = f"dataset '{settings.dataset}' not found; looked for " + ", ".join(str(path) for path in looked)
    if goes_to is None:
        return PbflError(line + "; there is no automatic download: put it there, or set data-dir")
    return PbflError(line + f"; set data-dir, or download=true, which stores it at {goes_to}")


def fetch(
    settings: DataSettings, needed: Sequence[Path], goes_to: Path, download: Callable[[], object]
) -> None:
    """Ensure that files exist; if allowed, download missing ones, once for all processes.

    Raises:
        PbflError: if something is missing and download is false, or if the download fails.
    """
    if not _absent(needed):
        return
    if not settings.download:
        raise missing(settings, _absent(needed) if goes_to.exists() else [goes_to], goes_to)
    locks = home() / "cache"
    try:
        make_directory(locks)
        with Lock(locks / f"{settings.dataset}.download.lock"):
            if _absent(needed):
                download()
    except (OSError, RuntimeError) as error:
        raise PbflError(f"dataset '{settings.dataset}': the download to {goes_to} failed: {error}") from error
    if absent := _absent(needed):
        raise missing(settings, absent, None)


def damaged(settings: DataSettings, path: Path, error: Exception) -> PbflError:
    """Return the error for files that exist but cannot be read."""
    return PbflError(
        f"dataset '{settings.dataset}': {path} is incomplete or damaged ({error}); delete it and download it "
        "again"
    )


def _absent(needed: Iterable[Path]) -> list[Path]:
    return [path for path in needed if not path.exists()]
