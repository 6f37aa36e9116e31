"""Seeds are a function of what they are for, never of who asked first.

Every random choice (weights, batches, sampling, masks) takes its seed from the run's seed and the names and
numbers that describe it, so the same run gives the same bits with one worker or with many.
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
    """Return a 63-bit seed from what the randomness is for, e.g. ``derive(seed, "batches", client, round)``."""
    # A NumPy integer is written as the number that it is; a float would be a seed by accident.
    plain = tuple(part if isinstance(part, str) else operator.index(part) for part in parts)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a torch CPU generator seeded by :func:`derive`."""
    import torch

    return torch.Generator().manual_seed(derive(*parts))


def seed_layers(device: torch.device, *parts: int | str) -> None:
    """Seed what layers draw from while they train (dropout), on the CPU and on this device, by :func:`derive`.

    The numbers are those of ``torch.manual_seed``, which on a machine without a GPU formats the stack once for each
    kind of GPU that there might be.
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
    """Have torch draw from this seed on the CPU, for layers that draw their weights when they are built.

    Its global random state is as before afterwards, that of every GPU untouched.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        yield
