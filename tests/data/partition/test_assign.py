import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings, parse
from pbfl_flwr.data import LoadedData, check_data, load_pool
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.partition.assign import make_partition
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan import reproduction
from pbfl_flwr.methods import SECTIONS


def everything(part):
    return np.concatenate([np.concatenate([split.train, split.test]) for split in part.splits])


@pytest.mark.parametrize("way", ["dirichlet", "pathological", "iid"])
def test_the_same_seed_gives_the_same_rows_and_another_one_others(way):
    pool = load_pool(DataSettings())
    first, again, other = (
        make_partition(pool, DataSettings(partition=way, partition_seed=seed), 20) for seed in (1, 1, 2)
    )
    for a, b in zip(first.splits, again.splits, strict=True):
        assert np.array_equal(a.train, b.train)
        assert np.array_equal(a.test, b.test)
    assert any(not np.array_equal(a.train, b.train) for a, b in zip(first.splits, other.splits, strict=True))
    assert sorted(everything(first)) == list(range(1797))
    assert first.counts.sum() == 1797


def test_a_client_with_one_sample_trains_on_it(pool_of):
    part = make_partition(pool_of([2, 1]), DataSettings(partition="iid"), 3)
    assert [(len(split.train), len(split.test)) for split in part.splits] == [(1, 0)] * 3


def test_the_official_test_part_follows_the_training_counts(pool_of):
    pool = pool_of([40, 20], test_counts=[20, 10])
    settings = DataSettings(partition="pathological", classes_per_client=1, test_split="official")
    part = make_partition(pool, settings, 4)  # 2 clients a class
    rows = everything(part)
    assert len(np.unique(rows)) == len(rows) == 90
    for split in part.splits:
        assert split.train.max() < 60 <= split.test.min()
        share = len(split.train) / (40 if split.train[0] < 40 else 20)
        available = 20 if split.train[0] < 40 else 10
        assert abs(len(split.test) - share * available) < 1
        assert np.unique(pool.labels[split.test]).tolist() == np.unique(pool.labels[split.train]).tolist()
    (lacking,) = [note for note in make_partition(pool, settings, 1).notes if "official" in note]
    assert lacking == "10 official test samples are left out, of classes that nobody trains on"
    assert not any("official" in note for note in part.notes)


@pytest.mark.parametrize("way", ["dirichlet", "way-shot"])
def test_the_official_test_part_must_exist(way):
    with pytest.raises(PbflError, match="no official test part; test-split must be client"):
        check_data(DataSettings(test_split="official", partition=way, shots=10), 5)


def test_natural_clients_are_the_owners_in_order(pool_of):
    pool = pool_of([4, 4], owner=np.array([2, 0, 2, 0, 1, 1, 2, 1]))
    part = make_partition(pool, DataSettings(partition="natural"), 3)
    held = [sorted([*split.train, *split.test]) for split in part.splits]
    assert held == [[1, 3], [4, 5, 7], [0, 2, 6]]
    assert part.notes == ()
    fewer = make_partition(pool, DataSettings(partition="natural"), 2)
    assert fewer.notes == ("the first 2 of 3 natural clients",)
    with pytest.raises(PbflError, match="num-clients = 4: the dataset has 3 natural clients, no more"):
        make_partition(pool, DataSettings(partition="natural"), 4)
    with pytest.raises(PbflError, match="has 2 natural clients among max-samples = 3, no more"):
        make_partition(pool, DataSettings(partition="natural", max_samples=3), 3)
    with pytest.raises(PbflError, match="client 0 has 2 samples, min-samples is 3"):
        make_partition(pool, DataSettings(partition="natural", min_samples=3), 2)
    with pytest.raises(PbflError, match="no client column"):
        make_partition(pool_of([4, 4]), DataSettings(partition="natural"), 2)


def test_way_shot_blocks_are_disjoint_and_sized(pool_of):
    pool = pool_of([600] * 6, test_counts=[80] * 6)
    settings = DataSettings(partition="way-shot", ways=3, ways_deviation=1, shots=20, shots_deviation=2)
    part = make_partition(pool, settings, 5)  # 5 · 110 <= 600: blocks at i·110
    rows = everything(part)
    assert len(np.unique(rows)) == len(rows)
    for client, split in enumerate(part.splits):
        classes, shots = np.unique(pool.labels[split.train], return_counts=True)
        assert 2 <= len(classes) <= 4
        assert len(set(shots)) == 1
        assert 19 <= shots[0] <= 22  # s̄-ŝ+1 .. s̄+ŝ
        assert split.train[0] == classes[0] * 600 + client * 110
        assert split.test[0] == 3600 + classes[0] * 80 + client * 15
        assert np.unique(pool.labels[split.test], return_counts=True)[1].tolist() == [15] * len(classes)


def test_way_shot_draws_are_those_of_the_reference(pool_of):
    np.random.seed(1234)
    ways = np.random.randint(max(2, 3 - 1), min(10, 3 + 1 + 1), 20)
    shots = np.random.randint(100 - 2 + 1, 100 + 2 + 1, 20)
    random.seed(1234)
    classes = [sorted(random.sample(range(10), n)) for n in ways]
    pool = pool_of([2200] * 10, test_counts=[300] * 10)
    settings = DataSettings(partition="way-shot", ways=3, shots=100, shots_deviation=2, partition_seed=1234)
    part = make_partition(pool, settings, 20)
    for split, held, size in zip(part.splits, classes, shots, strict=True):
        result, counts = np.unique(pool.labels[split.train], return_counts=True)
        assert result.tolist() == held
        assert set(counts.tolist()) == {size}
    assert part.notes == ()


@pytest.mark.parametrize(
    ("ways", "deviation", "drawn"),
    [  # max(2, w̄-ŵ) to min(K-1, w̄+ŵ) of K = 5 classes; K only if nothing else is left
        (2, 0, {2}),
        (2, 1, {2, 3}),
        (3, 2, {2, 3, 4}),
        (4, 1, {3, 4}),
        (5, 2, {3, 4}),
        (4, 0, {4}),
        (5, 0, {5}),
    ],
)
def test_way_shot_gives_nobody_all_classes_unless_everybody(pool_of, ways, deviation, drawn):
    settings = DataSettings(
        partition="way-shot", ways=ways, ways_deviation=deviation, shots=2, shots_deviation=0, test_shots=1
    )
    part = make_partition(pool_of([400] * 5, test_counts=[100] * 5), settings, 60)
    assert {*(part.counts > 0).sum(axis=1).tolist()} == drawn


@pytest.mark.parametrize(("classes", "clients"), [(2, 20), (2, 100), (2, 150), (1, 150)])
def test_clients_with_fewer_classes_than_asked_for_are_noted(classes, clients):
    settings = DataSettings(partition="pathological", classes_per_client=classes)
    part = make_partition(load_pool(DataSettings()), settings, clients)
    few = int(((part.counts > 0).sum(axis=1) < classes).sum())
    assert (few > 0) == (classes == 2 and clients > 20)
    noted = [note for note in part.notes if "fewer" in note]
    assert noted == [f"{few} of {clients} clients have fewer than {classes} classes"] * (few > 0)


def test_shuffled_sizes_are_the_same_sizes_for_other_clients(pool_of):
    settings = DataSettings(partition="pathological", classes_per_client=2)
    plain, shuffled = (
        make_partition(pool_of([600] * 10), settings.model_copy(update={"shuffled_sizes": on}), 20).counts
        for on in (False, True)
    )
    assert (np.sort(plain, axis=0) == np.sort(shuffled, axis=0)).all()
    last = [[np.flatnonzero(of)[-1] == of.argmax() for of in counts.T] for counts in (plain, shuffled)]
    assert (sum(last[0]), sum(last[1])) == (10, 2)  # how often the last holder has most


def test_fedprotos_mnist_has_99_or_100_shots_and_40_test_samples(pool_of):
    np.random.seed(1234)
    ways = np.random.randint(max(2, 4 - 2), min(10, 4 + 2 + 1), 20)
    shots = np.random.randint(100 - 2 + 1, 100 + 2 - 1, 20)
    paper = reproduction.read("gfpl-table1").runs_of("mnist-4")["Local"]
    pool = pool_of([6000] * 10, test_counts=[892] * 10)  # the rarest test digit
    part = make_partition(pool, parse(paper, SECTIONS).data, 20)
    for client, split in enumerate(part.splits):
        classes, counts = np.unique(pool.labels[split.train], return_counts=True)
        assert (len(classes), set(counts.tolist())) == (ways[client], {shots[client]})
        blocks = [60_000 + 892 * k + 40 * client + np.arange(40) for k in classes]
        assert np.array_equal(split.test, np.concatenate(blocks))
    assert set(shots.tolist()) == {99, 100}


def test_way_shot_deals_small_classes_among_their_holders(pool_of):
    pool = pool_of([100] * 4)  # no official test part: 75 of a class are for training, 25 for testing
    settings = DataSettings(partition="way-shot", ways=2, ways_deviation=0, shots=10, shots_deviation=0)
    part = make_partition(pool, settings, 6)
    rows = everything(part)
    assert len(np.unique(rows)) == len(rows)
    for split in part.splits:
        assert np.unique(pool.labels[split.train], return_counts=True)[1].tolist() == [10, 10]
        assert (split.train % 100 < 75).all()
        assert (split.test % 100 >= 75).all()
    assert any("test samples per client instead of 15" in note for note in part.notes)
    with pytest.raises(PbflError, match="has 75 training samples, but its"):
        make_partition(pool, settings.model_copy(update={"shots": 60}), 6)


@pytest.mark.parametrize(
    ("change", "clients", "message"),
    [
        (
            {"partition": "pathological", "classes_per_client": 11},
            5,
            "classes-per-client = 11; must be 1..10",
        ),
        ({"partition": "way-shot", "ways": 11}, 5, "ways = 11; the dataset has 10 classes"),
        ({"partition": "way-shot", "ways": 1}, 5, "ways = 1"),
        ({"partition": "way-shot", "shots": 2, "shots_deviation": 3}, 5, "shots-deviation = 3"),
        ({}, 1798, "num-clients = 1798 .* 1797 clients are allowed"),
        ({"min_samples": 100}, 20, "needs 2000 samples; dataset 'digits' has 1797, so at most 17 clients"),
        ({"dataset": "digit"}, 5, "unknown dataset 'digit'; did you mean 'digits'?"),
        ({"dataset": "xyzzy"}, 5, "unknown dataset 'xyzzy'; must be one of digits, spiral"),
    ],
)
def test_rejects_settings_that_do_not_fit(change, clients, message):
    with pytest.raises(PbflError, match=message) as caught:
        check_data(DataSettings(**change), clients)
    assert "\n" not in str(caught.value)


def test_min_samples_is_met_and_moved_samples_are_noted():
    part = check_data(DataSettings(dirichlet_alpha=0.001, min_samples=5), 50)
    assert part.counts.sum(axis=1).min() >= 5
    assert part.counts.sum() == 1797
    assert any("moved from client" in note for note in part.notes)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(
    ("partition", "change", "line"),
    [
        ("dirichlet", {"dirichlet_alpha": 0.5}, "dirichlet-alpha = 0.5"),
        ("pathological", {"classes_per_client": 3}, "classes-per-client = 3"),
        ("pathological", {"shuffled_sizes": True}, "shuffled-sizes = True"),
        ("way-shot", {"shots": 20}, "shots = 20"),
    ],
)
def test_a_setting_of_another_partition_is_noted(
    partition: str, change: dict[str, Any], line: str, used: bool
) -> None:
    part = check_data(DataSettings.model_validate({"partition": partition if used else "iid", **change}), 3)
    lines = [note for note in part.notes if "has no effect" in note]
    assert lines == ([] if used else [f"{line} has no effect without partition = {partition}"])


def test_client_data_follows_the_partition():
    settings = DataSettings()
    pool, part = load_pool(settings), check_data(settings, 20)
    loaded = LoadedData()
    data = loaded.client(settings, 20, 3)
    assert np.array_equal(data.train.inputs.numpy(), pool.inputs[part.splits[3].train])
    assert np.array_equal(data.test.labels.numpy(), pool.labels[part.splits[3].test])
    assert data.counts.tolist() == np.bincount(pool.labels[part.splits[3].train], minlength=10).tolist()
    assert data.train.inputs.is_contiguous()
    assert loaded.client(settings, 20, 3) is data  # a worker that sees the client again does not load again
    with pytest.raises(PbflError, match=r"client 20 does not exist; must be 0\.\.19"):
        loaded.client(settings, 20, 20)


def test_max_samples_deals_that_many_of_the_pools_own_rows(pool_of):
    pool = pool_of([40, 20], test_counts=[20, 10])
    part = make_partition(pool, DataSettings(partition="iid", max_samples=45), 3)
    rows = everything(part)
    assert len(np.unique(rows)) == len(rows) == part.counts.sum() == 45
    assert rows.max() < 90
    first = np.concatenate([part.splits[0].train, part.splits[0].test])
    assert part.counts[0].tolist() == np.bincount(pool.labels[first], minlength=2).tolist()
    assert part.notes == ("45 of 90 samples are used",)
    official = make_partition(pool, DataSettings(partition="iid", max_samples=45, test_split="official"), 3)
    for split in official.splits:
        assert split.train.max() < 60 <= split.test.min()
    everyone = make_partition(pool, DataSettings(partition="iid", max_samples=90), 3)
    assert everyone.notes == ()
    assert everyone.counts.sum() == 90


def test_max_samples_keeps_the_natural_owners_and_refuses_fixed_splits(pool_of):
    owner = np.repeat(np.arange(3), 20)
    pool = pool_of([30, 30], owner=owner)
    part = make_partition(pool, DataSettings(partition="natural", max_samples=30), 3)
    for client, split in enumerate(part.splits):
        assert set(owner[np.concatenate([split.train, split.test])]) == {client}
    fixed = replace(pool, in_train=np.ones(60, dtype=bool))
    with pytest.raises(PbflError, match="max-samples = 30"):
        make_partition(fixed, DataSettings(max_samples=30), 3)


def test_way_shot_cuts_each_class_by_the_training_share():
    labels = np.repeat(np.arange(3), 100)
    pool = Pool(np.zeros((300, 2), np.float32), labels, ("a", "b", "c"), 300)
    settings = parse(
        {"partition": "way-shot", "ways": 2, "ways-deviation": 0, "shots": 55, "shots-deviation": 0,
         "train-share": 0.5, "num-clients": 1}, SECTIONS,
    ).data  # fmt: skip
    with pytest.raises(PbflError, match="has 50 training samples"):
        make_partition(pool, settings, 1)
