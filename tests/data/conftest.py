"""Every test has its own home, and small files of the formats that are read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pbfl_flwr.data.contract import Pool


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home"
    monkeypatch.setenv("PBFL_HOME", str(place))
    return place


@pytest.fixture
def write_idx() -> Callable[[Path, np.ndarray], None]:
    """The format of yann.lecun.com: 0, 0, type 8 (uint8), number of axes, sizes as big-endian int32, bytes."""

    def write(path: Path, values: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">i4").tobytes()
        path.write_bytes(header + values.astype(np.uint8).tobytes())

    return write


@pytest.fixture
def write_image() -> Callable[..., None]:
    def write(path: Path, colour: tuple[int, int, int] | int, size: tuple[int, int] = (8, 8)) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB" if isinstance(colour, tuple) else "L", size, colour).save(path)

    return write


@pytest.fixture
def pool_of() -> Callable[..., Pool]:
    """A pool from class counts; every input is its own row number, so that a sample can be followed."""

    def make(
        counts: list[int], test_counts: list[int] | None = None, owner: np.ndarray | None = None
    ) -> Pool:
        train = np.repeat(np.arange(len(counts)), counts)
        test = np.repeat(np.arange(len(counts)), test_counts or [0] * len(counts))
        labels = np.concatenate([train, test]).astype(np.int64)
        inputs = np.arange(len(labels), dtype=np.float32)[:, None]
        return Pool(inputs, labels, tuple(str(k) for k in range(len(counts))), len(train), owner)

    return make
