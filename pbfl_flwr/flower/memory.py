"""How much memory programs can still get."""

from __future__ import annotations

from pathlib import Path


def available_memory(root: Path = Path("/")) -> int | None:
    """Return bytes: Linux's own estimate, which counts caches that can be dropped, and the control group's limit.

    None where the system does not say (not Linux).

    Args:
        root: below which proc and sys are looked for.
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
    if limit.exists() and used.exists() and (most := limit.read_text(encoding="utf-8").strip()) != "max":
        available = min(available, max(0, int(most) - int(used.read_text(encoding="utf-8"))))
    return available
