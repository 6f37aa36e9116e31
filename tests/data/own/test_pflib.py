import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import check_data, client_data, export_pfl_directory, load_pool
from pbfl_flwr.data.own.inspection import inspect, settings_for
from pbfl_flwr.errors import PbflError
from tests.small_runs import pbfl


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def write_client(folder, client, train, test):
    for part, (x, y) in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        with (folder / part / f"{client}.npz").open("wb") as file:  # as the references write it
            np.savez_compressed(file, data=np.array({"x": x, "y": y}))


@pytest.fixture
def directory(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "set"
    for client, size in enumerate((8, 5)):
        x = rng.uniform(-1, 1, (size, 1, 4, 4)).astype(np.float32)
        y = np.arange(size) % 3
        write_client(folder, client, (x[:-2], y[:-2]), (x[-2:], y[-2:]))
    (folder / "config.json").write_text(json.dumps({"num_clients": 2, "num_classes": 4, "partition": "dir"}))
    return folder


def test_a_part_that_may_not_be_read_is_named(directory, unreadable):
    unreadable(directory / "train")
    with pytest.raises(PbflError, match=r"/train cannot be read \(Permission denied\)"):
        inspect(settings_for(directory))


def test_clients_are_the_files(directory):
    settings = DataSettings(dataset="pflib", data_dir=str(directory))
    part = check_data(settings, 2)
    assert part.counts.tolist() == [[3, 3, 2, 0], [2, 2, 1, 0]]  # labels 0,1,2,0,1,... of 8 and 5 samples
    for client, size in enumerate((6, 3)):
        with np.load(directory / "train" / f"{client}.npz", allow_pickle=True) as archive:
            content = archive["data"].tolist()
        data = client_data(settings, 2, client)
        assert np.array_equal(data.train.inputs.numpy(), content["x"])
        assert data.train.labels.tolist() == content["y"].tolist()
        assert (len(data.train), len(data.test)) == (size, 2)
        assert data.prepare(data.train.inputs).equal(data.train.inputs)
        assert data.num_classes == 4
    assert "partition settings do not apply" in part.notes[0]
    assert part.notes[1:] == ('config.json says partition = "dir"',)
    assert check_data(settings, 1).notes[1] == "the first 1 of 2 clients"
    with pytest.raises(PbflError, match="num-clients = 3: the dataset's files hold 2 clients"):
        check_data(settings, 3)


@pytest.mark.parametrize("dataset", ["digits", "spiral"])
def test_what_is_exported_comes_back_identical(tmp_path, dataset):
    settings = DataSettings(dataset=dataset, dirichlet_alpha=0.3)
    pool, part = load_pool(settings), check_data(settings, 12)
    export_pfl_directory(part, pool, tmp_path / "out")
    back = DataSettings(dataset="pflib", data_dir=str(tmp_path / "out"))
    assert np.array_equal(check_data(back, 12).counts, part.counts)
    for client in range(12):
        ours, theirs = client_data(settings, 12, client), client_data(back, 12, client)
        for mine, other in ((ours.train, theirs.train), (ours.test, theirs.test)):
            assert torch.equal(ours.prepare(mine.inputs), theirs.prepare(other.inputs))
            assert torch.equal(mine.labels, other.labels)
            assert other.inputs.dtype == torch.float32
    # and as the other tools read it
    with np.load(tmp_path / "out" / "train" / "0.npz", allow_pickle=True) as archive:
        assert archive["data"].tolist()["y"].tolist() == client_data(settings, 12, 0).train.labels.tolist()
    with pytest.raises(PbflError, match="already holds a dataset"):
        export_pfl_directory(part, pool, tmp_path / "out")


def test_reads_lists_and_big_endian_numbers(directory):
    rows = [[k, k + 0.5] for k in range(6)]
    values = np.array(rows)
    for x, y in ((rows, [0, 1, 2] * 2), (values.astype(">f8"), np.array([0, 1, 2] * 2, ">i2"))):
        for client in range(2):
            write_client(directory, client, (x, y), (x[:2], y[:2]))
        data = client_data(DataSettings(dataset="pflib", data_dir=str(directory)), 2, 1)
        assert data.train.inputs.tolist() == rows
        assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_client_with_an_empty_test_part_survives(tmp_path):
    write_client(
        tmp_path, 0, (np.zeros((2, 3), "f4"), np.array([0, 1])), (np.zeros((0, 3), "f4"), np.zeros(0, int))
    )
    (tmp_path / "config.json").write_text('{"num_clients": 1, "num_classes": 2}')
    data = client_data(DataSettings(dataset="pflib", data_dir=str(tmp_path)), 1, 0)
    assert (len(data.train), len(data.test)) == (2, 0)
    assert data.test.inputs.shape == (0, 3)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("inside", [lambda evil: evil, lambda evil: np.array([evil], dtype=object)])
def test_refuses_a_pickle_that_runs_code(directory, tmp_path, protocol, inside):
    import pickle

    marker = tmp_path / "was-run"
    path = directory / "train" / "0.npz"
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    header += "{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117).encode() + b"\n"
    evil = pickle.dumps({"x": inside(Malicious(marker)), "y": np.zeros(3)}, protocol=protocol)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", header + evil)
    with pytest.raises(
        PbflError, match=r"train/0.npz is refused: .*(mkdir|encode); only NumPy arrays are allowed"
    ):
        load_pool(DataSettings(dataset="pflib", data_dir=str(directory)))
    assert not marker.exists()


def one_client(x, y):
    """Let the second client's files hold this."""
    return lambda folder: write_client(folder, 1, (x, y), (x, y))


def of_a_folder(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def arrays(**content):
    return lambda folder: np.savez(folder / "test" / "1.npz", **content)


TWO = np.zeros(2, int)
IMAGES = np.zeros((2, 1, 4, 4))
NO_NUMBERS: list[list[Any]] = [[[1], [1, 2]], ["a" * 9, "b"], [10**400, 1], [{}, {}]]
REFUSED = "test/1.npz is refused|train/1.npz is refused"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "there is no .*config.json"),
        (of_a_folder, r"config\.json cannot be read \(Is a directory\)"),
        (config("{"), "must be JSON with num_clients"),
        (config("[" * 100_000), "must be JSON with"),
        (config('{"num_clients": 3, "num_classes": 4}'), "there is no .*train/2.npz"),
        (
            config('{"num_clients": 2, "num_classes": 2}'),
            r"train/0\.npz: y has the label 2; must be 0\.\.1, since num_classes in config\.json is 2",
        ),
        (one_client(IMAGES, np.array([0, 0.5])), r"y\[1\]: 0\.5 is not a whole number; a class is expected"),
        (
            one_client(IMAGES, np.array([np.nan, 1])),
            r"y\[0\]: nan is not a whole number; a class is expected",
        ),
        (config('{"num_clients": 2, "num_classes": 1000000000000}'), "must be 1 to 100000 and 2 to 10000"),
        (
            lambda folder: (folder / "test" / "1.npz").write_bytes(b"PK"),
            "test/1.npz is refused: File is not a zip",
        ),
        (arrays(other=1), "has no array 'data'"),
        (arrays(data=np.zeros(3)), "one pickled object is expected"),
        (arrays(data=np.array({"x": 1})), "must hold a dict with x and y"),
        (one_client(np.zeros((2, 5)), TWO), "the previous files have"),
        *(
            (
                one_client(np.full((2, 1, 4, 4), odd), TWO),
                r"train/1\.npz: x\[0\] holds NaN, infinity or a number bey",
            )
            for odd in (np.nan, np.inf, 1e39)
        ),
        (one_client(np.array(["a", "b"]), TWO), "only numbers are allowed"),
        (one_client(IMAGES, np.array(["a", "b"])), "only numbers are allowed"),
        *((one_client(x, TWO), REFUSED) for x in NO_NUMBERS),
    ],
)
def test_rejects_a_damaged_folder(directory, damage, message):
    damage(directory)
    with pytest.raises(PbflError, match=message):
        load_pool(DataSettings(dataset="pflib", data_dir=str(directory)))


def test_rejects_inputs_of_too_many_axes(directory):
    for client in range(2):
        write_client(directory, client, *[(np.zeros((2,) * 6), np.array([0, 1]))] * 2)
    with pytest.raises(PbflError, match="must be 1 to 4 axes, none of length 0"):
        load_pool(DataSettings(dataset="pflib", data_dir=str(directory)))


def test_check_data_reads_every_client_and_asks_for_one(directory):
    result = pbfl("check-data", directory)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert (
        "note: the files of 2 clients can be read; these are client 0's: each device needs a data-client"
        in text
    )
    assert "split on a device: 6 for training, 2 for testing" in text
    assert f"ok: --node-config \"client-id='NAME' data-path='{directory}' data-client=0\"" in text
    result = pbfl("check-data", directory, "--data-client", 1)
    assert "split on a device: 3 for training, 2 for testing" in result.output
    assert "data-client=1" in result.output
    (directory / "test" / "1.npz").write_bytes(b"")
    result = pbfl("check-data", directory)
    assert result.exit_code == 2
    assert str(directory / "test" / "1.npz") in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("x", "y", "refused"),
    [
        (
            np.zeros((0, 1, 4, 4)),
            TWO[:0],
            r"no sample in .*train/1\.npz, .*test/1\.npz; must be one or more$",
        ),
        (
            np.zeros((2, 1, 4, 5)),
            TWO,
            r"the files of client 1 have inputs of shape \(1, 4, 5\), those of client 0 of \(1, 4, 4\); must be the",
        ),
    ],
)
def test_check_data_names_the_client_whose_files_do_not_fit(directory, x, y, refused):
    one_client(x, y)(directory)
    with pytest.raises(PbflError, match=refused):
        inspect(settings_for(directory))


@pytest.mark.filterwarnings("error")
def test_check_data_takes_large_numbers_in_silence(tmp_path):
    write_client(tmp_path, 0, *[(np.linspace(-1e30, 1e30, 160).reshape(2, 4, 20), np.array([0, 1]))] * 2)
    (tmp_path / "config.json").write_text('{"num_clients": 1, "num_classes": 2}')
    assert inspect(settings_for(tmp_path)).maximum == pytest.approx(1e30)


def test_a_test_part_that_is_an_empty_list_survives(directory: Path) -> None:
    """As the references write a client without test samples: no axes, and float64."""
    write_client(directory, 1, (np.ones((3, 1, 4, 4), "f4"), np.arange(3)), ([], []))
    data = client_data(DataSettings(dataset="pflib", data_dir=str(directory)), 2, 1)
    assert (len(data.train), data.test.inputs.shape) == (3, (0, 1, 4, 4))


@pytest.mark.parametrize("labels", [np.zeros(2, int), np.zeros((3, 1), int)])
def test_another_number_of_labels_than_inputs_is_named(directory: Path, labels: np.ndarray) -> None:
    write_client(directory, 0, (np.ones((3, 1, 4, 4), "f4"), labels), ([], []))
    with pytest.raises(PbflError, match=r"train/0\.npz: x is float32 \(3, 1, 4, 4\), y int64 .* must be \(n"):
        load_pool(DataSettings(dataset="pflib", data_dir=str(directory)))


@pytest.mark.parametrize("clients", ["0", "100001", "Infinity"])
def test_a_number_of_clients_that_none_can_have_is_refused(directory: Path, clients: str) -> None:
    (directory / "config.json").write_text(f'{{"num_clients": {clients}, "num_classes": 4}}')
    with pytest.raises(
        PbflError, match=r"config\.json(: num_clients = .*; must be 1 to 100000| must be JSON)"
    ):
        load_pool(DataSettings(dataset="pflib", data_dir=str(directory)))
