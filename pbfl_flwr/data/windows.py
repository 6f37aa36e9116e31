"""Windows of sensor readings: whether times and channels are where they should be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUGH = (
    4.0  # times smoother in another order: UCI HAR is 27 and 29 times with axes mixed up, 0.1 times without
)
SHORTEST_SERIES = 16
LOOKED_AT = 256  # windows


def mixed_up(inputs: NDArray[Any]) -> str:
    """Return what to say of windows that change more from reading to reading than in another order of axes.

    Args:
        inputs: (N, C, L) or (N, C, 1, L); nothing is said of inputs of other shapes, or of few readings.
    """
    shape = tuple(side for side in inputs.shape[1:] if side != 1)
    if len(shape) != 2 or max(shape) < SHORTEST_SERIES:
        return ""
    windows = inputs[:: max(1, len(inputs) // LOOKED_AT)].reshape(-1, *shape)
    channels, length = shape

    def change(readings: NDArray[Any], axis: int) -> float:
        return float(np.square(np.diff(readings, axis=axis)).mean())

    other = {
        "x.transpose(0, 2, 1)": change(windows, 1),
        f"x.reshape(-1, {length}, {channels}).transpose(0, 2, 1)": change(
            windows.reshape(-1, length, channels), 1
        ),
    }
    remedy = min(other, key=lambda order: other[order])
    if change(windows, 2) <= ROUGH * other[remedy]:
        return ""
    return (
        f"inputs are read as windows (channels, length), {channels} of {length} readings, and neighbouring readings "
        f"are far less alike than in {remedy}: were times and channels mixed up?"
    )
