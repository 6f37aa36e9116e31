import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import Pool, check_data, client_data, load_pool
from pbfl_flwr.data.own.npz import read_arrays
from pbfl_flwr.errors import PbflError


@pytest.fixture
def save(tmp_path):
    def write(name="set.npz", **arrays):
        np.savez(tmp_path / name, **arrays)
        return DataSettings(dataset="npz", data_dir=str(tmp_path / name), partition="iid")

    return write


def test_a_client_column_gives_natural_clients(save):
    settings = save(
        x=np.arange(16, dtype=np.float64).reshape(8, 2), y=np.array([0, 1] * 4, dtype=np.int8),
        client=np.array(["zoe", "ada", "zoe", "ada", "bob", "bob", "bob", "bob"]),
    ).model_copy(update={"partition": "natural"})  # fmt: skip
    part = check_data(settings, 3)
    assert part.counts.sum(axis=1).tolist() == [2, 4, 2]
    assert part.natural_ids == ("ada", "bob", "zoe")
    assert check_data(settings.model_copy(update={"max_samples": 7}), 2).natural_ids == ("ada", "bob")
    assert check_data(settings.model_copy(update={"partition": "iid"}), 2).natural_ids == ()
    zoe = client_data(settings, 3, 2)
    assert zoe.natural_id == "zoe"
    held = np.concatenate([zoe.train.inputs.numpy(), zoe.test.inputs.numpy()])
    assert sorted(held.tolist()) == [[0, 1], [4, 5]]
    assert zoe.prepare(zoe.train.inputs).equal(zoe.train.inputs)  # features are fed as they are


def test_names_are_compared_without_spaces_and_in_one_form(save):
    pool = load_pool(save(x=np.zeros((4, 2)), y=np.array(["cat ", "cat", "Ka\u0308fer", "K\u00e4fer"])))
    assert (pool.label_names, pool.labels.tolist()) == (("K\u00e4fer", "cat"), [1, 1, 0, 0])


def test_bytes_are_images(save):
    images = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    pool = load_pool(save(x=images, y=np.array([0, 1, 2, 0, 1])))
    assert pool.inputs.shape == (5, 1, 4, 3)
    assert pool.inputs.dtype == np.uint8
    assert np.array_equal(pool.inputs[:, 0], images)


X, Y = np.zeros((4, 2)), [0, 1, 0, 1]


def test_numbered_natural_clients_are_told_from_numbers_of_clients(save):
    settings = save(x=np.zeros((4, 2)), y=np.array([0, 1] * 2), client=np.array([7, 12, 12, 7]))
    natural = settings.model_copy(update={"partition": "natural"})
    assert check_data(natural, 2).natural_ids == ("id 7", "id 12")
    long = np.array(["x" * 64 + "a", "x" * 64 + "b"] * 2)
    settings = save(x=np.zeros((4, 2)), y=np.array([0, 1, 1, 0]), client=long)
    part = check_data(settings.model_copy(update={"partition": "natural"}), 2)
    assert (part.natural_ids, part.notes) == (
        (),
        ("natural clients are not named: some names are the same in their first 64 characters",),
    )


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, None, "has no array 'y'"),
        (X, [1, 2, 3, 1], "3 labels 1, 2, 3; must be 0..2 without gaps, which 3 is not; set labels"),
        (X, [0, 2, 0, 2], "2 labels 0, 2; must be 0..1"),
        (X, [-1, 0, 1, 1], "labels -1, 0, 1"),
        (X, [0.0, 1.0, 0.5, 1.0], r"y\[2\]: 0.5 is not a whole number; a class is expected"),
        (X, [0.0, 1.0, np.nan, 1.0], r"y\[2\]: the cell is empty; a class is expected"),
        (X, ["a", "a", "a", "a"], "has 1 classes; must be 2"),
        (X, ["a", " ", "a", "a"], r"y\[1\]: the cell is empty; a class is expected"),
        (X, [b"a", b"", b"a", b"a"], r"y\[1\]: the cell is empty; a class is expected"),
        (X, [b"a", b"b", b"a", b"\xff"], r"y\[3\]: b'\\xff' is not UTF-8; a class is expected"),
        (X, np.zeros(4, "S0"), r"y\[0\]: the cell is empty"),
        (X, np.array([97, 2**31, 97, 97], np.uint32).view("U1"), r"y\[1\]: it holds what is no character"),
        (X, np.array(["2020"] * 4, "M8[Y]"), r"y is datetime64\[Y\] \(4,\); must be names or whole numbers"),
        (X, [[0], [1], [0], [1]], r"y is int64 \(4, 1\); must be names or whole numbers, \(N,\)"),
        (X, [0, 0, 0, 0], "y has only the label 0; must be 2 classes or more; set labels to all classes"),
        (
            X,
            np.array([0, 1, 2**64 - 1, 1], np.uint64),
            "0..2 without gaps, which 18446744073709551615 is not",
        ),
        (X.astype("m8[s]"), Y, "must be numbers"),
        (X[:3], Y, "3 inputs and 4 labels"),
        (np.zeros((0, 3)), np.zeros(0, int), "has no samples; must be 1 or more"),
        ([[0.0], [np.nan], [1.0], [2.0]], Y, r"NaN, .* first in row 1"),
        ([[0.0], [1.0], [1.0], [-np.inf]], Y, "first in row 3"),
        ([[0.0], [1.0], [1e99], [2.0]], Y, "first in row 2"),
        ([[object()]] * 2, [0, 1], "not a readable .npz file of plain arrays"),
        ([["a"]] * 2, [0, 1], "must be numbers"),
        (
            np.zeros((4, 2, 2, 2, 2, 2)),
            Y,
            r"inputs of shape \(2, 2, 2, 2, 2\); must be 1 to 4 axes, none of length 0",
        ),
        (np.zeros((4, 2, 0)), Y, "must be 1 to 4 axes, none of length 0"),
        (np.zeros((2, 8, 8, 3), dtype=np.uint8), [0, 1], "channels first"),
    ],
)
def test_rejects_wrong_content(save, x, y, message):
    with pytest.raises(PbflError, match=message):
        check_data(save(x=np.asarray(x), **({} if y is None else {"y": np.array(y)})), 1)


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ([0.0, np.nan, 1.0, 1.0], r"client\[1\]: the cell is empty; a client is expected"),
        (["a", "b", "", "b"], r"client\[2\]: the cell is empty; a client is expected"),
        ([b"a", b"b", b"a", b"\xff"], r"client\[3\]: b'\\xff' is not UTF-8; a client is expected"),
        ([1.5, 1.0, 0.0, 0.0], r"client\[0\]: 1.5 is not a whole number; a client is expected"),
        ([1j, 1, 0, 0], r"client is complex128 \(4,\); must be names or whole numbers"),
        ([[0], [1], [0], [1]], r"client is int64 \(4, 1\); must be names or whole numbers"),
    ],
)
def test_a_missing_client_is_refused_with_its_row(save, client, message):
    with pytest.raises(PbflError, match=message):
        check_data(save(x=X, y=np.array(Y), client=np.array(client)), 1)


def test_names_in_bytes_and_whole_numbers_in_any_type(save):
    pool = load_pool(save(x=X, y=np.array([b"cow", b"ant", b"K\xc3\xa4fer", b"ant"])))
    assert (pool.label_names, pool.labels.tolist()) == (("K\u00e4fer", "ant", "cow"), [2, 1, 0, 1])
    pool = load_pool(save(x=X, y=np.array([0.0, 1.0, 1.0, 0.0]), client=np.array([10.0, 9.0, 10.0, 2.0])))
    assert (pool.label_names, pool.labels.tolist()) == (("0", "1"), [0, 1, 1, 0])
    assert pool.owner is not None
    assert pool.owner.tolist() == [2, 1, 2, 0]  # in the order of numbers


@pytest.mark.parametrize("content", [b"", b"no array"])
@pytest.mark.parametrize("array", ["x", "y", "client"])
def test_rejects_a_member_that_is_no_array(save, content, array):
    settings = save(**{key: value for key, value in {"x": X, "y": np.array(Y)}.items() if key != array})
    with zipfile.ZipFile(settings.data_dir, "a") as archive:
        archive.writestr(f"{array}.npy", content)
    with pytest.raises(
        PbflError, match=rf"readable \.npz file of plain arrays \('{array}' does not begin as"
    ):
        load_pool(settings)


def test_rejects_a_client_column_of_another_length(save):
    with pytest.raises(PbflError, match="3 entries in its client column"):
        check_data(save(x=X, y=np.array(Y), client=np.zeros(3)), 1)


def test_rejects_a_file_that_is_no_archive(tmp_path):
    (tmp_path / "set.npz").write_bytes(b"not a zip")
    with pytest.raises(PbflError, match=r"set.npz is not a readable .npz file"):
        load_pool(DataSettings(dataset="npz", data_dir=str(tmp_path / "set.npz")))


def test_rejects_an_array_larger_than_any_memory(tmp_path: Path) -> None:
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    header += (
        f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10**15},), }}".ljust(117).encode() + b"\n"
    )
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        archive.writestr("x.npy", header + bytes(8))
    with pytest.raises(PbflError, match=r"set\.npz is not a readable \.npz file .*Unable to allocate"):
        read_arrays(tmp_path / "set.npz", "test", ("x",))


def test_har_clients_are_the_people(tmp_path):
    rng = np.random.default_rng(0)
    subject = np.repeat([4, 7, 9], 8).astype(np.int8)
    np.savez(
        tmp_path / "har.npz", x=rng.normal(size=(24, 9, 128)).astype(np.float16),
        y=np.tile(np.arange(6), 4).astype(np.int8), subject=subject,
    )  # fmt: skip
    for place in (tmp_path, tmp_path / "har.npz"):
        settings = DataSettings(dataset="har", data_dir=str(place), partition="natural")
        assert check_data(settings, 3).counts.sum(axis=1).tolist() == [8, 8, 8]
    data = client_data(settings, 3, 0)
    assert data.input_shape == (9, 128)
    assert data.scale.shape == (9, 1)
    assert data.label_names[5] == "laying"


def test_other_samples_have_another_fingerprint() -> None:
    inputs, labels = np.zeros((600, 1, 4, 4), dtype=np.uint8), np.arange(600) % 3
    pool = Pool(inputs, labels, ("a", "b", "c"), 600)
    swapped = labels.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    one = inputs.copy()
    one[1, 0, 3, 3] = 1
    owner = np.arange(600) % 4
    owned = replace(pool, owner=owner, owner_names=tuple("wxyz"))
    others = [
        replace(pool, inputs=one),
        owned,
        replace(owned, owner=owner[::-1].copy()),
        replace(owned, owner_names=tuple("zwxy")),
        replace(owned, in_train=owner < 3),
        replace(pool, num_train=500),
        replace(pool, inputs=inputs + 1),
        replace(pool, inputs=inputs.reshape(600, 1, 2, 8)),
        replace(pool, labels=swapped),
        replace(pool, label_names=("a", "b", "d")),
        Pool(inputs[:-1], labels[:-1], pool.label_names, 599),
    ]
    assert len({other.fingerprint for other in (pool, *others)}) == 12
    assert replace(pool, inputs=inputs.copy()).fingerprint == pool.fingerprint


def test_survives_any_flipped_byte(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = tmp_path / "set.npz"
    np.savez_compressed(file, x=rng.random((50, 8)).astype(np.float32), y=np.arange(50) % 3)
    whole = file.read_bytes()
    refused = 0
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_arrays(file, "test", ("x", "y"))
        except PbflError:
            refused += 1
    assert refused > len(whole) / 2


def test_complex_numbers_lose_no_part(save: Any) -> None:
    with pytest.raises(PbflError, match="is complex; must be real numbers"):
        load_pool(save(x=np.ones((4, 2)) * 1j, y=np.array([0, 1, 0, 1])))


def test_har_takes_names_in_its_own_order_and_needs_the_people(tmp_path: Path) -> None:
    har = DataSettings(dataset="har", data_dir=str(tmp_path), partition="iid")
    x, y = np.zeros((3, 9, 128)), np.array(["laying", "sitting", "walking"])
    np.savez(tmp_path / "har.npz", x=x, y=y, subject=np.arange(3))
    assert load_pool(har).labels.tolist() == [5, 3, 0]
    np.savez(tmp_path / "har.npz", x=x, y=y)
    with pytest.raises(PbflError, match="has no array 'subject'"):
        load_pool(har)
