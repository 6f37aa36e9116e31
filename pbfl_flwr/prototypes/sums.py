"""Class tables as vectors that can be added without being seen, for secure aggregation.

A client's table becomes one vector: its K·w rows with zeros for absent classes, K presence bits, and n_i. The sum over
the clients gives Σ rows, |N_j| and Σ n_i, which is all that the rules mean, PPA and APS need.

Fixed point. Secure aggregation adds whole numbers modulo 2^32. With M clients each may use b = 31 - ⌈log2 M⌉ bits, and
an entry within ±R is rounded at random to one of its two neighbours on a grid of step 2R/2^b. So a sum of M entries is
right in expectation, wrong by less than M·2R/2^b, and has a standard deviation of at most √M·R/2^b. Presence bits and
their sums are exact. Entries beyond R are clipped, and the client says how many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pbfl_flwr.payloads import Prototypes, RejectedPayload

RULES = ("mean", "ppa", "aps-sum", "aps-mean")
RANGES = {
    "mean": 100.0,
    "ppa": 1e5,
    "aps-sum": 1e5,
    "aps-mean": 1e5,
}  # R, of class means and of sums of features
MOST_SAMPLES = 2**20  # of a client, at the end of the range of n_i
MOST_CLIENTS = 2**12  # more would leave less than 19 bits an entry

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Total:
    """What the server learns of a round.

    Attributes:
        rows: (K, w) Σ_i of the rows.
        holders: (K,) int64 |N_j|.
        num_examples: Σ n_i, 0 where uploads carry none.
        clients: how many were added.
    """

    rows: torch.Tensor
    holders: torch.Tensor
    num_examples: int
    clients: int


def bits(num_clients: int) -> int:
    """Return b, the bits of an entry, so that the sum of M stays below 2^31."""
    return 31 - max(1, math.ceil(math.log2(num_clients)))


def step(bound: float, num_clients: int) -> float:
    """Return 2R/2^b, the grid to which every client's entry is rounded."""
    return 2.0 * bound / float(2 ** bits(num_clients))


def to_vector(upload: Prototypes, bound: float) -> tuple[Vector, int]:
    """Return the vector (K·w + K + 1,), and how many entries were clipped: rows to ±R, n_i to MOST_SAMPLES."""
    rows = torch.where(upload.present[:, None], upload.values, torch.zeros_like(upload.values)).double()
    clipped = rows.clamp(-bound, bound)
    n = upload.num_examples or 0
    last = torch.tensor([min(n, MOST_SAMPLES) / MOST_SAMPLES * bound], dtype=torch.float64)
    vector = torch.cat([clipped.flatten(), upload.present.double() * bound, last])
    return vector.numpy(), int((clipped != rows).sum()) + (n > MOST_SAMPLES)


def from_vector(total: Vector, num_classes: int, clients: int, bound: float) -> Total:
    """Return what a sum of vectors stands for.

    Args:
        total: the sum of what :func:`to_vector` gives, K·(s + 1) + 1 numbers.
        num_classes: K.
        clients: how many vectors it is the sum of.
        bound: R.

    Raises:
        RejectedPayload: if its length or its presence bits are impossible; then no client's table was added right.
    """
    K = num_classes
    width, rest = divmod(len(total) - K - 1, K)
    if rest or width < 1:
        raise RejectedPayload(f"a sum of {len(total)} numbers is no table of {K} classes")
    bits_sum = total[K * width : -1] / bound
    holders = np.rint(bits_sum)
    if np.abs(bits_sum - holders).max() > 0.01 or holders.min() < 0 or holders.max() > clients:
        raise RejectedPayload("the sum's presence bits are no counts of clients: the masks did not cancel")
    rows = torch.from_numpy(total[: K * width].reshape(K, width).copy())
    n = round(float(total[-1]) / bound * MOST_SAMPLES)
    return Total(rows, torch.from_numpy(holders.astype(np.int64)), max(n, 0), clients)
