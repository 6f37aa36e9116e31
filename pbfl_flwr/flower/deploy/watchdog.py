"""Ends process groups when the process that started them has ended, for whatever reason.

Run as a script. It reads group ids from its standard input, one per line, with a minus sign for groups that have been
ended. If the input ends without the line "done", because the parent was killed, it ends the groups and removes the
directories given as arguments. Flower's and Ray's own detection of a dead parent leaves the simulation running.
It uses only the standard library, so that it starts fast and from anywhere.
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
    """End all processes of a group with SIGTERM, and after ten seconds with SIGKILL.

    ``reap`` is called repeatedly and must collect the leader's exit status, otherwise the group continues to exist.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + GRACE_SECONDS
        signalled = False
        while time.monotonic() < end:
            reap()
            try:
                os.killpg(group, 0 if signalled else number)
            except ProcessLookupError:
                return
            signalled = True
            time.sleep(0.1)


def main() -> None:
    """Wait for the end of the standard input, ignoring signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # clusters signal every process of a job
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        if (group := int(line)) > 0:
            groups.append(group)
        elif -group in groups:
            groups.remove(-group)
    for group in reversed(groups):
        end_group(group)
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
