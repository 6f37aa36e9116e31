"""Pipe to a worker process whose large byte strings, such as the weights of a network, go through shared memory."""

from __future__ import annotations

import os
import pickle
import weakref
from io import BytesIO
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection
from typing import Any

LARGE = 2**16  # bytes from which a string goes through the memory: as much as a pipe takes at once
LARGEST = 2**30  # bytes up to which it does; one system call moves less than 2**31


class Channel:
    """One end of a pipe on which objects are sent and answered in turn.

    The memory is an anonymous file (Linux's memfd), which the system frees once both processes have ended, however they
    end. Where there is none, or no room in it, everything goes through the pipe. If a string was the last one sent, as
    that of a broadcast is for most clients, it is not sent again.

    Args:
        pipe: this process's end.
        memory: descriptor of the anonymous file, of this end only; None if there is none.
    """

    def __init__(self, pipe: Connection, memory: int | None) -> None:
        self._pipe, self._memory = pipe, memory
        self._last_sent = self._last_received = b""
        if memory is not None:
            weakref.finalize(self, os.close, memory)  # not in close, since another thread may be reading

    def __reduce__(self) -> tuple[Any, ...]:
        memory = None if self._memory is None else reduction.DupFd(self._memory)
        return _in_child, (self._pipe, memory)

    def send(self, content: object) -> None:
        """Send an object, once the other end has received the one before.

        Raises:
            OSError: if the other process has ended.
        """
        stream = BytesIO()
        pickler = _Pickler(stream, self._memory, self._last_sent)
        pickler.dump(content)
        self._pipe.send_bytes(stream.getbuffer())
        self._last_sent = pickler.last

    def receive(self) -> Any:
        """Return the next object.

        Raises:
            EOFError: if the other process has ended; sometimes OSError.
        """
        unpickler = _Unpickler(BytesIO(self._pipe.recv_bytes()), self._memory, self._last_received)
        content = unpickler.load()
        self._last_received = unpickler.last
        return content

    def close(self) -> None:
        """Close this end of the pipe."""
        self._pipe.close()


def channel() -> tuple[Channel, Channel]:
    """Return both ends; the second one is for a process that is started with it as an argument."""
    ours, theirs = get_context("spawn").Pipe()
    if not hasattr(os, "memfd_create"):
        return Channel(ours, None), Channel(theirs, None)
    memory = os.memfd_create("pbfl")
    return Channel(ours, memory), Channel(theirs, os.dup(memory))


def _in_child(pipe: Connection, memory: Any) -> Channel:
    return Channel(pipe, None if memory is None else memory.detach())


class _Pickler(pickle.Pickler):
    """Writes large strings to the memory, one after the other, and refers to them by (start, size)."""

    def __init__(self, stream: BytesIO, memory: int | None, last: bytes) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._memory, self._end, self.last = memory, 0, last

    def persistent_id(self, value: object) -> tuple[int, int] | None:
        if type(value) is not bytes or not LARGE <= len(value) <= LARGEST or self._memory is None:
            return None
        if value is self.last:
            return 0, 0
        try:
            if os.pwrite(self._memory, value, self._end) < len(value):
                return None
        except OSError:  # no room
            return None
        self.last, self._end = value, self._end + len(value)
        return self._end - len(value), len(value)


class _Unpickler(pickle.Unpickler):
    """Reads what :class:`_Pickler` has written."""

    def __init__(self, stream: BytesIO, memory: int | None, last: bytes) -> None:
        super().__init__(stream)
        self._memory, self.last = memory, last

    def persistent_load(self, reference: tuple[int, int]) -> bytes:
        start, size = reference
        if size and self._memory is not None:
            self.last = os.pread(self._memory, size, start)
        return self.last
