"""Ends process groups when the process that started them is gone, however it went.

Run as a script: it reads the groups' numbers from its standard input, a line each, those that were ended with a minus
before them. When the input ends without the
line "done", which is what happens when the other end was killed, it ends the groups and removes the directories given
as arguments. Flower's and Ray's own ways of noticing a dead parent leave the simulation running for ever.
The standard library only: it must start in an instant and from anywhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable

GRACE_SECONDS = 10.0


def end_group(group: int, reap: Callable[[], object] = lambda: None) -> None:
    """End all processes of a group: politely, and after ten seconds for certain.

    Args:
        group: its number, the process id of its leader.
        reap: called again and again; it takes the leader's exit status, without which the group does not vanish.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + GRACE_SECONDS
        sent = False
        while time.monotonic() < end:
            reap()
            try:
                os.killpg(group, 0 if sent else number)
            except ProcessLookupError:
                return
            sent = True
            time.sleep(0.1)


def main() -> None:
    """Wait for the end of the standard input, whatever else one is told."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a cluster signals every process of a job
        signal.signal(ending, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        if (number := int(line)) > 0:
            groups.append(number)
        elif -number in groups:
            groups.remove(-number)
    for group in reversed(groups):
        end_group(group)
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
