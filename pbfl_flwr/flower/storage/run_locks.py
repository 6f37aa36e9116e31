"""Whether anybody still works in a run directory, by the locks that whoever does holds.

``pbfl run`` and ``pbfl deploy local`` hold one from their start to their end, every server another one from before its
first message on. Looking takes neither away: a lock is shared for an instant, and :func:`claim`
waits that long.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import Timeout

from pbfl_flwr.errors import writing
from pbfl_flwr.flower.storage.history import SERVER_LOCK, RunRefused
from pbfl_flwr.locks import Lock

RUN_LOCK = ".lock"
CLAIM_SECONDS = 0.3  # who only looks whether a lock is free has it for an instant

# Where a lock that nobody has is nobody's on any machine: on a network's file system it may be another machine's.
LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
MOUNTS = Path("/proc/self/mountinfo")
SECOND_LOOK = 0.1  # a lock's file is there an instant before its owner has it


def lock_of(run_dir: Path) -> Lock:
    """Return the lock that whoever runs something in a run directory holds."""
    return Lock(run_dir / RUN_LOCK)


def claim(lock: Lock, run_dir: Path) -> None:
    """Make a run directory one's own.

    Raises:
        PbflError: if it cannot be made.
        RunRefused: if another process has it.
    """
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=CLAIM_SECONDS)
        except Timeout:  # an OSError, too
            raise RunRefused(f"run-dir = '{run_dir}' is in use by another run") from None


def abandoned(run_dir: Path) -> bool:
    """Whether somebody has worked here and nobody does any more; False wherever that is not certain.

    Known on Linux alone, and on file systems of the machine itself.
    """
    if not sys.platform.startswith("linux") or _kind_of_file_system(run_dir) not in LOCAL:
        return False
    locks = [lock for name in (RUN_LOCK, SERVER_LOCK) if (lock := run_dir / name).is_file()]
    if not locks or not all(map(_free, locks)):
        return False
    time.sleep(SECOND_LOOK)
    return all(map(_free, locks))


def _free(lock: Path) -> bool:
    """Whether nobody holds a lock; False if that cannot be found out."""
    import fcntl  # not there on Windows

    with suppress(OSError):  # somebody has it, or it is not ours to read, or it is gone
        file = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        finally:
            os.close(file)  # and with it the lock
    return False


def _kind_of_file_system(path: Path) -> str:
    """Return the type of the file system on which a path lies, or nothing."""
    place, kind, longest = os.path.realpath(path), "", -1
    with suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            words = before.split(" ")
            if len(words) < 5 or not after:
                continue
            mount = words[4].replace("\\040", " ")
            inside = place == mount or place.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= longest:  # of two at one place the later one is seen
                kind, longest = after.split(" ")[0], len(mount)
    return kind
