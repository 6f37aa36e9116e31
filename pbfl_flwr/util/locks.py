"""File locks that the operating system releases when their holder exits or is killed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

NONE_HERE = "its file system has no file locks (e.g. Lustre mounted without flock); choose another one"


class Lock(FileLock):
    """A file lock that refuses file systems without locks.

    On those, filelock falls back to treating the existence of the file as the lock. The file outlasts a killed holder,
    so that a job that resumes the run on another machine would wait for ever.
    """

    def acquire(self, *arguments: Any, **named: Any) -> Any:
        """Take the lock, as :meth:`filelock.FileLock.acquire`.

        Raises:
            OSError: if the file cannot be created, or its file system has no locks.
            Timeout: if another holder does not release it in time.
        """
        need_locks(Path(self.lock_file))
        return super().acquire(*arguments, **named)


def need_locks(file: Path) -> None:
    """Create a lock's file if it does not exist, and check that its file system has locks.

    Raises:
        OSError: if the file cannot be created or written, or its file system has no locks.
    """
    # As filelock: not on a read-only file system. A link could have it create a file elsewhere.
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        if os.name != "posix":
            return
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a probe: this descriptor holds no lock to release
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise OSError(error.errno, NONE_HERE, str(file)) from None
        raise
    finally:
        os.close(descriptor)
