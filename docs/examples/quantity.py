"""A partition outside of the package: all clients have the same classes, but not as many samples.

    PYTHONPATH=docs/examples pbfl run --set partition=quantity:split --set num-clients=10

"Quantity skew" of NIID-Bench (Li et al. 2022): the clients' shares are one draw of a Dirichlet distribution.
"""

import numpy as np
from numpy.typing import NDArray

BETA = 0.5
LEAST = 10
"""Samples that every client gets."""


def split(
    labels: NDArray[np.int64], num_clients: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return the indices of every client's samples."""
    shares = generator.dirichlet(np.full(num_clients, BETA))
    spare = len(labels) - num_clients * LEAST
    cuts = LEAST * np.arange(1, num_clients) + (shares.cumsum()[:-1] * spare).astype(int)
    return np.split(generator.permutation(len(labels)), cuts)
