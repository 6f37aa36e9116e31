"""The channel to a worker: large strings through memory are the same bytes, and leave nothing behind."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from pbfl_flwr.flower.engines.channel import LARGE, Channel, channel

needs_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = channel()
    yield ours, theirs
    ours.close()
    theirs.close()


def size_of_memory(end: Channel) -> int:
    return 0 if end._memory is None else os.fstat(end._memory).st_size


def test_returns_the_same_objects_of_any_size(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    first, second = os.urandom(3 * LARGE), os.urandom(2 * LARGE + 1)
    for content in ([first, b"small", second], [second, first], first, [], [first, first], [first, second]):
        ours.send(content)
        assert theirs.receive() == content
        theirs.send([second, content])
        assert ours.receive() == [second, content]


@needs_memory
def test_only_large_strings_use_the_memory(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send([bytes(LARGE - 1)] * 3)
    theirs.receive()
    assert size_of_memory(ours) == 0
    ours.send(bytes(LARGE))
    theirs.receive()
    assert size_of_memory(ours) == LARGE


@needs_memory
def test_does_not_copy_the_same_string_again(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    broadcast = os.urandom(LARGE)
    ours.send((0, broadcast))
    (_, first) = theirs.receive()
    theirs.send(bytes(2 * LARGE))  # overwrites it
    ours.receive()
    ours.send((1, broadcast))
    (_, second) = theirs.receive()
    assert second is first
    assert second == broadcast


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), 5])
@needs_memory
def test_without_room_in_memory_strings_go_through_the_pipe(
    error: OSError | int, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        if isinstance(error, int):
            return error  # wrote only a part
        raise error

    monkeypatch.setattr(os, "pwrite", full)
    ours, theirs = ends
    content = os.urandom(LARGE)
    with ThreadPoolExecutor(1) as other:
        received = other.submit(theirs.receive)  # the pipe does not hold all of it
        ours.send(content)
        assert received.result() == content


def answer_forever(parent: Channel) -> None:
    while True:
        parent.send(parent.receive())


@needs_memory
@pytest.mark.slow
def test_memory_is_freed_when_the_child_was_killed() -> None:
    before = memory_files()
    ours, theirs = channel()
    process = get_context("spawn").Process(target=answer_forever, args=(theirs,), daemon=True)
    process.start()
    del theirs
    content = os.urandom(5 * LARGE)
    ours.send(content)
    assert ours.receive() == content
    process.kill()
    process.join()
    ours.close()
    del ours
    assert memory_files() == before


def memory_files() -> int:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("memfd:pbfl" in os.readlink(link) for link in links if os.path.islink(link))
