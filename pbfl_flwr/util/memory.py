"""Available memory of the machine, and peak memory of this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import resource


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the available memory in bytes: Linux's estimate, which includes reclaimable caches, or what cgroups leave.

    The limits of this process's cgroup and of those above it count, of either version. None: unknown (not Linux).

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
    return min([available, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each memory limit leaves; in a container, paths may be those of the host and not exist."""
    mount = root / "sys/fs/cgroup"
    places = [(mount, "memory.max", "memory.current", "inactive_file")]
    # Of version 1:
    places.append((mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    groups = root / "proc/self/cgroup"
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.exists() else []
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for (top, limit, used, cache), controllers in zip(places, ("", "memory"), strict=True):
        own = top / paths.get(controllers, "/").strip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(top):
                break
            with suppress(OSError, ValueError):  # there is none, or it is "max"
                most = int((group / limit).read_text(encoding="utf-8"))
                left = most - int((group / used).read_text(encoding="utf-8"))
                with suppress(OSError, KeyError, ValueError):
                    stat = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
                    left += int(dict(line.split() for line in stat)[cache])  # which the kernel gives up first
                yield max(0, left)


def peak_memory() -> float:
    """Return the peak resident memory of this process in MB, 0 if unknown (Windows)."""
    if sys.platform == "win32":
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)
