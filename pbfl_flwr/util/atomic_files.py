"""Atomic replacement of files: written under a temporary name, flushed, renamed.

Does not import torch, so that commands that only read a run start fast.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pbfl_flwr.errors import PbflError

NODE = "node-"  # prefix of a state directory made by pbfl deploy local; the device's number follows
SCHEMA = "2"  # version of the files with tensors; 1 had another checksum


class DamagedState(PbflError):
    """A state file is damaged or not the expected one; the message names the file, the problem and what to do."""


class UnsavedState(PbflError):
    """A file could not be written, e.g. because the disk is full; its previous content is kept."""


def write_atomically(
    path: Path,
    data: bytes | Sequence[bytes | memoryview],
    *,
    locked: bool = False,
    private: bool = False,
    flushed: bool = True,
) -> None:
    """Replace a file atomically: after an interruption it has either the old or the new content.

    Args:
        path: the file; missing parent directories are made.
        data: the new content, in one piece or several.
        locked: the caller holds the file's lock. The temporary file then has a fixed name, so one that a killed process
            left is overwritten.
        private: only its owner may read it.
        flushed: flush the directory, so that the new file survives a power failure; if False, the caller does it.

    Raises:
        UnsavedState: if writing or flushing fails.
    """
    writer = "" if locked else f".{os.getpid()}"
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    try:
        make_directory(path.parent)
        with open(temporary, "wb", opener=_open_private if private else None) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UnsavedState(
            f"{path} cannot be written ({error.strerror}); its previous content is kept"
        ) from None
    if not flushed:
        return
    try:
        flush_directory(path.parent)
    except OSError as error:
        raise UnsavedState(
            f"{path} is written, but may be lost at a power failure ({error.strerror})"
        ) from None


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def make_directory(path: Path, *, private: bool = False) -> None:
    """Make a directory and its parents, and flush them to disk.

    Args:
        path: the directory; nothing is done if it exists.
        private: if it is made, only its owner may access it.

    Raises:
        OSError: if it cannot be made or flushed.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    path.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Flush the entries of a directory to disk, if the system supports it."""
    try:
        directory = os.open(path, os.O_RDONLY)
    except PermissionError:  # directories cannot be opened on Windows
        return
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot flush directories
            raise
    finally:
        os.close(directory)


def remove_temporary(directory: Path) -> None:
    """Remove temporary files that were left by processes killed while writing."""
    for file in directory.glob(".*.tmp"):
        file.unlink(missing_ok=True)
