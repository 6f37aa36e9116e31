"""Locks of run directories, and whether a process still uses one.

``pbfl run`` and ``pbfl deploy local`` hold RUN_LOCK from start to end; every server holds SERVER_LOCK from before its
first message. Checking a lock holds it in shared mode for an instant, for which :func:`claim` waits.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import Timeout

from pbfl_flwr.errors import writing
from pbfl_flwr.runs.directory import SERVER_LOCK, RunRefused
from pbfl_flwr.util.locks import Lock

RUN_LOCK = ".lock"
CLAIM_SECONDS = 0.3  # a process that checks the lock holds it for an instant

# File systems on which a free lock is free on all machines; on a network file system another machine may hold it.
LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
MOUNTS = Path("/proc/self/mountinfo")
RECHECK_SECONDS = 0.1  # a lock's file is made an instant before the lock is acquired


def lock_of(run_dir: Path) -> Lock:
    """Return the lock that the command running in a directory holds."""
    return Lock(run_dir / RUN_LOCK)


def claim(lock: Lock, run_dir: Path) -> None:
    """Make a run directory and acquire its lock.

    Raises:
        PbflError: if it cannot be made.
        RunRefused: if another process holds the lock.
    """
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=CLAIM_SECONDS)
        except Timeout:  # a subclass of OSError
            raise RunRefused(f"run-dir = '{run_dir}' is in use by another run") from None


def abandoned(run_dir: Path) -> bool:
    """Whether processes have used the directory and none does now; False if that is not certain.

    It is certain only on Linux and local file systems.
    """
    if not sys.platform.startswith("linux") or _kind_of_file_system(run_dir) not in LOCAL:
        return False
    locks = [lock for name in (RUN_LOCK, SERVER_LOCK) if (lock := run_dir / name).is_file()]
    if not locks or not all(map(_free, locks)):
        return False
    time.sleep(RECHECK_SECONDS)
    return all(map(_free, locks))


def _free(lock: Path) -> bool:
    """Whether a lock is free; False if that cannot be determined."""
    import fcntl  # not available on Windows

    with suppress(OSError):  # it is held, may not be read, or does not exist
        file = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        finally:
            os.close(file)  # releases the lock
    return False


def _kind_of_file_system(path: Path) -> str:
    """Return the type of a path's file system, or "" if unknown."""
    place, kind, longest = os.path.realpath(path), "", -1
    with suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            words = before.split(" ")
            if len(words) < 5 or not after:
                continue
            mount = words[4].replace("\\040", " ")
            inside = place == mount or place.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= longest:  # a later mount at the same place hides the earlier one
                kind, longest = after.split(" ")[0], len(mount)
    return kind
