"""File systems without locks are rejected at once."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

from pbfl_flwr.errors import PbflError
from pbfl_flwr.runs.client_store import ClientStore
from pbfl_flwr.runs.locks import claim, lock_of
from pbfl_flwr.util.atomic_files import UnsavedState
from pbfl_flwr.util.locks import Lock

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_rejects_a_run_directory_without_locks(tmp_path: Path) -> None:
    with pytest.raises(PbflError, match=r"run cannot be written.*its file system has no file locks"):
        claim(lock_of(tmp_path / "run"), tmp_path / "run")


@pytest.mark.usefixtures("without_locks")
def test_rejects_client_state_that_cannot_be_locked(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients", "e1", 3, "cnn2")
    with pytest.raises(UnsavedState, match="has no file locks"), store.locked():
        pass


def test_names_the_state_directory_on_a_file_system_that_has_become_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's file is there and can be read."""
    store, real = ClientStore(tmp_path, "e1", 3, "cnn2"), os.open
    with store.locked():
        pass

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    with (
        pytest.raises(UnsavedState, match=r"^state-dir .* cannot be written \(Read-only file system\)$"),
        store.locked(),
    ):
        pass


def test_probing_for_locks_does_not_release_a_held_one(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock"), pytest.raises(Timeout):
        Lock(tmp_path / "lock").acquire(timeout=0.1)
    with Lock(tmp_path / "lock").acquire(timeout=0.1):
        pass
