import gzip
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torchvision import datasets

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import DATASETS, check_data, client_data, load_pool
from pbfl_flwr.data.sources import idx_files
from pbfl_flwr.errors import PbflError


def test_digits_are_real_images_large_enough_for_two_5x5_convolutions():
    pool = load_pool(DataSettings(dataset="digits"))
    assert pool.inputs.shape == (1797, 1, 16, 16)
    assert pool.inputs.dtype == np.uint8
    assert (pool.inputs.min(), pool.inputs.max()) == (0, 255)
    assert np.array_equal(pool.inputs[:, :, ::2, ::2], pool.inputs[:, :, 1::2, 1::2])  # a pixel is 2x2
    assert np.bincount(pool.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert pool.num_train == 1797


def test_images_are_fed_between_minus_one_and_one():
    data = client_data(DataSettings(), 20, 0)
    fed = data.prepare(data.train.inputs)
    assert fed.dtype == torch.float32
    expected = (data.train.inputs.float() / 255 - 0.5) / 0.5
    assert torch.allclose(fed, expected, atol=1e-6)
    assert (fed.min().item(), fed.max().item()) == (-1, 1)
    assert data.scale.shape == (1, 1, 1)


def test_spiral_arms_are_told_apart_by_the_nearest_angle():
    pool = load_pool(DataSettings(dataset="spiral"))
    assert pool.inputs.shape == (30_000, 2)
    assert pool.inputs.dtype == np.float32
    x, y = pool.inputs.T.astype(np.float64)
    radius = np.hypot(x, y)
    assert radius.min() == pytest.approx(1, abs=1e-5)
    assert radius.max() == pytest.approx(10, abs=1e-4)
    # the middle of arm k at radius r is kπ/3 + (r-1)/9·π/3 + 1/4; noise is ±1/4 rad, half the spacing is π/6 = 0.52
    arm = (np.arctan2(x, y) - (radius - 1) / 9 * np.pi / 3 - 0.25) / (np.pi / 3)
    assert (np.rint(arm).astype(int) % 6 == pool.labels).all()
    assert client_data(DataSettings(dataset="spiral"), 10, 0).scale.tolist() == [1, 1]


def mnist_arrays(rows):
    rng = np.random.default_rng(rows)
    labels = np.arange(rows) % 10
    return rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8), labels


def write_mnist(folder, write_idx, prefix=("train-", "t10k-"), sizes=(30, 20)):
    written = []
    for part, rows in zip(prefix, sizes, strict=True):
        images, labels = mnist_arrays(rows)
        write_idx(folder / f"{part}images-idx3-ubyte", images)
        write_idx(folder / f"{part}labels-idx1-ubyte", labels)
        written.append(images)
    return np.concatenate(written)


@pytest.mark.parametrize(
    ("name", "folder", "prefix", "classes"),
    [
        ("mnist", "MNIST/raw", "", 10),
        ("mnist", "", "", 10),
        ("fashion-mnist", "FashionMNIST/raw", "", 10),
        ("emnist", "EMNIST/raw", "emnist-balanced-", 47),
    ],
)
def test_idx_files_as_torchvision_lays_them_out(tmp_path, write_idx, name, folder, prefix, classes):
    test = "test" if prefix else "t10k"
    images = write_mnist(tmp_path / folder, write_idx, (f"{prefix}train-", f"{prefix}{test}-"))
    pool = load_pool(DataSettings(dataset=name, data_dir=str(tmp_path)))
    assert np.array_equal(pool.inputs[:, 0], images)
    assert (pool.num_train, pool.num_classes) == (30, classes)
    assert pool.labels[30:].tolist() == (np.arange(20) % 10).tolist()


def test_fashion_mnist_is_found_where_debian_puts_it(tmp_path, write_idx, monkeypatch):
    debian = tmp_path / "share"
    images = write_mnist(debian, write_idx)
    for path in list(debian.iterdir()):
        (debian / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    monkeypatch.setattr(idx_files, "DEBIAN_FASHION_MNIST", debian)
    pool = load_pool(DataSettings(dataset="fashion-mnist"))
    assert np.array_equal(pool.inputs[:, 0], images)
    assert pool.label_names[9] == "Ankle boot"
    given = tmp_path / "nowhere"  # who names a place means no other one
    with pytest.raises(PbflError, match=f"looked for {given}") as error:
        load_pool(DataSettings(dataset="fashion-mnist", data_dir=str(given)))
    assert str(debian) not in str(error.value)


def test_rejects_a_gzipped_file_larger_than_the_memory(tmp_path, write_idx, monkeypatch):
    write_mnist(tmp_path, write_idx)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    write_idx(tmp_path / "large", np.zeros((2**12, 32, 64)))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress((tmp_path / "large").read_bytes()))
    monkeypatch.setattr("os.sysconf", lambda name: 1024)
    with pytest.raises(
        PbflError, match=r"idx3-ubyte\.gz holds 8 MiB, more than this machine's memory of 1 MiB"
    ):
        load_pool(DataSettings(dataset="mnist", data_dir=str(tmp_path)))


def test_rejects_files_with_other_content(tmp_path, write_idx):
    write_mnist(tmp_path, write_idx)
    file, labels = tmp_path / "t10k-images-idx3-ubyte", (tmp_path / "t10k-labels-idx1-ubyte").read_bytes()
    for content, message in (
        (file.read_bytes()[:500], f"{file} is incomplete or damaged"),
        (labels, "t10k-images-idx3-ubyte is no idx file of bytes with 3 axes"),
    ):
        file.write_bytes(content)
        with pytest.raises(PbflError, match=message):
            load_pool(DataSettings(dataset="mnist", data_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar10", "cifar100", "flowers102", "gtsrb"])
def test_missing_data_names_the_places_and_the_download(tmp_path, name):
    with pytest.raises(PbflError) as caught:
        check_data(DataSettings(dataset=name, data_dir=str(tmp_path)), 5)
    message = str(caught.value)
    assert f"dataset '{name}' not found; looked for {tmp_path}" in message
    assert f"download=true, which stores it at {tmp_path}" in message
    assert not list(tmp_path.glob("*/*"))  # nothing was fetched or made


def test_the_default_place_is_below_home(home):
    with pytest.raises(PbflError, match=str(home / "data")):
        check_data(DataSettings(dataset="mnist"), 5)


def test_a_download_happens_when_it_is_allowed(tmp_path, write_idx, monkeypatch):
    calls = []

    def fake(root: Path, download: bool) -> None:
        calls.append((root, download))
        write_mnist(root / "MNIST" / "raw", write_idx)

    monkeypatch.setattr(datasets, "MNIST", fake)
    pool = load_pool(DataSettings(dataset="mnist", data_dir=str(tmp_path / "new"), download=True))
    assert calls == [(tmp_path / "new", True)]
    assert len(pool.labels) == 50


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_failed_download_is_one_clear_line(tmp_path, monkeypatch, kind):
    def fake(root: Path, download: bool) -> None:
        raise kind("no network")

    monkeypatch.setattr(datasets, "MNIST", fake)
    with pytest.raises(PbflError, match=f"the download to {tmp_path}/MNIST/raw failed: no network"):
        load_pool(DataSettings(dataset="mnist", data_dir=str(tmp_path), download=True))
    assert not (tmp_path / "MNIST").exists()


def write_cifar10(folder):
    folder.mkdir(parents=True)
    rows = np.random.default_rng(0).integers(0, 256, (60, 3072), dtype=np.uint8)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        part = slice(10 * number, 10 * number + 10)
        (folder / name).write_bytes(pickle.dumps({"data": rows[part], "labels": list(range(10))}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {k}" for k in range(10)]}))
    return rows


@pytest.fixture
def any_checksum(monkeypatch):
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).exists()
    )


@pytest.mark.usefixtures("any_checksum")
def test_cifar_files_as_torchvision_lays_them_out(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    rows = write_cifar10(folder)
    pool = load_pool(DataSettings(dataset="cifar10", data_dir=str(tmp_path)))
    assert np.array_equal(pool.inputs.reshape(60, 3072), rows)  # the file's own order: channel, row, column
    assert (pool.num_train, pool.num_classes) == (50, 10)
    (folder / "data_batch_3").unlink()
    with pytest.raises(PbflError, match=r"looked for \S+/data_batch_3; set data-dir, or download=true"):
        load_pool(DataSettings(dataset="cifar10", data_dir=f"{tmp_path}/."))


def test_damaged_cifar_files_are_named(tmp_path):
    write_cifar10(tmp_path / "cifar-10-batches-py")  # with other checksums than the published ones
    with pytest.raises(PbflError, match="incomplete or damaged"):
        load_pool(DataSettings(dataset="cifar10", data_dir=str(tmp_path)))


@pytest.mark.usefixtures("any_checksum")
@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a part"])
def test_cifar_is_downloaded_when_it_is_allowed(tmp_path, monkeypatch, there):
    folder, calls = tmp_path / "new" / "cifar-10-batches-py", []
    if there != "nothing":
        folder.mkdir(parents=True)
    if there == "a part":
        (folder / "data_batch_1").touch()

    def fake(dataset: datasets.CIFAR10) -> None:
        calls.append(dataset.root)
        shutil.rmtree(folder, ignore_errors=True)
        write_cifar10(folder)

    monkeypatch.setattr(datasets.CIFAR10, "download", fake)
    settings = DataSettings(dataset="cifar10", data_dir=str(tmp_path / "new"), download=True)
    assert len(load_pool(settings).labels) == 60
    assert calls == [tmp_path / "new"]


def test_cifar10_takes_an_image_folder(tmp_path, write_image):
    for part, number in (("train", 3), ("test", 2)):
        for label, name in enumerate(("airplane", "bird")):
            for i in range(number):
                write_image(tmp_path / part / name / f"{i}.png", (label, i, 7), (32, 32))
    pool = load_pool(DataSettings(dataset="cifar10", data_dir=str(tmp_path)))
    assert pool.inputs.shape == (10, 3, 32, 32)
    assert pool.label_names == ("airplane", "bird")
    assert pool.num_train == 6
    assert pool.labels.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert pool.inputs[:, :, 5, 5].tolist()[4] == [1, 1, 7]


def test_gtsrb_is_resized(tmp_path, write_image):
    base = tmp_path / "gtsrb"
    for label in (0, 1):
        write_image(base / "GTSRB" / "Training" / f"{label:05d}" / "0.ppm", (label, 2, 3), (50, 40))
    write_image(base / "GTSRB" / "Final_Test" / "Images" / "00000.ppm", (9, 9, 9), (20, 70))
    (base / "GT-final_test.csv").write_text("Filename;Width;ClassId\n00000.ppm;20;42\n")
    pool = load_pool(DataSettings(dataset="gtsrb", data_dir=str(tmp_path)))
    assert pool.inputs.shape == (3, 3, 32, 32)
    assert pool.labels.tolist() == [0, 1, 42]
    assert (pool.num_train, pool.num_classes) == (2, 43)
    assert pool.inputs[1, :, 31, 0].tolist() == [1, 2, 3]


def test_flowers_are_train_val_and_test_in_that_order(tmp_path, write_image, monkeypatch):
    base = tmp_path / "flowers-102"
    for number in range(1, 7):
        write_image(base / "jpg" / f"image_{number:05d}.jpg", (10 * number,) * 3, (90, 70))
    savemat(base / "imagelabels.mat", {"labels": [1, 2, 3, 102, 1, 2]})  # 1-based
    savemat(base / "setid.mat", {"trnid": [6, 1], "valid": [2, 3], "tstid": [4, 5]})
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda path, md5=None: True)
    pool = load_pool(DataSettings(dataset="flowers102", data_dir=str(tmp_path)))
    assert pool.inputs.shape == (6, 3, 64, 64)
    assert pool.labels.tolist() == [1, 0, 1, 2, 101, 0]
    assert pool.num_train == 4
    assert pool.num_classes == 102


def test_tiny_imagenet_in_its_own_layout(tmp_path, write_image):
    base = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(("n01", "n02")):
        for i in range(2):
            write_image(base / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", (40 * label,) * 3, (64, 64))
    write_image(base / "val" / "images" / "val_0.JPEG", 200, (64, 64))  # some of the set's images are grey
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t63\t63\n")
    (base / "words.txt").write_text("n01\tgoldfish\nn02\tsalamander\nn03\tother\n")
    settings = DataSettings(dataset="tiny-imagenet", data_dir=str(tmp_path))
    pool = load_pool(settings)
    assert pool.inputs.shape == (5, 3, 64, 64)
    assert pool.labels.tolist() == [0, 0, 1, 1, 1]
    assert pool.num_train == 4
    assert pool.label_names == ("goldfish", "salamander")
    assert pool.inputs[4, :, 0, 0].tolist() == [200, 200, 200]
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\n")
    with pytest.raises(PbflError, match=r"val_annotations\.txt, line 1"):
        load_pool(DataSettings(dataset="tiny-imagenet", data_dir=str(base)))


def test_datasets_that_need_a_path_say_so():
    for name in ("npz", "har", "image-folder", "pflib"):
        with pytest.raises(PbflError, match=f"dataset '{name}' needs data-dir"):
            check_data(DataSettings(dataset=name), 2)


@pytest.mark.parametrize("name", ["digits", "spiral"])
def test_datasets_that_need_no_files_refuse_a_path(tmp_path, name):
    with pytest.raises(PbflError, match=f"data-dir = '{tmp_path}': dataset = '{name}' needs no files"):
        check_data(DataSettings(dataset=name, data_dir=str(tmp_path)), 2)


def test_every_dataset_has_a_line_of_description():
    for name, dataset in DATASETS.items():
        assert name == name.lower()
        assert 20 < len(dataset.description) < 110
        assert "\n" not in dataset.description
