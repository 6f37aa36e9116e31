"""Describe the machine of a benchmark, in the same form for all of them."""

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
    """Return versions, processor and cores, threads, GPU."""
    return {
        **{name: version(name) for name in ("torch", "flwr", "numpy")},
        "python": platform.python_version(),
        "processor": f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": threads,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def introduce(threads: object) -> None:
    """Print the machine in one line."""
    print(", ".join(f"{name} {value}" for name, value in about(threads).items()), flush=True)


def write(path: Path | None, threads: object, **figures: Any) -> None:
    """Write results as JSON, with the machine they were measured on; without a path do nothing."""
    if path is not None:
        path.write_text(json.dumps({**about(threads), **figures}, indent=1) + "\n")


def card_options(share: float) -> list[str] | None:
    """Return options for ``pbfl run`` to train on the GPU, this share per worker ([] for 0); None without a GPU."""
    if not share:
        return []
    if not torch.cuda.is_available():
        return None
    return ["--gpus-per-client", str(share), "--set", "device=cuda"]
