"""One client's data as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.contract import ClientData, Pool, Rows, Shard, Split


def materialise(pool: Pool, split: Split, validation_share: float = 0.0, seed: int = 0) -> ClientData:
    """Return one client's data as contiguous tensors.

    Args:
        pool: all samples.
        split: this client's rows.
        validation_share: share of the training rows that is held out at random, rounded down.
        seed: seed of that draw.

    Rows that are contiguous in the pool (a source with fixed clients) are not copied: the tensor is a view of the
    memory map, shared with other processes until it is written to.
    """
    scale, shift = pool.affine()
    train, held_out = hold_out(split.train, validation_share, seed)
    return ClientData(
        train=_shard(pool, train),
        test=_shard(pool, split.test),
        num_classes=pool.num_classes,
        label_names=pool.label_names,
        scale=scale,
        shift=shift,
        validation=_shard(pool, held_out) if len(held_out) else None,
        columns=pool.columns,
        vocabulary=pool.vocabulary,
    )


def hold_out(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Return (remaining training rows, held-out rows), both in their original order."""
    chosen = np.zeros(len(rows), dtype=bool)
    generator = np.random.default_rng(seed)
    chosen[generator.permutation(len(rows))[: int(share * len(rows))]] = True
    return rows[~chosen], rows[chosen]


def _shard(pool: Pool, rows: Rows) -> Shard:
    import torch

    return Shard(torch.from_numpy(_take(pool.inputs, rows)), torch.from_numpy(pool.labels[rows]))


def _take(inputs: NDArray[Any], rows: Rows) -> NDArray[Any]:
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return inputs[rows[0] : rows[0] + len(rows)]
    return np.ascontiguousarray(inputs[rows])
