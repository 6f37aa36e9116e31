import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState
from sklearn.model_selection import train_test_split

from pbfl_flwr.data.partition.procedures import (
    Assignment,
    dirichlet_indices,
    iid_indices,
    pathological_indices,
    repair,
    split_share,
)
from pbfl_flwr.errors import PbflError

CIFAR10 = [6000] * 10
CIFAR100 = [600] * 100
FASHION = [7000] * 10
# Images of each class, training and test part together, as the sets are published: torchvision's GTSRB (26,640 and
# 12,630) and Flowers-102 (8,189).
# fmt: off
GTSRB = [
    210, 2220, 2250, 1410, 1980, 1890, 450, 1410, 1410, 1470, 2010, 1320, 2100, 2160, 810, 630, 450, 1110,
    1200, 210, 330, 330, 390, 510, 270, 1500, 600, 240, 510, 270, 450, 810, 240, 690, 420, 1200, 390, 210,
    2070, 300, 330, 240, 270,
]
FLOWERS = [
    40, 60, 40, 56, 65, 45, 40, 85, 46, 45, 87, 87, 49, 48, 49, 41, 85, 82, 49, 56, 40, 59, 91, 42, 41, 41,
    40, 66, 78, 85, 52, 45, 46, 40, 43, 75, 108, 56, 41, 67, 127, 59, 130, 93, 40, 196, 67, 71, 49, 92, 258,
    85, 93, 61, 71, 109, 67, 114, 67, 109, 50, 55, 54, 52, 102, 61, 42, 54, 54, 62, 78, 96, 194, 171, 120,
    107, 251, 137, 41, 105, 166, 112, 131, 86, 63, 58, 63, 154, 184, 82, 76, 66, 46, 162, 128, 91, 66, 82,
    63, 49, 58, 48,
]
# fmt: on
MNIST = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]  # train + test of every digit


def labels_of(counts):
    return np.repeat(np.arange(len(counts)), counts)


def table(deal, labels, num_classes):
    return np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in deal.rows])


# Sums of K_i as printed for the published partitions (seed 1). PFLlib asks for 40 samples a client, TinyProto for 1;
# where the smallest client has more than 40, both give the same partition.
@pytest.mark.parametrize(
    ("counts", "clients", "alpha", "classes", "smallest"),
    [
        (CIFAR10, 20, 0.1, 102, 1164),
        (CIFAR100, 20, 0.1, 921, 2607),
        ([550] * 200, 20, 0.1, 1853, 4805),
        (MNIST, 20, 0.1, 95, 499),
        (FASHION, 20, 0.1, 106, 82),
        (GTSRB, 20, 0.1, 332, 1197),
        (FLOWERS, 20, 0.1, 691, 294),
        (CIFAR10, 20, 0.01, 34, None),  # after 37 tries
        (CIFAR10, 20, 0.5, 176, None),
        (CIFAR10, 100, 0.1, 400, None),
        (CIFAR100, 20, 0.01, 249, None),
        (CIFAR100, 20, 1.0, 1881, None),
        (CIFAR100, 50, 0.1, 1920, None),
    ],
)
def test_dirichlet_gives_the_published_number_of_classes(counts, clients, alpha, classes, smallest):
    labels = labels_of(counts)
    for least in (1, 40) if smallest else (1,):
        dealt = table(
            dirichlet_indices(labels, clients, alpha, least, RandomState(1), len(counts)), labels, len(counts)
        )
        assert (dealt > 0).sum() == classes
        assert smallest in (None, dealt.sum(axis=1).min())


def test_dirichlet_gives_the_counts_that_protonorm_released():
    labels = labels_of(CIFAR10)
    dealt = table(dirichlet_indices(labels, 20, 0.1, 1, RandomState(1), 10), labels, 10).tolist()
    # test_args.json, clients 0, 3, 12 and 19
    assert dealt[0] == [0, 9, 0, 668, 476, 287, 5, 167, 0, 9]
    assert dealt[3] == [0, 402, 12, 7, 0, 0, 1, 0, 1, 1657]
    assert dealt[12] == [248, 0, 2, 0, 360, 1802, 1, 0, 3581, 0]
    assert dealt[19] == [1, 1, 1, 1, 1, 2651, 1, 1, 1, 1]


@pytest.mark.filterwarnings("error")
def test_a_class_whose_shares_underflow_goes_to_the_smallest_client():
    """With so small an alpha NumPy draws inf and NaN."""
    deal = dirichlet_indices(labels_of([10] * 4), 2, 0.0005, 1, RandomState(13), 4)
    assert any("Dirichlet shares underflow" in note for note in deal.notes)
    assert sorted(np.concatenate(deal.rows)) == list(range(40))
    assert all(len(rows) % 10 == 0 for rows in deal.rows)


def test_classes_whose_shares_underflow_go_to_the_smallest_client_each():
    class Underflows(RandomState):
        def dirichlet(self, alpha, size=None):
            return np.zeros(len(alpha))

    labels = labels_of([10] * 4)
    deal = dirichlet_indices(labels, 2, 0.1, 1, Underflows(0), 4)
    assert [sorted(set(labels[rows].tolist())) for rows in deal.rows] == [[0, 2], [1, 3]]


def test_a_client_with_exactly_an_equal_part_gets_no_more():
    # with so small an alpha a class goes to one client, in half of the draws to the same one as the class before
    for seed in range(10):
        deal = dirichlet_indices(labels_of([10, 10]), 2, 0.01, 0, RandomState(seed), 2)
        assert [len(rows) for rows in deal.rows] == [10, 10]


def test_redrawing_follows_the_smallest_size_that_is_asked_for():
    # AG News, 4 x 31,900: the first draw has a client of 23 samples; 40 needs 12 tries and gives other counts. FedTGP's
    # cost of .063 M = (ΣK_i + 20·4)·500 fits the first.
    labels = labels_of([31_900] * 4)
    first = table(dirichlet_indices(labels, 20, 0.1, 1, RandomState(1), 4), labels, 4)
    later = table(dirichlet_indices(labels, 20, 0.1, 40, RandomState(1), 4), labels, 4)
    assert ((first > 0).sum(), first.sum(axis=1).min()) == (46, 23)
    assert (later > 0).sum() == 45
    assert later.sum(axis=1).min() >= 40


def test_dirichlet_is_the_reference_loop_row_by_row():
    labels = RandomState(3).permutation(labels_of([90, 70, 120, 40, 80]))
    np.random.seed(1)  # the references seed the global generator
    least, smallest = 5, 0
    while smallest < least:
        held: list[list[int]] = [[] for _ in range(6)]
        for k in range(5):
            rows = np.where(labels == k)[0]
            np.random.shuffle(rows)
            shares = np.random.dirichlet(np.repeat(0.5, 6))
            shares = np.array([p * (len(h) < len(labels) / 6) for p, h in zip(shares, held, strict=True)])
            shares = shares / shares.sum()
            cuts = (np.cumsum(shares) * len(rows)).astype(int)[:-1]
            held = [h + piece.tolist() for h, piece in zip(held, np.split(rows, cuts), strict=True)]
        smallest = min(len(h) for h in held)
    expected_split = train_test_split(np.array(held[0]), train_size=0.75, shuffle=True)
    rng = RandomState(1)
    deal = dirichlet_indices(labels, 6, 0.5, least, rng, 5)
    assert [rows.tolist() for rows in deal.rows] == held
    # and the generator stands where the references' generator stands
    split = train_test_split(deal.rows[0], train_size=0.75, shuffle=True, random_state=rng)
    assert [part.tolist() for part in split] == [part.tolist() for part in expected_split]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75, 0.99])
def test_a_share_is_split_as_scikit_learn_does(share):
    for count in (2, 3, 10, 101):
        rows, ours, theirs = np.arange(count) * 7, RandomState(3), RandomState(3)
        train_size = max(1, math.floor(share * count))
        expected = train_test_split(rows, train_size=train_size, shuffle=True, random_state=theirs)
        split = split_share(rows, share, ours)
        assert [split.train.tolist(), split.test.tolist()] == [part.tolist() for part in expected]
        assert ours.rand() == theirs.rand()


@pytest.mark.parametrize(
    "shuffled", [False, True]
)  # CIFAR-10's generator, and that of CIFAR-100 and Tiny-ImageNet
def test_pathological_is_the_reference_loop(shuffled):
    labels = RandomState(3).permutation(labels_of([90, 70, 120, 40]))
    np.random.seed(1)
    random.seed(1)
    draw: Any = np.random.randint  # the reference gives it fractions
    wanted = [2] * 6
    expected: list[list[int]] = [[] for _ in range(6)]
    for k in range(4):
        rows = np.where(labels == k)[0]
        chosen = [client for client in range(6) if wanted[client] > 0][:3]  # ceil(6/4 · 2) = 3
        part = len(rows) / len(chosen)
        sizes = draw(max(part / 10, 10 / 4), part, len(chosen) - 1).tolist()
        sizes.append(len(rows) - sum(sizes))
        if shuffled:
            random.shuffle(sizes)
        start = 0
        for client, size in zip(chosen, sizes, strict=True):
            expected[client] += rows[start : start + size].tolist()
            start += size
            wanted[client] -= 1
    shuffle = random.Random(1) if shuffled else None
    deal = pathological_indices(labels, 6, 2, 10, RandomState(1), 4, shuffle)
    assert [rows.tolist() for rows in deal.rows] == expected


def test_pathological_says_which_classes_are_left_out():
    # 3 clients, 2 of 10 classes each: ceil(.6) = 1 client a class, so 6 classes are dealt and 4 are left.
    deal = pathological_indices(labels_of([5] * 10), 3, 2, 1, RandomState(1), 10)
    assert sum(len(rows) for rows in deal.rows) == 30
    assert "[6, 7, 8, 9]" in deal.notes[0]


def test_the_repair_takes_from_the_largest_clients_largest_class():
    labels = np.array([0, 0, 0, 0, 1, 1, 2])
    deal = Assignment((np.array([0, 1, 2, 3, 4]), np.array([5, 6]), np.array([], dtype=np.int64)))
    mended = repair(deal, labels, 2)
    # client 0 has four of class 0: two of them, the last ones, are half of the class
    assert [rows.tolist() for rows in mended.rows] == [[0, 1, 4], [5, 6], [2, 3]]
    assert mended.notes == ("client 2 had too few samples: 2 of class 0 moved from client 0",)


def test_the_repair_leaves_a_donor_the_minimum_and_half_of_its_class():
    hands = Assignment((np.arange(4), np.arange(4, 8), np.arange(8, 9)))
    assert [len(rows) for rows in repair(hands, np.zeros(9, dtype=int), 3).rows] == [3, 3, 3]
    labels = np.array([0, 0, 0, 0, 1, 1, 1])
    mended = repair(Assignment((np.arange(7), np.arange(0))), labels, 3)
    assert [np.bincount(labels[rows]).tolist() for rows in mended.rows] == [[2, 2], [2, 1]]


def test_the_repair_refuses_the_impossible():
    with pytest.raises(PbflError, match="need 9 samples; there are 7"):
        repair(Assignment((np.arange(7), *[np.arange(0)] * 2)), np.zeros(7, dtype=int), 3)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    clients=st.integers(1, 12),
    alpha=st.sampled_from([0.0005, 0.01, 0.1, 1.0, 100.0]),
    least=st.integers(1, 4),
    seed=st.integers(0, 1000),
    way=st.sampled_from(["dirichlet", "pathological", "iid"]),
)
def test_no_sample_is_dealt_twice_or_lost_and_everyone_has_enough(counts, clients, alpha, least, seed, way):
    labels = RandomState(seed).permutation(labels_of(counts))
    rng = RandomState(seed)
    if way == "dirichlet":
        deal = dirichlet_indices(labels, clients, alpha, least, rng, len(counts))
    elif way == "pathological":
        classes = random.Random(seed).randint(1, len(counts))
        deal = pathological_indices(labels, clients, classes, least, rng, len(counts))
        assert max(len(np.unique(labels[rows])) for rows in deal.rows) <= classes
    else:
        deal = iid_indices(len(labels), clients, rng)
    dealt = np.concatenate(deal.rows)
    assert len(np.unique(dealt)) == len(dealt)
    if not any("go to no client" in note for note in deal.notes):
        assert len(dealt) == len(labels)
    if len(dealt) < least * clients:
        with pytest.raises(PbflError):
            repair(deal, labels, least)
        return
    mended = repair(deal, labels, least)
    assert sorted(np.concatenate(mended.rows)) == sorted(dealt)
    assert min(len(rows) for rows in mended.rows) >= least
