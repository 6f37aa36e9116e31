"""A client's shards as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pbfl_flwr.data.contract import ClientData, Pool, Rows, Shard, Split


def materialise(pool: Pool, split: Split) -> ClientData:
    """Return one client's data as contiguous tensors.

    Rows that lie next to each other in the pool (a source with fixed clients) are not copied: the tensor is a
    view of the memory map, shared with other processes until somebody writes to it.
    """
    scale, shift = pool.affine()
    return ClientData(
        train=_shard(pool, split.train),
        test=_shard(pool, split.test),
        num_classes=pool.num_classes,
        label_names=pool.label_names,
        scale=scale,
        shift=shift,
    )


def _shard(pool: Pool, rows: Rows) -> Shard:
    return Shard(torch.from_numpy(_take(pool.inputs, rows)), torch.from_numpy(pool.labels[rows]))


def _take(inputs: NDArray[Any], rows: Rows) -> NDArray[Any]:
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return inputs[rows[0] : rows[0] + len(rows)]
    return np.ascontiguousarray(inputs[rows])
