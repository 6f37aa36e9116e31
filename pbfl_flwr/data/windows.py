"""Whether the axes of sensor windows, and of pictures as numbers, are in the right order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.contract import Pool

ROUGH = (
    4.0  # times smoother in another order: UCI HAR is 27 and 29 times where axes were mixed up, 0.1 where not
)
SHORTEST_SERIES = 16


def mixed_up(pool: Pool) -> str:
    """Return what to say of inputs whose axes look mixed up; empty where nothing is to be said.

    Those are windows (C, L) that change more from reading to reading than in another order of axes, and numbers
    (H, W, C) of pictures, as Keras has them.
    """
    if pool.inputs.dtype == np.float32 and len(pool.input_shape) == 3:
        height, width, channels = pool.input_shape
        if min(height, width) > 4 and (channels in (3, 4) or (channels == 1 and height == width)):
            return (
                f"inputs are read as (channels, height, width), {height} channels of {width}x{channels}: if the "
                "channels stand last, they are to be moved, x.transpose(0, 3, 1, 2)"
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
        f"inputs are read as windows (channels, length), {channels} of {length} readings, and neighbouring readings "
        f"are far less alike than in {remedy}: were times and channels mixed up?"
    )
