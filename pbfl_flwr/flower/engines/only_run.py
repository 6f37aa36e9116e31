"""One run at a time in a process: torch's random state and threads, Flower's log and the environment have one owner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pbfl_flwr.errors import PbflError

_LOCK = threading.Lock()
_RUNNING: list[str] = []


@contextmanager
def only_run(name: str) -> Iterator[None]:
    """Make a run the only one of this process within the context.

    Args:
        name: of the run, for the message that another one gets.

    Raises:
        PbflError: if there is another one; names it.
    """
    with _LOCK:
        if _RUNNING:
            raise PbflError(
                f"'{name}': this process is in the run '{_RUNNING[0]}' already; must wait until that one has ended, or "
                "be started in a process of its own"
            )
        _RUNNING.append(name)
    try:
        yield
    finally:
        _RUNNING.clear()
