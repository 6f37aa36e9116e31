"""What a device brings: kinds of data, names of classes, shapes; and what check-data says of it."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common.config import parse_config_args

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import (
    client_data,
    export_pfl_directory,
    kind_of,
    load_pool,
    names_file,
    own_data,
    own_pool,
    read_names,
)
from pbfl_flwr.data.own.inspection import SAME_CLASSES, inspect, settings_for
from pbfl_flwr.data.partition.assign import make_partition
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan.configuration import check, gather
from pbfl_flwr.flower.deploy.local_federation import complete, node_config
from tests.small_runs import pbfl


@pytest.fixture
def photos(tmp_path: Path, write_image: Callable[..., None]) -> Path:
    """Two of three classes; squares of 10x6 pixels."""
    (tmp_path / "photos/cat").mkdir(parents=True)
    (tmp_path / "photos/cat/notes.txt").touch()
    for label, colour in (("cat", (255, 0, 0)), ("emu", (0, 0, 255))):
        for n in range(4):
            write_image(tmp_path / "photos" / label / f"{n}.png", colour, (10, 6))
    return tmp_path / "photos"


def test_detects_the_kind_of_data(tmp_path: Path) -> None:
    kinds = {"a.npz": "npz", "a.CSV": "table", "a.tsv": "table", "a.parquet": "table"}
    assert {name: kind_of(Path(name)) for name in kinds} == kinds
    assert kind_of(tmp_path) == "image-folder"
    (tmp_path / "config.json").touch()
    (tmp_path / "train").mkdir()
    assert kind_of(tmp_path) == "pflib"
    with pytest.raises(PbflError, match=r"config\.json is not a known kind of data; must be \.npz, \.csv"):
        kind_of(tmp_path / "config.json")
    with pytest.raises(PbflError, match=r"^/dev/null is not a known kind of data"):
        kind_of(Path("/dev/null"))


def test_a_folder_that_lacks_a_class(photos: Path) -> None:
    settings = DataSettings(dataset="image-folder", data_dir=str(photos), labels="ant,cat,emu")
    pool = load_pool(settings)
    assert (pool.label_names, pool.labels.tolist()) == (("ant", "cat", "emu"), [1] * 4 + [2] * 4)
    (photos / "ant").mkdir()  # an empty folder is a class without images once the names are known
    assert load_pool(settings).num_classes == 3
    with pytest.raises(PbflError, match=r"photos has the class 'ant', 'emu'; labels allows cat, dog"):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(photos), labels="cat,dog"))
    shutil.rmtree(photos / "emu")  # one class alone takes part
    alone = load_pool(settings.model_copy(update={"labels": "ant,cat"}))
    assert alone.labels.tolist() == [1] * 4


def test_images_are_brought_to_a_shape(photos: Path) -> None:
    settings = DataSettings(dataset="image-folder", data_dir=str(photos))
    assert load_pool(settings).input_shape == (3, 6, 10)
    small = load_pool(settings.model_copy(update={"input_shape": "3,4,5"}))
    assert small.inputs[0].transpose(1, 2, 0).tolist() == [[[255, 0, 0]] * 5] * 4
    grey = load_pool(settings.model_copy(update={"input_shape": "1,4,5"}))
    assert np.unique(grey.inputs).tolist() == [29, 76]  # ITU-R 601: 0.114·255 and 0.299·255
    with pytest.raises(PbflError, match="images are channels,height,width with 1 or 3 channels"):
        load_pool(settings.model_copy(update={"input_shape": "4,5"}))


def test_reads_class_names_and_gaps_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array(["emu", "cat", "emu"]))
    settings = DataSettings(dataset="npz", data_dir=str(tmp_path / "a.npz"))
    assert load_pool(settings).label_names == ("cat", "emu")
    assert load_pool(settings.model_copy(update={"labels": "emu,cow,cat"})).labels.tolist() == [0, 2, 0]
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 2)), y=np.array([2, 0, 2]))
    gaps = DataSettings(dataset="npz", data_dir=str(tmp_path / "b.npz"))
    with pytest.raises(PbflError, match=r"without gaps, .* set labels to all classes"):
        load_pool(gaps)
    pool = load_pool(gaps.model_copy(update={"labels": "a,b,c,d"}))  # whole numbers are places in the list
    assert (pool.label_names, pool.labels.tolist()) == (("a", "b", "c", "d"), [2, 0, 2])


def test_any_dataset_can_be_renumbered_but_not_reshaped() -> None:
    names = "9,8,7,6,5,4,3,2,1,0,x"
    plain, turned = (load_pool(DataSettings(dataset="digits", labels=labels)) for labels in ("", names))
    assert np.array_equal(turned.labels, 9 - plain.labels)
    assert turned.num_classes == 11
    with pytest.raises(
        PbflError, match=r"input-shape = '3,8,8': dataset 'digits' has inputs of shape \(1, 16, 16\)"
    ):
        load_pool(DataSettings(dataset="digits", input_shape="3,8,8"))


def test_reads_class_names_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("\ufeffDermatofibroma, benign\r\n\r\nNevus\r\n", encoding="utf-8")
    text = read_names(tmp_path / "labels.txt")
    assert DataSettings(labels=text).classes == ("Dermatofibroma, benign", "Nevus")
    with pytest.raises(PbflError, match="not a readable text file"):
        read_names(tmp_path / "nothing.txt")


def test_names_with_commas_in_a_simulation_and_on_a_device(
    tmp_path: Path, write_image: Callable[..., None]
) -> None:
    for name in ("cat, big", "dog"):
        write_image(tmp_path / "photos" / name / "0.png", 3)
    (tmp_path / "names.txt").write_text("emu\ncat, big\ndog\n")
    for labels in ('emu,"cat, big",dog', str(tmp_path / "names.txt"), "emu\ncat, big\ndog"):
        keys = ["dataset=image-folder", f"data-dir={tmp_path / 'photos'}", f"labels={labels}"]
        pool = load_pool(check(gather(None, keys)).data)
        assert (pool.label_names, pool.labels.tolist()) == (("emu", "cat, big", "dog"), [1, 2])
    result = pbfl("check-data", tmp_path / "photos", "--labels", 'emu,"cat, big",dog')
    printed = shlex.split(result.stdout.rpartition("--node-config ")[2].replace("\n", ""))
    assert parse_config_args(printed)["labels"] == 'emu,"cat, big",dog'
    result = pbfl("check-data", tmp_path / "photos", "--labels", "emu,cat, big,dog")
    assert "class 'cat, big'; labels allows emu, cat, big, dog; a name with a comma" in result.stderr


def test_a_device_reads_its_own_files_of_a_pflib_folder(tmp_path: Path) -> None:
    source = DataSettings(dataset="digits", partition="iid")
    pool = load_pool(source)
    dealt = make_partition(pool, source, 3)
    export_pfl_directory(dealt, pool, tmp_path / "pfl")
    names = "nine,eight,seven,six,five,four,three,two,one,nought"  # the files' numbers are places in it
    settings = DataSettings(dataset="pflib", data_dir=str(tmp_path / "pfl"), partition="iid", labels=names)
    federated = client_data(settings, 3, 1)
    for other in (0, 2):
        for part in ("train", "test"):
            (tmp_path / f"pfl/{part}/{other}.npz").unlink()
    for data in (own_data(settings, 1), federated):
        assert data.label_names == tuple(names.split(","))
        assert np.array_equal(data.train.labels.numpy(), pool.labels[dealt.splits[1].train])
        assert np.array_equal(data.test.labels.numpy(), pool.labels[dealt.splits[1].test])
    assert len(own_pool(settings).labels) == len(own_pool(settings, 1).labels)  # the only ones there are
    with pytest.raises(PbflError, match=r"there is no .*train/0\.npz; set data-client"):
        own_data(settings, 0)
    for load in (own_pool, load_pool):
        with pytest.raises(PbflError, match=r"labels has 2 names, but .*config\.json says num_classes = 10"):
            load(settings.model_copy(update={"labels": "a,b"}))
    (tmp_path / "pfl/train/7.npz").touch()
    with pytest.raises(PbflError, match="holds the files of 2 clients; set data-client"):
        own_data(settings)


def test_rejects_an_image_larger_than_the_memory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 20)
    with pytest.raises(PbflError, match=r"0\.png: Image size \(60 pixels\); must be at most 20 pixels"):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(photos)))


# check-data -------------------------------------------------------------------------------------------------


def test_inspects_a_table(tmp_path: Path) -> None:
    rows = [
        "age,bp,always,label",
        *(f"{20 + i},{0.1 * i},5,{'ill' if i % 4 else 'well'}" for i in range(40)),
        "900,0,5,odd",
    ]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    actual = inspect(settings_for(tmp_path / "t.csv", labels="ill,odd,well,dead"))
    assert (actual.samples, actual.input_shape, actual.columns) == (41, (3,), ("age", "bp", "always"))
    assert (actual.minimum, actual.maximum) == (0.0, 900.0)
    assert actual.counts == (30, 1, 10, 0)
    assert sum(actual.train) == 30  # floor(0.75 · 41)
    text = "\n".join(actual.lines())
    assert "  ill   30  " + "█" * 40 + " (" in text
    assert "  well  10  " + "█" * 13 + " (" in text  # 40·10/30
    assert "warning: classes with one sample: odd" in text
    assert "warning: classes without samples here: dead" in text
    assert "column 'age' goes up to 900" in text
    assert "1 of 3 values of an input are the same in every sample" in text


def test_warns_of_windows_with_swapped_axes(tmp_path: Path) -> None:
    waves = np.sin(np.arange(64) * 0.2 + np.arange(20 * 3).reshape(20, 3, 1) * 1.7).astype(np.float32)
    readings = waves.transpose(0, 2, 1)
    noise = np.random.default_rng(0).normal(size=(20, 3, 64))
    made: dict[str, np.ndarray[Any, Any]] = {
        "right": waves,
        "tall": waves[:, :, None],
        "noise": noise,
        "table": noise.reshape(20, -1),
        "transposed": readings,
        "reshaped": readings.reshape(20, 3, 64),
    }
    warnings = {}
    for name, x in made.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.repeat(["run", "walk"], 10))
        warnings[name] = inspect(settings_for(tmp_path / f"{name}.npz")).warnings
    assert warnings["right"] == warnings["tall"] == warnings["noise"] == warnings["table"] == ()
    (transposed,), (reshaped,) = warnings["transposed"], warnings["reshaped"]
    assert "64 of 3 readings" in transposed
    assert "than in x.transpose(0, 2, 1):" in transposed
    assert "3 of 64 readings" in reshaped
    assert "than in x.reshape(-1, 64, 3).transpose(0, 2, 1):" in reshaped
    file = str(tmp_path / "transposed.npz")
    code, text = call(file, "--model", "har-cnn")  # the warning explains the refusal
    assert code == 2
    assert "than in x.transpose(0, 2, 1):" in text
    assert "refused: model 'har-cnn'" in text
    report = json.loads(call(file, "--model", "har-cnn", "--json")[1])
    assert (report["input_shape"], report["refused"][:15]) == ([64, 3], "model 'har-cnn'")


def test_warns_of_float_images_with_channels_last(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((8, 6 * 6 * 3))
    shapes = {"last": (6, 6, 3), "grey": (6, 6, 1), "first": (3, 6, 6), "windows": (3, 36, 1)}
    warned = set()
    for name, shape in shapes.items():
        file = tmp_path / f"{name}.npz"
        np.savez(file, x=values[:, : np.prod(shape)].reshape(8, *shape), y=np.arange(8) % 2)
        if "x.transpose(0, 3, 1, 2)" in " ".join(inspect(settings_for(file)).warnings):
            warned.add(name)
    assert warned == {"last", "grey"}


def test_warns_of_constant_images(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)
    x[6:] = 255
    np.savez(tmp_path / "half.npz", x=x, y=np.repeat(["ant", "bee"], 6))
    np.savez(tmp_path / "white.npz", x=np.full_like(x, 255), y=np.repeat(["ant", "bee"], 6))
    half, white = (inspect(settings_for(tmp_path / f"{name}.npz")).warnings for name in ("half", "white"))
    assert half == ("classes in whose images all values are equal: bee",)
    assert white == ("every value of every image is 255: they carry no information",)


def test_a_long_list_of_names_is_no_path(tmp_path: Path) -> None:
    names = ",".join(map(str, range(100)))
    assert len(names) > 255
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).random((8, 3)), y=np.arange(8))
    result = pbfl("check-data", tmp_path / "a.npz", "--labels", names)
    assert result.exit_code == 0
    assert f"labels='{names}'" in result.stdout.replace("\n", "")
    [node] = complete([{"labels": names}], 1, tmp_path)
    assert node["labels"] == names
    assert names_file("~a,b") is None
    (tmp_path / "names").write_text("ant\nbee\n")
    assert names_file(str(tmp_path / "names")) == tmp_path / "names"
    assert names_file("") is None
    for single in ("name.txt", "cat"):
        result = pbfl("check-data", tmp_path / "a.npz", "--labels", single)
        assert result.exit_code == 2
        assert result.stderr.startswith(
            f"error: refused: labels = '{single}': no such file; must be the names of all"
        )


def test_no_samples_at_all_are_refused_in_a_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((0, 3)), y=np.zeros(0, np.int64))
    for labels in ("a,b", ""):
        result = pbfl("check-data", tmp_path / "a.npz", "--labels", labels)
        assert result.exit_code == 2
        assert "has no samples; must be 1 or more" in result.stderr


def test_the_split_is_that_of_the_device(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(24, dtype=np.float32).reshape(12, 2), y=np.arange(12) % 3)
    settings = settings_for(tmp_path / "a.npz")
    actual, data = inspect(settings), own_data(settings)
    assert actual.train == tuple(data.counts.tolist())
    assert sum(actual.test) == len(data.test)


def call(*arguments: str) -> tuple[int, str]:
    result = pbfl("check-data", *arguments)
    return result.exit_code, result.output


def test_check_data_command(tmp_path: Path, photos: Path) -> None:
    code, text = call(str(photos), "--labels", "ant,cat,emu", "--input-shape", "1,16,16", "--model", "cnn2")
    assert code == 0, text
    keys = f"data-path='{photos}' labels='ant,cat,emu' input-shape='1,16,16' model='cnn2'"
    assert keys in text.replace("\n", "")
    code, text = call(str(photos), "--json")
    actual = json.loads(text)
    assert (code, actual["refused"], actual["counts"], actual["input_shape"]) == (0, None, [4, 4], [3, 6, 10])
    assert [note.partition(" files ignored")[0] for note in actual["notes"]] == [
        "1",
        SAME_CLASSES,
    ]  # notes.txt
    code, text = call(str(photos), "--labels", "cat,dog", "--json")
    assert (code, json.loads(text)["refused"]) == (2, f"{photos} has the class 'emu'; labels allows cat, dog")
    assert call(str(photos), "--model", "har-cnn")[0] == 2
    assert call(str(tmp_path / "nothing"))[0] == 2
    (tmp_path / "ok.npz").touch()
    code, text = call(str(tmp_path / "ok.npz"), "--dataset", "image-folder")
    assert (code, "is a file" in " ".join(text.split())) == (2, True)


@pytest.mark.parametrize(
    "name", ["plain.csv", "two words.csv", "Anna's.csv", 'the "new".csv', "$HOME.csv", "it's `a` \\ $b.csv"]
)
def test_printed_keys_can_be_pasted(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("a,label\n1,x\n2,y\n")
    code, text = call(str(path), "--label-column", "label")
    assert code == 0, text
    printed = shlex.split(text[text.index("--node-config") :])
    message = {"client-id": "NAME", "data-path": str(path), "label-column": "label"}
    assert (printed[0], len(printed)) == ("--node-config", 2)
    assert node_config(printed[1]) == parse_config_args(printed[1:]) == message


def test_names_keys_that_cannot_be_written(tmp_path: Path) -> None:
    (path := tmp_path / 'Anna\'s "own".csv').write_text("a,label\n1,x\n2,y\n")
    code, text = call(str(path))
    assert (code, "--node-config cannot contain data-path = " in text) == (0, True)
    assert "client-id" not in text


def test_check_data_imports_neither_flower_nor_ray(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label\n1,x\n2,y\n")
    script = (
        "import sys; from typer.testing import CliRunner; from pbfl_flwr.cli import app\n"
        f"assert CliRunner().invoke(app, ['check-data', {str(tmp_path / 't.csv')!r}]).exit_code == 0\n"
        "assert not {'flwr', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
