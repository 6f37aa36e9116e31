"""Seeds depend only on what they are used for, never on the order of use.

The seed of every random choice (weights, batches, sampling, masks) is derived from the run's seed and from the names
and numbers that describe the choice, so that a run gives the same bits with one worker or with many.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed derived from a description of its use, e.g. ``derive(seed, "batches", client, round)``."""
    # NumPy integers become Python's, which have another repr; a float is rejected.
    values = tuple(part if isinstance(part, str) else operator.index(part) for part in parts)
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a torch CPU generator seeded by :func:`derive`."""
    import torch

    return torch.Generator().manual_seed(derive(*parts))


def seed_code(device: torch.device, *parts: int | str) -> None:
    """Seed every global generator that layers and users' code may draw from, by :func:`derive`.

    These are torch's on the CPU and on this device, NumPy's and Python's. For torch equivalent to
    ``torch.manual_seed``, which on a machine without a GPU formats a stack trace for each kind of GPU that torch
    supports.
    """
    import torch

    seed = derive(*parts)
    _seed_globals(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


@contextmanager
def restored(gpus: Iterable[int | torch.device] = ()) -> Iterator[None]:
    """Restore the global random states of torch (of these GPUs, too), NumPy and Python after the context."""
    import numpy as np
    import torch

    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=list(gpus)):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of the CPU within the context, for code that draws weights when it is built.

    These are torch's, NumPy's and Python's. Afterwards they are restored; the generators of GPUs are not touched.
    """
    with restored():
        _seed_globals(seed)
        yield


def _seed_globals(seed: int) -> None:
    import numpy as np
    import torch

    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
    np.random.seed(seed % 2**32)
    random.seed(seed)
