"""Devices with names and data of their own, in a federation of real messages."""

from pathlib import Path
from typing import Any

import numpy as np

from pbfl_flwr.config import Scalar
from tests.flower.inprocess import Federation, federation


def write_site(folder: Path, seed: int, samples: int = 24) -> Path:
    """An .npz of three classes of bright and dark squares."""
    rng = np.random.default_rng(seed)
    y = np.arange(samples) % 3
    x = rng.integers(0, 60, (samples, 16, 16)) + 60 * y[:, None, None]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", x=x.astype(np.uint8), y=y)
    return folder / "data.npz"


def sites(tmp_path: Path, *names: str | int) -> list[dict[str, Scalar]]:
    return [
        {
            "client-id": name,
            "data-path": str(write_site(tmp_path / str(name), sum(map(ord, str(name))))),
            "state-dir": str(tmp_path / "state"),
        }
        for name in names
    ]


def run(tmp_path: Path, nodes: list[dict[str, Scalar]], place: str = "run", **keys: Any) -> Federation:
    base: dict[str, Any] = {"models": "cnn4", "num_clients": len(nodes), "run_dir": str(tmp_path / place)}
    return federation(
        tmp_path,
        on_disk=True,
        node_configs=nodes,
        partitions=range(len(nodes)),
        **{"data": None, **base, **keys},
    )
