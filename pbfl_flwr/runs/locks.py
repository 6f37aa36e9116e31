"""Locks of run directories, and whether a process still uses one.

``pbfl run`` and ``pbfl deploy local`` hold RUN_LOCK from start to end; every server holds SERVER_LOCK from before its
first message. Checking a lock holds it in shared mode for an instant, for which :func:`claim` waits.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from filelock import Timeout

from pbfl_flwr.errors import writing
from pbfl_flwr.runs.directory import SERVER_LOCK, RunRefused
from pbfl_flwr.util.atomic_files import make_directory
from pbfl_flwr.util.locks import Lock

RUN_LOCK = ".lock"
CLAIM_SECONDS = 0.3  # a process that checks the lock holds it for an instant


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
        make_directory(run_dir)
        try:
            lock.acquire(timeout=CLAIM_SECONDS)
        except Timeout:  # a subclass of OSError
            raise RunRefused(f"run-dir = '{run_dir}' is in use by another run") from None


def was_used(run_dir: Path) -> bool:
    """Whether a process works on a run directory or has done so."""
    return any((run_dir / name).is_file() for name in (RUN_LOCK, SERVER_LOCK))


def in_use(run_dir: Path) -> bool:
    """Whether a process works on a run directory: it holds one of the locks, or one cannot be checked."""
    return not all(_free(lock) for name in (RUN_LOCK, SERVER_LOCK) if (lock := run_dir / name).is_file())


def _free(lock: Path) -> bool:
    """Whether a lock is free; False if that cannot be determined."""
    with suppress(OSError, ImportError):  # held, not readable, removed; Windows has no fcntl
        import fcntl

        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        finally:
            os.close(file)  # releases the lock
    return False
