"""Memory that stays with the process, seen from outside: the pages that the system has to hand out again."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from pbfl_flwr.training.allocator import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "kept" else None)
np.ones(2**21)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**21)  # 16 MiB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    message, count = done.stdout.split()
    return message, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_blocks_are_used_again_without_new_pages() -> None:
    message, kept = faults("kept")
    assert message == "True"
    # Twenty blocks of 16 MiB are 81,920 pages of 4 KiB, or 160 of 2 MiB.
    assert kept < 20
    assert faults("left")[1] >= 160


def test_elsewhere_nothing_is_changed_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from pbfl_flwr.training.allocator import keep_freed_memory

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert keep_freed_memory.__wrapped__() is False
