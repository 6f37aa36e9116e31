"""Partition procedures: pure functions of labels and a random generator.

The Dirichlet and the pathological procedure reproduce those of PFLlib, HtFLlib and
regulationLee/{TinyProto,ProtoNorm} draw by draw: the same calls in the same order to NumPy's legacy generator
(``RandomState(seed)`` is the stream of ``numpy.random.seed(seed)``). Since a shuffle consumes randomness by length
only, the counts depend on the class counts alone. The last two repositories have two versions of ``separate_data``: the
one of ``generate_cifar10.py`` is PFLlib's, the other, which no script calls, also shuffles the pathological sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from random import Random
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from pbfl_flwr.data.contract import Rows, Split
from pbfl_flwr.errors import PbflError

MAX_TRIES = 100
"""Maximum number of Dirichlet draws when a client is too small (references: unlimited)."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """Row indices of every client, in the procedure's order, and notes on irregularities."""

    rows: tuple[Rows, ...]
    notes: tuple[str, ...] = ()


def dirichlet_indices(
    labels: NDArray[Any],
    num_clients: int,
    alpha: float,
    min_samples: int,
    rng: RandomState,
    num_classes: int,
) -> Assignment:
    """Distribute every class by its own Dirichlet(alpha) draw, excluding clients that hold N/M samples or more.

    Everything is redrawn, without reseeding, while the smallest client has fewer than ``min_samples``
    (regulationLee: 1; PFLlib: 40), at most ``MAX_TRIES`` times; the last draw is kept, for :func:`repair` to
    complete. Where the shares of all clients below N/M underflow (the references divide by zero), the
    whole class goes to the smallest client: the limit of alpha -> 0.
    """
    total = len(labels)
    for _ in range(MAX_TRIES):
        notes: list[str] = []
        hands: list[list[Rows]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients, dtype=np.int64)
        for k in range(num_classes):
            rows = np.flatnonzero(labels == k)
            rng.shuffle(rows)
            shares = np.where(sizes < total / num_clients, rng.dirichlet(np.repeat(alpha, num_clients)), 0.0)
            if not 0 < shares.sum() < np.inf:  # also NaN
                shares = np.eye(num_clients)[int(sizes.argmin())]
                if len(rows):
                    notes.append(
                        f"class {k}: all Dirichlet shares underflow, its {len(rows)} samples go to client "
                        f"{sizes.argmin()}"
                    )
            shares = shares / shares.sum()
            cuts = (np.cumsum(shares) * len(rows)).astype(int)[:-1]
            for client, piece in enumerate(np.split(rows, cuts)):
                hands[client].append(piece)
                sizes[client] += len(piece)
        if sizes.min() >= min_samples:
            break
    return Assignment(tuple(np.concatenate(hand) for hand in hands), tuple(notes))


def pathological_indices(
    labels: NDArray[Any],
    num_clients: int,
    classes_per_client: int,
    min_samples: int,
    rng: RandomState,
    num_classes: int,
    shuffle: Random | None = None,
) -> Assignment:
    """Give every client ``classes_per_client`` classes C, as consecutive slices of each class's unshuffled rows.

    For each class, the first ceil(M/K·C) clients that still need a class get a random number of samples between
    a tenth of an equal part (at least ``min_samples``/K) and an equal part, the last of them the remainder; ``shuffle``
    shuffles these numbers among them. Neighbours therefore hold the same classes. Where that range is empty, e.g. with
    fewer samples than clients (the references raise there), equal parts are used. A tenth of fewer than ten samples may
    be none, as in the references: then a client gets fewer classes.
    """
    vacancies = np.full(num_clients, classes_per_client)
    hands: list[list[Rows]] = [[np.empty(0, dtype=np.int64)] for _ in range(num_clients)]
    left_out: list[int] = []
    for k in range(num_classes):
        holders = np.flatnonzero(vacancies > 0)[: ceil((num_clients / num_classes) * classes_per_client)]
        rows = np.flatnonzero(labels == k)
        if len(holders) == 0:
            left_out += [k] if len(rows) else []
            continue
        part = len(rows) / len(holders)
        low, high = int(max(part / 10, min_samples / num_classes)), int(part)
        if low < high:
            sizes = rng.randint(low, high, len(holders) - 1).tolist()
            sizes.append(len(rows) - sum(sizes))
            if shuffle is not None:
                shuffle.shuffle(sizes)
            pieces = np.split(rows, np.cumsum(sizes)[:-1])
        else:
            pieces = np.array_split(rows, len(holders))
        for client, piece in zip(holders, pieces, strict=True):
            hands[client].append(piece)
            vacancies[client] -= 1
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (
            f"classes {left_out} go to no client: every client already has its {classes_per_client} classes",
        )
    return Assignment(tuple(np.concatenate(hand) for hand in hands), notes)


def iid_indices(total: int, num_clients: int, rng: RandomState) -> Assignment:
    """Distribute shuffled rows in equal parts; sizes differ by at most one, classes are balanced by chance."""
    return Assignment(tuple(np.array_split(rng.permutation(total).astype(np.int64), num_clients)))


def repair(deal: Assignment, labels: NDArray[Any], min_samples: int) -> Assignment:
    """Move samples from the largest clients to those with fewer than ``min_samples``, and note each move.

    A donor gives samples of its most frequent class, at most half of that class at a time, so that it keeps all
    its classes if possible, and never falls below ``min_samples`` itself.

    Raises:
        PbflError: if there are fewer than ``min_samples`` samples per client in total.
    """
    hands = list(deal.rows)
    sizes = np.array([len(hand) for hand in hands])
    if sizes.sum() < min_samples * len(hands):
        raise PbflError(
            f"{len(hands)} clients with min-samples = {min_samples} need {min_samples * len(hands)} samples; "
            f"there are {sizes.sum()}"
        )
    notes = list(deal.notes)
    for client in np.flatnonzero(sizes < min_samples):
        while sizes[client] < min_samples:
            donor = int(sizes.argmax())
            classes, counts = np.unique(labels[hands[donor]], return_counts=True)
            most = int(counts.argmax())
            spare = min(int(min_samples - sizes[client]), int(sizes[donor] - min_samples))
            moved = min(spare, max(1, int(counts[most]) // 2))
            positions = np.flatnonzero(labels[hands[donor]] == classes[most])[-moved:]
            hands[client] = np.concatenate([hands[client], hands[donor][positions]])
            hands[donor] = np.delete(hands[donor], positions)
            sizes[client] += moved
            sizes[donor] -= moved
            notes.append(
                f"client {client} had too few samples: {moved} of class {classes[most]} moved from client "
                f"{donor}"
            )
    return Assignment(tuple(hands), tuple(notes))


def split_share(rows: Rows, train_share: float, rng: RandomState) -> Split:
    """Split one client's rows at random: ``floor(train_share · n)``, at least one, for training, the rest for testing.

    Gives the rows of scikit-learn's ``train_test_split`` with the same generator, and so those of PFLlib's and
    HtFLlib's partitions, without the second that importing scikit-learn takes in every process.
    """
    if len(rows) < 2:
        return Split(rows, rows[:0])
    order = rng.permutation(len(rows))
    num_test = len(rows) - max(1, floor(train_share * len(rows)))
    return Split(rows[order[num_test:]], rows[order[:num_test]])
