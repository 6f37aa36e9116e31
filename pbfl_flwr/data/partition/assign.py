"""Assign a pool's samples to clients and split each client's share into training and test samples."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.contract import MAX_NATURAL_ID, Partition, Pool, Rows, Split
from pbfl_flwr.data.partition.function import function_indices
from pbfl_flwr.data.partition.procedures import (
    Assignment,
    dirichlet_indices,
    iid_indices,
    pathological_indices,
    repair,
    split_share,
)
from pbfl_flwr.data.partition.way_shot import way_shot_splits
from pbfl_flwr.errors import PbflError, printable
from pbfl_flwr.util.user_code import is_external

SETTINGS_OF = {
    "dirichlet": ("dirichlet_alpha",),
    "pathological": ("classes_per_client", "shuffled_sizes"),
    "way-shot": ("ways", "ways_deviation", "shots", "shots_deviation", "test_shots"),
}


def make_partition(pool: Pool, settings: DataSettings, num_clients: int) -> Partition:
    """Return the rows of every client; the same settings give the same rows on every machine.

    With ``max_samples`` only that many random samples are partitioned and counted. ``dirichlet``, ``pathological`` and
    ``iid`` guarantee ``min_samples`` per client: :func:`.repair` fills up clients with fewer. ``natural`` takes the
    first M owners. A user's function decides alone. Sources whose files fix clients and split are taken as they are.

    With ``test_split`` "client" each client's share is split at random, not stratified, ``floor(train_share · n)`` for
    training (scikit-learn's ``train_test_split`` on the same generator, as in the references); a client with one sample
    only trains. With "official" only the official training part is partitioned; the official test samples of a class go
    to the clients that train on it, disjoint and in proportion to their training samples of that class, and classes
    that no client trains on are left out. ``natural`` clients get their own official test samples.

    Raises:
        PbflError: if the settings do not fit the data (a line that names the setting and what is allowed).
    """
    if 0 < settings.max_samples < len(pool.labels):
        rows = _drawn(pool, settings)
        return _of_all(rows, make_partition(thinned(pool, rows), settings, num_clients), len(pool.labels))
    if pool.in_train is not None and pool.owner is not None:
        return _as_in_files(pool, pool.owner, pool.in_train, num_clients)
    official = settings.test_split == "official"
    if official and pool.num_train == len(pool.labels):
        raise PbflError(f"dataset '{settings.dataset}' has no official test part; test-split must be client")
    if settings.partition == "way-shot":
        splits, notes = way_shot_splits(pool, settings, num_clients)
        return _finish(pool, settings, splits, notes)
    rng = RandomState(settings.partition_seed)
    labels = pool.labels[: pool.num_train] if official else pool.labels
    deal = _deal(pool, labels, settings, num_clients, rng)
    if official and settings.partition == "natural" and pool.owner is not None:
        splits = _own_tests(pool.owner, pool.num_train, deal.rows, settings)
    elif official:
        splits = _official_tests(pool, deal.rows, rng)
    else:
        splits = tuple(split_share(rows, settings.train_share, rng) for rows in deal.rows)
    notes = deal.notes
    if official and (left := len(pool.labels) - pool.num_train - sum(len(split.test) for split in splits)):
        whose = (
            "other natural clients" if settings.partition == "natural" else "classes that nobody trains on"
        )
        notes = (*notes, f"{left:,} official test samples are left out, of {whose}")
    partition = _finish(pool, settings, splits, notes)
    if settings.partition == "pathological":
        return _with_few_noted(partition, settings.classes_per_client)
    return _named(partition, pool) if settings.partition == "natural" else partition


def _with_few_noted(partition: Partition, classes_per_client: int) -> Partition:
    """Return a partition with a note if clients have fewer classes than were asked for."""
    few = np.count_nonzero(np.count_nonzero(partition.counts, axis=1) < classes_per_client)
    note = f"{few} of {len(partition.splits)} clients have fewer than {classes_per_client} classes"
    return replace(partition, notes=(*partition.notes, note)) if few else partition


def _drawn(pool: Pool, settings: DataSettings) -> Rows:
    """Return ``max-samples`` randomly drawn rows, ascending."""
    if pool.in_train is not None:
        raise PbflError(
            f"max-samples = {settings.max_samples}: dataset '{settings.dataset}' has fixed clients and splits; "
            "must be 0"
        )
    rng = np.random.default_rng(settings.partition_seed)
    return np.sort(rng.choice(len(pool.labels), settings.max_samples, replace=False))


def thinned(pool: Pool, rows: Rows) -> Pool:
    """Return a pool of these rows without their inputs, which partitioning does not need."""
    return replace(
        pool,
        inputs=pool.inputs[:0],
        labels=pool.labels[rows],
        num_train=int((rows < pool.num_train).sum()),
        owner=None if pool.owner is None else pool.owner[rows],
    )


def _of_all(rows: Rows, thin: Partition, total: int) -> Partition:
    """Convert a partition of drawn rows to rows of the whole pool."""
    splits = tuple(Split(rows[split.train], rows[split.test]) for split in thin.splits)
    notes = (*thin.notes, f"{len(rows):,} of {total:,} samples are used")
    return Partition(splits, thin.counts, notes, thin.natural_ids)


def _deal(pool: Pool, labels: Rows, settings: DataSettings, num_clients: int, rng: RandomState) -> Assignment:
    least = settings.min_samples
    if len(labels) < num_clients * least:
        raise PbflError(
            f"num-clients = {num_clients} with min-samples = {least} needs {num_clients * least} samples; dataset "
            f"'{settings.dataset}' has {len(labels)}, so at most {len(labels) // least} clients are allowed"
        )
    if is_external(settings.partition):
        return function_indices(labels, num_clients, settings)
    match settings.partition:
        case "dirichlet":
            alpha = settings.dirichlet_alpha
            deal = dirichlet_indices(labels, num_clients, alpha, least, rng, pool.num_classes)
        case "pathological":
            classes = settings.classes_per_client
            if classes > pool.num_classes:
                raise PbflError(
                    f"classes-per-client = {classes}; must be 1..{pool.num_classes}, the dataset's classes"
                )
            shuffle = Random(settings.partition_seed) if settings.shuffled_sizes else None
            deal = pathological_indices(labels, num_clients, classes, least, rng, pool.num_classes, shuffle)
        case "iid":
            deal = iid_indices(len(labels), num_clients, rng)
        case _:
            return _natural(pool, len(labels), settings, num_clients)
    return repair(deal, labels, least)


def _natural(pool: Pool, total: int, settings: DataSettings, num_clients: int) -> Assignment:
    if pool.owner is None:
        raise PbflError(f"partition = natural: dataset '{settings.dataset}' has no client column")
    owner = pool.owner[:total]
    owners = np.unique(owner)
    drawn = f" among max-samples = {settings.max_samples}" if len(pool.labels) == settings.max_samples else ""
    if num_clients > len(owners):
        raise PbflError(
            f"num-clients = {num_clients}: the dataset has {len(owners)} natural clients{drawn}, no more are allowed"
        )
    notes = (
        (f"the first {num_clients} of {len(owners)} natural clients{drawn}",)
        if num_clients < len(owners)
        else ()
    )
    return Assignment(tuple(_rows_of(owner, owners[:num_clients])), notes)


def _rows_of(owner: Rows, owners: NDArray[np.int64]) -> list[Rows]:
    """Return the rows of each of these owners, ascending; one sort, since there may be thousands of them."""
    order = np.argsort(owner, kind="stable")
    begins, ends = (np.searchsorted(owner, owners, side, sorter=order) for side in ("left", "right"))
    return [order[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _official_tests(pool: Pool, train: tuple[Rows, ...], rng: RandomState) -> tuple[Split, ...]:
    # counts is (M, K).
    counts = np.stack([np.bincount(pool.labels[rows], minlength=pool.num_classes) for rows in train])
    test_labels = pool.labels[pool.num_train :]
    hands: list[list[Rows]] = [[np.empty(0, dtype=np.int64)] for _ in train]
    for k in np.flatnonzero(counts.sum(axis=0)):
        rows = pool.num_train + np.flatnonzero(test_labels == k)
        rng.shuffle(rows)
        upto = np.cumsum(counts[:, k])
        for client, piece in enumerate(np.split(rows, upto[:-1] * len(rows) // upto[-1])):
            hands[client].append(piece)
    return tuple(Split(rows, np.concatenate(hand)) for rows, hand in zip(train, hands, strict=True))


def _own_tests(
    owner: Rows, num_train: int, train: tuple[Rows, ...], settings: DataSettings
) -> tuple[Split, ...]:
    owners = np.array([owner[rows[0]] for rows in train])
    tests = [num_train + rows for rows in _rows_of(owner[num_train:], owners)]
    if not sum(map(len, tests)):
        raise PbflError(
            f"test-split = official: no sample of the official test part of dataset '{settings.dataset}' belongs "
            f"to one of the {len(train)} natural clients; test-split must be client"
        )
    return tuple(Split(rows, test) for rows, test in zip(train, tests, strict=True))


def _as_in_files(pool: Pool, owner: Rows, in_train: NDArray[np.bool_], num_clients: int) -> Partition:
    available = int(owner.max()) + 1
    if num_clients > available:
        raise PbflError(
            f"num-clients = {num_clients}: the dataset's files hold {available} clients, no more are allowed"
        )
    clients = _rows_of(owner, np.arange(num_clients))
    splits = tuple(Split(rows[in_train[rows]], rows[~in_train[rows]]) for rows in clients)
    notes = ["clients and splits come from the files; partition settings do not apply"]
    if num_clients < available:
        notes.append(f"the first {num_clients} of {available} clients")
    return Partition(splits, _counts(pool, splits), (*notes, *pool.notes))


def _finish(
    pool: Pool, settings: DataSettings, splits: tuple[Split, ...], notes: tuple[str, ...]
) -> Partition:
    counts = _counts(pool, splits)
    smallest = int(counts.sum(axis=1).argmin())
    if counts[smallest].sum() < settings.min_samples:
        raise PbflError(
            f"client {smallest} has {counts[smallest].sum()} samples, min-samples is {settings.min_samples}; with "
            f"partition = {settings.partition} samples cannot be moved between clients; min-samples "
            "must be smaller"
        )
    return Partition(splits, counts, (*pool.notes, *_idle(settings), *notes))


def _idle(settings: DataSettings) -> list[str]:
    """Return a line for every setting of another partition that is not at its default."""
    if is_external(settings.partition):  # which may use any
        return []
    changed = settings.model_dump(exclude_defaults=True)
    return [
        f"{name.replace('_', '-')} = {changed[name]!r} has no effect without partition = {partition}"
        for partition, names in SETTINGS_OF.items()
        for name in names
        if name in changed and settings.partition != partition
    ]


def _named(partition: Partition, pool: Pool) -> Partition:
    """Return the partition with the names of its natural clients, which tell them apart also where they are cut."""
    if pool.owner is None or not pool.owner_names:
        return partition
    full = [pool.owner_names[pool.owner[np.append(split.train, split.test)[0]]] for split in partition.splits]
    names = tuple(printable(name)[:MAX_NATURAL_ID] for name in full)
    if len({*names}) < len(names):
        note = f"natural clients are not named: some names are the same in their first {MAX_NATURAL_ID} characters"
        return replace(partition, notes=(*partition.notes, note))
    return replace(partition, natural_ids=names)


def _counts(pool: Pool, splits: tuple[Split, ...]) -> NDArray[np.int64]:
    client_labels = [pool.labels[np.concatenate([split.train, split.test])] for split in splits]
    return np.stack([np.bincount(labels, minlength=pool.num_classes) for labels in client_labels]).astype(
        np.int64
    )
