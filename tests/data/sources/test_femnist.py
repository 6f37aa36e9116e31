"""FEMNIST in LEAF's JSON files, made up here: writers, pixels, parts, and what is said of files that are wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import check_data, client_data, load_pool
from pbfl_flwr.errors import PbflError

GREY = {"ann": 10, "bob": 20, "cy": 30}


def drawn(writer: str, labels: list[int]) -> dict[str, list[Any]]:
    """Images on white paper, whose first pixel tells the writer and whose second the class."""
    return {"x": [[GREY[writer] / 255, k / 255] + [1.0] * 782 for k in labels], "y": labels}


def write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    users = list(data)
    sizes = [len(data[user]["y"]) for user in users]
    path.write_text(json.dumps({"users": users, "num_samples": sizes, "user_data": data}))


def settings(path: Path, **keys: Any) -> DataSettings:
    return DataSettings(dataset="femnist", data_dir=str(path), **keys)


@pytest.fixture(params=["", "data", "femnist/data"])
def leaf(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Two files of the training part, which need not be in the order of the writers, and one of the test part."""
    place = tmp_path / request.param
    write(
        place / "train/all_data_0_niid_0_keep_0_train_9.json",
        {"cy": drawn("cy", [0, 61]), "ann": drawn("ann", [10] * 4)},
    )
    write(place / "train/all_data_1_niid_0_keep_0_train_9.json", {"bob": drawn("bob", [36, 36, 5])})
    write(
        place / "test/all_data_0_niid_0_keep_0_test_9.json",
        {"ann": drawn("ann", [10]), "bob": drawn("bob", [5, 36]), "cy": drawn("cy", [])},
    )
    return tmp_path


def test_leafs_folder(leaf: Path) -> None:
    pool = load_pool(settings(leaf))
    assert (pool.input_shape, pool.num_classes, pool.num_train) == ((1, 28, 28), 62, 9)
    assert pool.inputs.dtype == np.uint8
    assert pool.labels.tolist() == [0, 61, 10, 10, 10, 10, 36, 36, 5, 10, 5, 36]
    assert [pool.label_names[k] for k in (0, 9, 10, 35, 36, 61)] == ["0", "9", "A", "Z", "a", "z"]
    assert pool.owner is not None
    assert pool.owner.tolist() == [2, 2, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1]
    flat = pool.inputs.reshape(len(pool.labels), -1)
    assert flat[:, 0].tolist() == [10 * (who + 1) for who in pool.owner]  # bytes are what they were
    assert flat[:, 1].tolist() == pool.labels.tolist()
    assert (flat[:, 2:] == 255).all()


def test_writers_are_the_natural_clients(leaf: Path) -> None:
    keys = settings(leaf, partition="natural", test_split="official")
    part = check_data(keys, 2)
    assert [row[row > 0].tolist() for row in part.counts] == [[5], [2, 3]]  # ann: A; bob: 5, a
    assert part.natural_ids == ("ann", "bob")
    assert client_data(keys, 2, 0).prepare(client_data(keys, 2, 0).train.inputs).max() == 1


def test_a_writer_is_tested_on_its_own_samples(leaf: Path, tmp_path: Path) -> None:
    part = check_data(settings(leaf, partition="natural", test_split="official"), 3)
    assert [(s.train.tolist(), s.test.tolist()) for s in part.splits] == [
        ([2, 3, 4, 5], [9]), ([6, 7, 8], [10, 11]), ([0, 1], [])
    ]  # fmt: skip
    assert not any("left out" in note for note in part.notes)
    fewer = check_data(settings(leaf, partition="natural", test_split="official"), 1)
    assert "2 official test samples are left out, of other natural clients" in fewer.notes
    for name, who in (("train", "ann"), ("test", "bob")):  # LEAF's split by user
        write(tmp_path / "by-user" / name / "all_data_0.json", {who: drawn(who, [1, 2])})
    keys = settings(tmp_path / "by-user", partition="natural", test_split="official")
    with pytest.raises(PbflError, match="belongs to one of the 1 natural clients; test-split must be client"):
        check_data(keys, 1)


def test_ways_and_shots_take_training_and_test_samples_from_their_parts(tmp_path: Path) -> None:
    for name, size in (("train", 12), ("test", 4)):
        data = {who: drawn(who, list(range(62)) * (size // 2)) for who in ("ann", "bob")}
        write(tmp_path / name / "all_data_0.json", data)
    keys = settings(tmp_path, partition="way-shot", ways=3, ways_deviation=0, shots=4, shots_deviation=1)
    pool, part = load_pool(keys), check_data(keys, 3)
    for split in part.splits:
        assert split.train.max() < pool.num_train <= split.test.min()
        assert len(np.unique(pool.labels[split.train])) == 3
        assert set(pool.labels[split.test]) == set(pool.labels[split.train])


@pytest.mark.parametrize("folder", ["all_data", "."])
def test_files_that_are_not_split_have_no_test_part(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "all_data_0.json", {"ann": drawn("ann", [1, 2, 3])})
    pool = load_pool(settings(tmp_path))
    assert (len(pool.labels), pool.num_train) == (3, 3)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="'femnist' not found") as caught:
        check_data(settings(tmp_path), 2)
    assert f"{tmp_path}/train/*.json" in str(caught.value)
    assert f"{tmp_path}/femnist/data/train/*.json" in str(caught.value)
    assert "no automatic download" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("not json", "Expecting value"),
        ('{"users": ["ann"]}', "it lacks 'user_data'"),
        ('{"users": ["ann"], "user_data": {}}', "it lacks 'ann'"),
        ('{"users": ["ann", ""], "user_data": {}}', "a user has no name"),
        ('{"users": ["ann"], "user_data": {"ann": {"x": [[0.5]], "y": [1]}}}', r"x is \(1, 1\), y \(1,\)"),
        ('{"users": ["ann"], "user_data": {"ann": {"x": [["a"]], "y": [1]}}}', "could not convert"),
        ("[]", "list indices"),
    ],
)
def test_a_file_that_is_not_leafs_is_named(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "train" / "all_data_0.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(PbflError, match=reason) as caught:
        load_pool(settings(tmp_path))
    assert str(caught.value).startswith(f"{file} is not a file of LEAF's FEMNIST (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pixel", "label", "reason"),
    [
        (255, 1, "x ranges from 0 to 255"),
        (float("nan"), 1, "x ranges"),
        (0.5, 62, "y ranges from 62 to 62"),
        (0.5, 1.5, "y does not consist of whole numbers"),
    ],
)
def test_values_that_are_not_leafs_are_named(tmp_path: Path, pixel: float, label: float, reason: str) -> None:
    write(tmp_path / "train/all_data_0.json", {"ann": {"x": [[0.0] * 783 + [pixel]], "y": [label]}})
    with pytest.raises(PbflError, match=reason):
        load_pool(settings(tmp_path))


def test_files_without_samples(tmp_path: Path) -> None:
    write(tmp_path / "train/all_data_0.json", {"ann": drawn("ann", [])})
    with pytest.raises(PbflError, match=r"no file of .*train holds a sample"):
        load_pool(settings(tmp_path))
