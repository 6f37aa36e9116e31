"""A partition by a user's function, named in the configuration as ``my_package.module:split``."""

from __future__ import annotations

from collections.abc import Iterable, Sized

import numpy as np

from pbfl_flwr import seeds
from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.contract import Rows
from pbfl_flwr.data.partition.procedures import Assignment
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.user_code import call_user_function


def function_indices(labels: Rows, num_clients: int, settings: DataSettings) -> Assignment:
    """Deal the rows by the function that ``partition`` names, and check its result.

    It gets the labels (N,) 0..K-1, M and a NumPy generator of ``partition-seed``, and returns M lists or arrays of
    different whole numbers 0..N-1. Samples that it leaves out go to no client. The global generators are seeded, too.

    Raises:
        PbflError: if the function may not be imported here, raises, or returns anything else, or a client has fewer
            than ``min-samples``.
    """
    spec, seed = settings.partition, settings.partition_seed
    arguments = (labels.copy(), num_clients, np.random.default_rng(seed))
    with seeds.seeded(seeds.derive(seed, "partition")):
        result = call_user_function(
            "partition", spec, "labels, num_clients, generator", *arguments, kind=object
        )
    hands = _hands(result, num_clients, spec)
    for client, rows in enumerate(hands):
        if len(rows) < settings.min_samples:
            raise PbflError(
                f"partition = '{spec}': client {client} gets {len(rows)} samples; must be min-samples = "
                f"{settings.min_samples} or more"
            )
    dealt = np.concatenate(hands)
    if len(outside := dealt[(dealt < 0) | (dealt >= len(labels))]):
        raise PbflError(
            f"partition = '{spec}': it deals the index {outside[0]}; must be 0..{len(labels) - 1}"
        )
    times = np.bincount(dealt, minlength=len(labels))
    most = int(times.argmax())
    if times[most] > 1:
        holders = [str(client) for client, rows in enumerate(hands) if most in rows]
        raise PbflError(
            f"partition = '{spec}': it deals the index {most} {times[most]} times, to client {', '.join(holders)}; "
            "must be once at most"
        )
    left = int((times == 0).sum())
    return Assignment(hands, (f"{left:,} of {len(labels):,} samples go to no client",) if left else ())


def _hands(result: object, num_clients: int, spec: str) -> tuple[Rows, ...]:
    """Return every client's indices as arrays."""
    try:
        hands = [np.asarray(rows) for rows in result] if isinstance(result, Iterable) else []
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths; a tensor on a GPU
        hands = []
    wrong = [
        f" with {rows.dtype} {rows.shape} for client {client}"
        for client, rows in enumerate(hands)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu")
    ]
    if len(hands) != num_clients or wrong:
        raise PbflError(
            f"partition = '{spec}': the function returned {_shown(result)}{''.join(wrong[:1])}, expected {num_clients} "
            "lists or arrays of indices, whole numbers, one for each client"
        )
    return tuple(rows.astype(np.int64) for rows in hands)


def _shown(result: object) -> str:
    kind = type(result).__name__
    return f"{kind} of length {len(result)}" if isinstance(result, Sized) else kind
