"""Class tables encoded as vectors whose sum can be computed by secure aggregation.

A client's table becomes one vector: its K·w row entries with zeros for absent classes, K presence bits, and n_i. The
sum over clients gives Σ rows, |N_j| and Σ n_i, which is all that the rules mean, PPA and APS need.

Fixed point. Secure aggregation adds integers modulo 2^32. With M clients each may use b = 31 - ⌈log2 M⌉ bits, and
an entry within ±R is rounded stochastically to one of the two neighbours on a grid of step 2R/2^b. So a sum of M
entries is unbiased, has an error below M·2R/2^b and a standard deviation of at most √M·R/2^b. Presence bits and
their sums are exact. Entries beyond R are clipped, and the client reports how many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pbfl_flwr.payloads import Prototypes, RejectedPayload

MOST_SAMPLES = 2**20  # of a client; encoded as the end of the range
MOST_CLIENTS = 2**12  # more would leave fewer than 19 bits per entry

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Total:
    """What the server learns in a round.

    Attributes:
        rows: (K, w) sum of the rows.
        holders: (K,) int64 |N_j|.
        num_examples: Σ n_i, 0 if uploads have none.
        clients: number of summed vectors.
    """

    rows: torch.Tensor
    holders: torch.Tensor
    num_examples: int
    clients: int


def bits(num_clients: int) -> int:
    """Return b, the bits of an entry with which the sum over M clients stays below 2^31."""
    return 31 - max(1, math.ceil(math.log2(num_clients)))


def step(bound: float, num_clients: int) -> float:
    """Return 2R/2^b, the grid to which every client's entry is rounded."""
    return 2.0 * bound / float(2 ** bits(num_clients))


def to_vector(upload: Prototypes, bound: float) -> tuple[Vector, int]:
    """Return the vector (K·w + K + 1,), and the number of clipped values: rows to ±R, n_i to MOST_SAMPLES."""
    rows = torch.where(upload.present[:, None], upload.values, torch.zeros_like(upload.values)).double()
    clipped = rows.clamp(-bound, bound)
    n = upload.num_examples or 0
    last = torch.tensor([min(n, MOST_SAMPLES) / MOST_SAMPLES * bound], dtype=torch.float64)
    vector = torch.cat([clipped.flatten(), upload.present.double() * bound, last])
    return vector.numpy(), int((clipped != rows).sum()) + (n > MOST_SAMPLES)


def from_vector(total: Vector, num_classes: int, clients: int, bound: float) -> Total:
    """Decode a sum of vectors.

    Args:
        total: (K·(w + 1) + 1,), sum of vectors from :func:`to_vector`.
        num_classes: K.
        clients: number of summed vectors.
        bound: R.

    Raises:
        RejectedPayload: if its length or presence bits are impossible, which makes the whole sum invalid.
    """
    K = num_classes
    width, rest = divmod(len(total) - K - 1, K)
    if rest or width < 1:
        raise RejectedPayload(f"a sum of {len(total)} numbers is not a table of {K} classes")
    bits_sum = total[K * width : -1] / bound
    holders = np.rint(bits_sum)
    if np.abs(bits_sum - holders).max() > 0.01 or holders.min() < 0 or holders.max() > clients:
        raise RejectedPayload(
            "the sum's presence entries are not counts of clients: the masks did not cancel"
        )
    rows = torch.from_numpy(total[: K * width].reshape(K, width).copy())
    n = round(float(total[-1]) / bound * MOST_SAMPLES)
    return Total(rows, torch.from_numpy(holders.astype(np.int64)), max(n, 0), clients)
