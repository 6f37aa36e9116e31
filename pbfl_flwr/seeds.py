"""Seeds depend only on what they are used for, never on the order of use.

The seed of every random choice (weights, batches, sampling, masks) is derived from the run's seed and from the names
and numbers that describe the choice, so that a run gives the same bits with one worker or with many.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
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


def seed_layers(device: torch.device, *parts: int | str) -> None:
    """Seed the generators used by layers in training (dropout), on the CPU and on this device, by :func:`derive`.

    Equivalent to ``torch.manual_seed``, which on a machine without a GPU formats a stack trace for each kind of GPU
    that torch supports.
    """
    import torch

    seed = derive(*parts)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within the context, for layers that draw their weights when they are built.

    Afterwards the global random state is restored; the generators of GPUs are not touched.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        yield
