"""What a benchmark ran on, printed and written down the same way by all of them."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

NO_CARD = "no CUDA device here: nothing is measured"


def about(threads: object) -> dict[str, Any]:
    """Return versions, processor and cores, threads, card."""
    return {
        **{name: version(name) for name in ("torch", "flwr", "numpy")},
        "python": platform.python_version(),
        "processor": f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": threads,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def introduce(threads: object) -> None:
    """Print it, one line above the table."""
    print(", ".join(f"{name} {value}" for name, value in about(threads).items()), flush=True)


def write(path: Path | None, threads: object, **figures: Any) -> None:
    """Write figures as JSON beside what they were measured on; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({**about(threads), **figures}, indent=1) + "\n")


def card_options(share: float) -> list[str] | None:
    """Return what has ``pbfl run`` train on the card, ``share`` of it for a worker; None if there is none."""
    if not share:
        return []
    if not torch.cuda.is_available():
        return None
    return ["--gpus-per-client", str(share), "--set", "device=cuda"]
