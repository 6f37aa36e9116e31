"""Available memory of the machine, and peak memory of this process."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.platform != "win32":
    import resource


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the available memory in bytes: Linux's estimate, which includes reclaimable caches, or the cgroup's limit.

    None if it is unknown (not Linux).

    Args:
        root: directory that contains proc and sys.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text(encoding="utf-8"))))
    return available


def peak_memory() -> float:
    """Return the peak resident memory of this process in MB, 0 if unknown (Windows)."""
    if sys.platform == "win32":
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)
