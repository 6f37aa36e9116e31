"""The n-way k-shot partition of FedProto and GFPL: every client has a few classes and a few samples of each.

Ways n_i ~ U[max(2, w̄-ŵ), min(K-1, w̄+ŵ)] (K if w̄ = K and ŵ = 0), shots k_i ~ U[s̄-ŝ+1, s̄+ŝ], one integer per client,
classes without replacement: with the same seed the same calls, and so the same tables of ways, shots and classes, as
yuetan031/FedProto, whose MNIST has the shots U[s̄-ŝ+1, s̄+ŝ-2] and 40 test samples per class: 99 ± 1 and test-shots = 40
for its 100 ± 2. Training samples come from the official training part, test samples (``test_shots`` per class, or as
many as possible) from the official test part. Client i's samples of a class are the block at i·110 of the class's rows
(at i·(s̄+ŝ) if that is more; of test samples at i·test_shots); where the class is too small for that, its holders get
consecutive pieces of the shuffled rows instead. Blocks never overlap. Without an official test part, each class is cut
into the training share and the rest.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.contract import Pool, Rows, Split
from pbfl_flwr.errors import PbflError

BLOCK = 110  # FedProto's train_shots_max


def way_shot_splits(
    pool: Pool, settings: DataSettings, num_clients: int
) -> tuple[tuple[Split, ...], tuple[str, ...]]:
    """Return the splits of M clients, and notes.

    Raises:
        PbflError: if ways or shots are impossible, or if a class has too few training samples for its
            clients.
    """
    rng = RandomState(settings.partition_seed)
    ways, shots = draw_ways_and_shots(settings, pool.num_classes, num_clients, rng)
    choose = random.Random(settings.partition_seed)
    classes = [sorted(choose.sample(range(pool.num_classes), int(n))) for n in ways]
    train: list[list[Rows]] = [[] for _ in range(num_clients)]
    test: list[list[Rows]] = [[] for _ in range(num_clients)]
    notes: list[str] = []
    block = max(BLOCK, settings.shots + settings.shots_deviation)
    for k in range(pool.num_classes):
        holders = [client for client in range(num_clients) if k in classes[client]]
        if not holders:
            continue
        train_rows, test_rows = _rows_of_class(pool, settings, k)
        sizes = [int(shots[client]) for client in holders]
        if sum(sizes) > len(train_rows):
            raise PbflError(
                f"shots = {settings.shots}, shots-deviation = {settings.shots_deviation}: class {k} has "
                f"{len(train_rows)} training samples, but its {len(holders)} clients need {sum(sizes)}; allowed "
                "are fewer shots, ways or clients"
            )
        for client, rows in zip(
            holders, _blocks(train_rows, holders, sizes, block, num_clients, rng), strict=True
        ):
            train[client].append(rows)
        test_shots = min(settings.test_shots, len(test_rows) // len(holders))
        if test_shots < settings.test_shots:
            notes.append(f"class {k}: {test_shots} test samples per client instead of {settings.test_shots}")
        test_sizes = [test_shots] * len(holders)
        for client, rows in zip(
            holders,
            _blocks(test_rows, holders, test_sizes, settings.test_shots, num_clients, rng),
            strict=True,
        ):
            test[client].append(rows)
    splits = tuple(Split(np.concatenate(a), np.concatenate(b)) for a, b in zip(train, test, strict=True))
    return splits, tuple(notes)


def draw_ways_and_shots(
    settings: DataSettings, num_classes: int, num_clients: int, rng: RandomState
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return n_i and k_i, each (M,); with deviation 0 every client has the mean.

    Raises:
        PbflError: if the mean number of ways is not in 2..K, or if shots could be 0.
    """
    if not 2 <= settings.ways <= num_classes:
        raise PbflError(
            f"ways = {settings.ways}; the dataset has {num_classes} classes, must be 2..{num_classes}"
        )
    if settings.shots_deviation > settings.shots:
        raise PbflError(f"shots-deviation = {settings.shots_deviation}; must be 0..{settings.shots} (shots)")
    low = max(2, settings.ways - settings.ways_deviation)
    # exclusive: at most K - 1 ways, as in FedProto's sampler, unless low = K
    high = min(num_classes, settings.ways + settings.ways_deviation + 1)
    ways = rng.randint(low, max(high, low + 1), num_clients)
    if settings.shots_deviation == 0:
        shots = rng.randint(settings.shots, settings.shots + 1, num_clients)
    else:
        first = settings.shots - settings.shots_deviation + 1
        shots = rng.randint(first, settings.shots + settings.shots_deviation + 1, num_clients)
    return ways.astype(np.int64), shots.astype(np.int64)


def _rows_of_class(pool: Pool, settings: DataSettings, k: int) -> tuple[Rows, Rows]:
    rows = np.flatnonzero(pool.labels == k)
    if pool.num_train < len(pool.labels):
        return rows[rows < pool.num_train], rows[rows >= pool.num_train]
    cut = int(settings.train_share * len(rows))
    return rows[:cut], rows[cut:]


def _blocks(
    rows: Rows, holders: list[int], sizes: list[int], block: int, num_clients: int, rng: RandomState
) -> list[Rows]:
    if num_clients * block <= len(rows):
        return [rows[client * block :][:size] for client, size in zip(holders, sizes, strict=True)]
    shuffled: Rows = rng.permutation(rows)
    return np.split(shuffled[: sum(sizes)], np.cumsum(sizes)[:-1])
