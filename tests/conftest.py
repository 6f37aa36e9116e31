"""What every test relies on, and the order of the tests where several processes share them."""

import os
from itertools import groupby

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # when what is not wanted is gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin each process's share with slow tests, but one's: they wait for Flower while quick ones compute.

    pytest-xdist gives every process a contiguous share to begin with. A file's slow tests stay together, since they
    share a run.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    files = [list(tests) for _, tests in groupby(slow, key=lambda item: item.path)]
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for tests in sorted(files, key=len, reverse=True):
        min(shares[:-1], key=len).extend(tests)
    ordered: list[pytest.Item] = []
    for number, share in enumerate(shares, start=1):
        room = len(items) * number // processes - len(ordered) - len(share)
        ordered += share + quick[: max(0, room)]
        quick = quick[max(0, room) :]
    items[:] = ordered + quick
