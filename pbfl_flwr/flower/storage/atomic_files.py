"""Files that are the old one or the new one, whatever happens in between: written beside their place, flushed, renamed.

No torch here: who only reads what a run wrote down starts at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pbfl_flwr.errors import PbflError

NODE = "node-"  # begins the name of a state directory of a device of pbfl deploy local; its number follows
SCHEMA = "2"  # of the files with tensors; 1 had another checksum


class DamagedState(PbflError):
    """A state file that cannot be trusted; the text names the file, the fault and what to do."""


class UnsavedState(PbflError):
    """A file that could not be written, e.g. because the disk is full; what was there before is still there."""


def write_atomically(
    path: Path,
    data: bytes | Sequence[bytes | memoryview],
    *,
    locked: bool = False,
    private: bool = False,
    flushed: bool = True,
) -> None:
    """Write a file so that it is either the old one or the new one, whatever happens in between.

    Args:
        path: the file; directories above it are made.
        data: what it shall hold, in one piece or several.
        locked: the caller holds the file's lock, so that what it writes beside it always has the same name, and what
            a killed process left there is written over.
        private: only its owner may read it.
        flushed: the new one outlasts a power cut when this returns; else whoever calls this flushes the directory.

    Raises:
        UnsavedState: if the system refuses it, or cannot say that the new name lasts.
    """
    writer = "" if locked else f".{os.getpid()}"
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    try:
        make_directory(path.parent)
        with open(temporary, "wb", opener=_owners_alone if private else None) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UnsavedState(
            f"{path} cannot be written ({error.strerror}); what it held before is kept"
        ) from None
    if not flushed:
        return
    try:
        flush_directory(path.parent)
    except OSError as error:
        raise UnsavedState(f"{path} is written, but may not outlast a power cut ({error.strerror})") from None


def _owners_alone(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def make_directory(path: Path, *, private: bool = False) -> None:
    """Make a directory and those above it, which last when this returns.

    Args:
        path: the directory; nothing happens if it is there.
        private: only its owner may enter it, if it is made.

    Raises:
        OSError: if the system refuses it.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    path.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Make the new name of a file last, where the system knows of such a thing."""
    try:
        directory = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no directory
        return
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that flush no directory
            raise
    finally:
        os.close(directory)


def remove_torn(directory: Path) -> None:
    """Remove what processes that were killed while writing a file left beside it: it takes room and is of no use."""
    for left in directory.glob(".*.tmp"):
        left.unlink(missing_ok=True)
