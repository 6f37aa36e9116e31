"""Locks on files that the system ends with their holder, however that ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

NONE_HERE = "its file system has no file locks, as Lustre mounted without flock; choose another one"


class Lock(FileLock):
    """A file lock, refused where the file system has none.

    There the library would take the file's being there for the lock. That outlasts a killed holder, and a job that goes
    on with the run on another machine would wait for ever.
    """

    def acquire(self, *arguments: Any, **named: Any) -> Any:
        """Take the lock, as :meth:`filelock.FileLock.acquire`.

        Raises:
            OSError: if the file cannot be made, or its file system has no locks.
            Timeout: if somebody else has it for too long.
        """
        need_locks(Path(self.lock_file))
        return super().acquire(*arguments, **named)


def need_locks(file: Path) -> None:
    """Make a lock's file if it is not there, and ask its file system for locks.

    Raises:
        OSError: if the file cannot be made, or its file system has no locks.
    """
    # Not touched: pbfl clean goes by the newest file.
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        if os.name != "posix":
            return
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)  # gives nothing back: this is a descriptor of its own
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise OSError(error.errno, NONE_HERE, str(file)) from None
        raise
    finally:
        os.close(descriptor)
