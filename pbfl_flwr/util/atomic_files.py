"""Atomic replacement of files, and the one way to make private files and directories.

A file is written under a temporary name, flushed, and renamed. What this package writes belongs to its user alone: mode
0600, directories 0700, whatever the umask. Does not import torch, so that commands that only read a run start fast.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pbfl_flwr.errors import PbflError

NODE = "node-"  # prefix of a state directory made by pbfl deploy local; the device's number follows
SCHEMA = "2"  # version of the files with tensors


class DamagedState(PbflError):
    """A state file is damaged or not the expected one; the message names the file, the problem and what to do."""


class UnsavedState(PbflError):
    """A file could not be written, e.g. because the disk is full; its previous content is kept."""


def write_atomically(
    path: Path,
    data: bytes | Sequence[bytes | memoryview],
    *,
    locked: bool = False,
    private: bool = True,
    flushed: bool = True,
) -> None:
    """Replace a file atomically: after an interruption it has either the old or the new content.

    A new file takes the place of the old one, or of a link, whose target is left alone; nothing of the old one's mode
    is kept.

    Args:
        path: the file; missing parent directories are made.
        data: the new content, in one piece or several.
        locked: the caller holds the file's lock. The temporary file then has a fixed name, so one that a killed process
            left is removed first.
        private: only its owner may read and write it; if False, the umask decides.
        flushed: flush the directory, so that the new file survives a power failure; if False, the caller does it.

    Raises:
        UnsavedState: if writing or flushing fails.
    """
    writer = "" if locked else f".{secrets.token_hex(8)}"
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    try:
        make_directory(path.parent)
        if locked:
            temporary.unlink(missing_ok=True)
        # "x": neither a link nor a file that somebody put there is opened.
        with open(temporary, "xb", opener=private_opener if private else None) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        kept = "; its previous content is kept" if os.path.lexists(path) else ""
        raise UnsavedState(f"{path} cannot be written ({error.strerror}){kept}") from None
    if not flushed:
        return
    try:
        flush_directory(path.parent)
    except OSError as error:
        raise UnsavedState(
            f"{path} is written, but may be lost at a power failure ({error.strerror})"
        ) from None


def private_opener(name: str, flags: int) -> int:
    """Open a file as ``opener`` of :func:`open`: one that is made is its owner's alone, and a link is not followed.

    Raises:
        OSError: as :func:`os.open`; also if the name is a link.
    """
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)  # Windows has no O_NOFOLLOW


def create_private(path: Path) -> Path:
    """Create an empty private file, which a library then opens by its name, and return its path.

    Raises:
        OSError: if it cannot be made, e.g. because it exists.
    """
    open(path, "xb", opener=private_opener).close()
    return path


@contextmanager
def regular_file(path: Path, *, linked: bool = False) -> Iterator[BinaryIO]:
    """Open a file that others may have put there, for reading: a regular file.

    Args:
        path: the file.
        linked: whether it may be a link to such a file.

    Raises:
        OSError: if it cannot be opened, e.g. FileNotFoundError.
        DamagedState: if it is something else (a link, which may lead anywhere; a pipe or a device, which may not end).
    """
    try:
        # Opening a pipe waits for its writer otherwise.
        follow = 0 if linked else getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, os.O_RDONLY | follow | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if linked or error.errno != errno.ELOOP:
            raise
        raise DamagedState(f"{path} is a link, which is not followed; must be a file") from None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedState(f"{path} is not a regular file and is not read")
        yield file


def read_regular(path: Path, most: int, *, linked: bool = False) -> bytes:
    """Return the content of a file of at most so many bytes, opened as :func:`regular_file` does.

    Raises:
        OSError: if it cannot be opened or read, e.g. FileNotFoundError.
        DamagedState: if it is no regular file, or larger.
    """
    with regular_file(path, linked=linked) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DamagedState(f"{path} has {size} bytes; must be at most {most}")
        return file.read(size)


def make_directory(path: Path, *, private: bool = True, exist_ok: bool = True) -> None:
    """Make a directory and its missing parents, and flush them to disk.

    Args:
        path: the directory; the mode of one that exists stays.
        private: if it is made, only its owner may access it; if False, and for parents, others may read it as far as
            the umask allows, but never write.
        exist_ok: whether it may exist.

    Raises:
        OSError: if it cannot be made or flushed.
    """
    if exist_ok and path.is_dir():
        return
    if not path.parent.exists():  # if it is a file, the system says so below
        make_directory(path.parent, private=False)
    path.mkdir(mode=0o700 if private else 0o755, exist_ok=exist_ok)
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
