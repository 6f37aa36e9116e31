"""Detect swapped axes of sensor windows, and of images stored as floats."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.contract import Pool

# Ratio of roughness to that in another axis order; on UCI HAR 27 and 29 with swapped axes, 0.1 with correct ones.
ROUGH = 4.0
SHORTEST_SERIES = 16


def mixed_up(pool: Pool) -> str:
    """Return a warning if the axes of the inputs look swapped, else an empty string.

    It is given for windows (C, L) whose neighbouring readings differ more than in another axis order, and for float
    images (H, W, C), as in Keras.
    """
    if pool.inputs.dtype == np.float32 and len(pool.input_shape) == 3:
        height, width, channels = pool.input_shape
        if min(height, width) > 4 and (channels in (3, 4) or (channels == 1 and height == width)):
            return (
                f"inputs are read as (channels, height, width), {height} channels of {width}x{channels}: if the "
                "channels are last, move them to the front with x.transpose(0, 3, 1, 2)"
            )
    shape = tuple(side for side in pool.input_shape if side != 1)
    if pool.inputs.dtype != np.float32 or len(shape) != 2 or max(shape) < SHORTEST_SERIES:
        return ""
    windows = pool.inputs[:: max(1, len(pool.inputs) // 256)].reshape(-1, *shape)
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
        f"inputs are read as windows (channels, length), {channels} of {length} readings, but neighbouring readings "
        f"differ far more than in {remedy}: were time and channel axes mixed up?"
    )
