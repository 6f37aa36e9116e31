"""Own data in four formats, trained by real messages, exported, and used on files: the same answers everywhere."""

import errno
import json
import logging
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_iris
from torch import Tensor, nn
from torch.nn import functional as F

from pbfl_flwr.config import Settings, parse
from pbfl_flwr.data import ClientData, Shard, own_data
from pbfl_flwr.data.own.inspection import settings_for
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import random_inputs
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.serving.export import export, lacking_for_onnx
from pbfl_flwr.serving.exported import BATCH, Exported, open_exported
from pbfl_flwr.serving.network import Served, rebuild
from pbfl_flwr.serving.predict import Prediction, predict, written
from pbfl_flwr.serving.states import SavedModel, read_state, state_file
from pbfl_flwr.util.user_code import own_code
from tests.flower.inprocess import federation
from tests.small_runs import pbfl

DIGITS = "0,1,2,3,4,5,6,7,8,9"
SHAPE = "3,16,16"


def pictures(
    start: int, count: int, keep: tuple[int, ...] = tuple(range(10))
) -> tuple[np.ndarray, np.ndarray]:
    """Digits as uint8 (n, 16, 16), each pixel doubled."""
    actual = load_digits()
    rows = [i for i in range(start, len(actual.target)) if actual.target[i] in keep][:count]
    images = np.repeat(np.repeat(np.minimum(actual.images[rows] * 16, 255), 2, axis=1), 2, axis=2)
    return images.astype(np.uint8), actual.target[rows]


def rgb(images: np.ndarray) -> np.ndarray:
    return np.repeat(images[:, None], 3, axis=1)


@dataclass(frozen=True)
class Ran:
    """What a federation left behind."""

    place: Path
    names: list[str]  # of the clients, in the order of their numbers
    line: dict[str, Any]  # of clients.jsonl, the last round
    data: dict[str, ClientData]

    def correct(self, name: str) -> dict[str, int]:
        actual: dict[str, int] = self.line["correct"][self.line["client"].index(self.names.index(name))]
        return actual

    def kept(self, name: str) -> SavedModel:
        return read_state(state_file(self.place / "state", name))


def write_csv(path: Path, columns: list[str], values: np.ndarray, classes: np.ndarray) -> None:
    rows = [[*map(float, row), label] for row, label in zip(values, classes, strict=True)]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in [[*columns, "label"], *rows]))


TOPICS = ("treaty embassy border", "goal coach league", "profit merger shares", "satellite chip browser")
NETWORKS = {"north": "fasttext", "south": "textcnn"}


def write_news(folder: Path) -> None:
    draw = random.Random(0)
    folder.mkdir()
    for name, rows in (("train", 80), ("test", 20)):
        lines = []
        for row in range(rows):
            title, text = (" ".join(draw.choices(TOPICS[row % 4].split(), k=k)) for k in (2, 6))
            lines.append(f'"{row % 4 + 1}","{title.title()}","The {text}."\n')
        (folder / f"{name}.csv").write_text("".join(lines))


def ran(place: Path, nodes: list[dict[str, Any]], **keys: Any) -> Ran:
    for node in nodes:
        node["state-dir"] = str(place / "state")
    keys = {"num_clients": len(nodes), "num_server_rounds": 2, **keys}
    federation(place, data=None, on_disk=True, node_configs=nodes, partitions=range(len(nodes)), **keys).run()
    names = [client.name for client in RunDirectory(place / "run").record().clients]
    line = json.loads((place / "run/clients.jsonl").read_text().splitlines()[-1])
    data = {}
    for node in nodes:
        own = {key: node.get(key.replace("_", "-"), "") for key in ("dataset", "labels", "input_shape")}
        data[node["client-id"]] = own_data(settings_for(Path(node["data-path"]), **own))
    return Ran(place, names, line, data)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("serving")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBFL_HOME", str(place / "home"))
        yield place


@pytest.fixture(scope="module")
def sites(place: Path) -> Ran:
    """Arrays of all digits, a table of their normalised pixels, a folder with photographs of two digits only."""
    x, y = pictures(0, 60)
    np.savez(place / "clinic.npz", x=rgb(x), y=y)
    x, y = pictures(60, 60)
    names = [f"p{i}" for i in range(768)]
    write_csv(place / "lab.csv", names, (rgb(x).reshape(-1, 768) / 255 - 0.5) / 0.5, y)
    x, y = pictures(200, 30, (3, 7))
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        folder = place / "photos" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).resize((20, 20)).save(folder / f"{number}.png")
    nodes: list[dict[str, Any]] = [
        {"client-id": "clinic", "data-path": str(place / "clinic.npz"), "model": "resnet4+24"},
        {"client-id": "lab", "data-path": str(place / "lab.csv"), "input-shape": SHAPE, "model": "cnn4"},
        {"client-id": "van", "data-path": str(place / "photos"), "labels": DIGITS, "input-shape": SHAPE,
         "model": "cnn2"},
    ]  # fmt: skip
    return ran(place, nodes)


@pytest.fixture(scope="module")
def flowers(place: Path) -> Ran:
    (place / "flowers").mkdir()
    iris = load_iris()
    classes = np.array([iris.target_names[j] for j in iris.target])
    columns = ["sepal length", "sepal width", "petal length", "petal width"]
    write_csv(place / "flowers/iris.csv", columns, iris.data / 4 - 1, classes)
    nodes = [{"client-id": "garden", "data-path": str(place / "flowers/iris.csv")}]
    return ran(place / "flowers", nodes, models="mlp5", feature_dim=8, learning_rate=0.1)


@pytest.fixture(scope="module")
def texts(place: Path) -> Ran:
    write_news(place / "news")
    common = {"data-path": str(place / "news"), "dataset": "ag-news"}
    nodes: list[dict[str, Any]] = [
        {"client-id": name, "model": model, **common} for name, model in NETWORKS.items()
    ]
    (place / "texts").mkdir()
    return ran(place / "texts", nodes, num_server_rounds=3, feature_dim=16, learning_rate=0.005)


def test_three_formats_in_one_federation(sites: Ran) -> None:
    assert sites.names == ["clinic", "lab", "van"]
    assert sites.line["num_train"] == [45, 45, 22]
    van = sites.kept("van").card
    assert (van.labels, van.input_shape, van.images) == (tuple(DIGITS.split(",")), (3, 16, 16), True)
    assert sites.data["van"].counts.nonzero().flatten().tolist() == [3, 7]
    assert sites.kept("van").prototypes["local.candidates"].nonzero().flatten().tolist() == [3, 7]
    assert bool(sites.kept("van").prototypes["global.candidates"].all())  # it learned of the others' classes


def live(run: Ran, name: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the client's own network answers, by the way that training takes."""
    kept = run.kept(name)
    model = build_model(kept.card.architecture, kept.card.task, 5)
    model.load_state_dict(kept.weights)
    model.eval()
    with torch.inference_mode():
        features = model.features(run.data[name].prepare(inputs))
        return model.head(features), features


@pytest.fixture(scope="module")
def runs(sites: Ran, flowers: Ran, texts: Ran) -> dict[str, Ran]:
    """Client -> its run."""
    return {"clinic": sites, "garden": flowers, **dict.fromkeys(NETWORKS, texts)}


@pytest.fixture(scope="module")
def exported(runs: dict[str, Ran]) -> dict[str, Path]:
    """Client -> directory of its exported model."""
    for name, run in runs.items():
        result = pbfl("export", run.place / "state", "--client", name, "--out", run.place / name)
        assert result.exit_code == 0, result.output
        assert f"client {name}, fedproto" in result.output
    return {name: run.place / name for name, run in runs.items()}


@pytest.fixture(params=["clinic", "garden", *NETWORKS])
def tested(
    request: pytest.FixtureRequest, runs: dict[str, Ran], exported: dict[str, Path]
) -> tuple[str, Ran, Path]:
    """A client's name, its run and its exported model."""
    return request.param, runs[request.param], exported[request.param]


def raw(inputs: Tensor) -> Tensor:
    """Return inputs as an exported program takes them: token ids as int64, everything else as float32."""
    return inputs.long() if inputs.dtype is torch.int32 else inputs.float()


def test_the_program_answers_as_the_live_model(tested: tuple[str, Ran, Path]) -> None:
    name, run, place = tested
    inputs = run.data[name].test.inputs
    expected = live(run, name, inputs)
    program = torch.export.load(place / "model.pt2").module()
    with torch.inference_mode():
        for rows in (slice(0, 1), slice(None)):  # any number of inputs
            torch.testing.assert_close(program(raw(inputs[rows])), tuple(part[rows] for part in expected))
    served = open_exported(place).served
    with torch.inference_mode():
        torch.testing.assert_close(served(raw(inputs)), expected)


def test_onnx_answers_as_the_live_model(tested: tuple[str, Ran, Path]) -> None:
    name, run, place = tested
    if lacking_for_onnx():
        assert not (place / "model.onnx").exists()
        pytest.skip("onnx and onnxscript are not installed")
    reference = pytest.importorskip("onnx.reference")
    inputs = run.data[name].test.inputs
    session = reference.ReferenceEvaluator(str(place / "model.onnx"))
    values = [*session.proto_.graph.input, *session.proto_.graph.output]
    assert {value.type.tensor_type.shape.dim[0].dim_param for value in values} == {"batch"}
    actual = session.run(["logits", "features"], {"inputs": raw(inputs).numpy()})
    for part, expected in zip(actual, live(run, name, inputs), strict=True):
        np.testing.assert_allclose(part, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_predictions_are_those_that_the_round_was_scored_by(tested: tuple[str, Ran, Path]) -> None:
    """The books of the last round hold the correct test samples of every predictor, made after the same training."""
    name, run, place = tested
    model, test = open_exported(place), run.data[name].test
    assert set(run.correct(name)) == {"head", *model.prototypes}
    assert set(model.prototypes) == {"global", "global-local", "local"}
    for by, correct in run.correct(name).items():
        actual = model.probabilities(test.inputs.numpy(), by)
        assert int((actual.argmax(dim=1) == test.labels).sum()) == correct, by
        torch.testing.assert_close(actual.sum(dim=1), torch.ones(len(test), dtype=torch.float64))


def test_a_class_without_a_prototype_is_not_predicted(sites: Ran, tmp_path: Path) -> None:
    kept = sites.kept("van")
    weights = {name: tensor.clone() for name, tensor in kept.weights.items()}
    export(replace(kept, weights=weights), tmp_path / "van")
    x, _ = pictures(0, 40)
    actual = open_exported(tmp_path / "van").probabilities(rgb(x), "local")
    assert actual[:, [0, 1, 2, 4, 5, 6, 8, 9]].max() == 0
    # by hand: softmax of -‖f - c‖² over classes 3 and 7
    _, features = live(sites, "van", torch.from_numpy(rgb(x)))
    rows = kept.prototypes["local.rows"][[3, 7]]
    distance = (features[:, None].double() - rows.double()).square().sum(dim=2)
    torch.testing.assert_close(actual[:, [3, 7]], (-distance).softmax(dim=1), atol=1e-4, rtol=1e-3)


def test_images_arrays_and_tables(
    sites: Ran,
    flowers: Ran,
    exported: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, _ = pictures(300, 3)
    Image.fromarray(rgb(x)[0].transpose(1, 2, 0)).save(tmp_path / "a.png")
    Image.fromarray(x[1]).save(tmp_path / "b.png")  # grey becomes RGB
    (tmp_path / "._b.png").write_bytes(b"what macOS writes beside a picture")
    np.savez(tmp_path / "x.npz", x=rgb(x))
    clinic = open_exported(exported["clinic"])
    alone = list(predict(clinic, [tmp_path / "x.npz"]))
    folder = list(predict(clinic, [tmp_path]))  # its images
    assert f"{tmp_path}: 2 files ignored that are not images" in caplog.text
    assert [(Path(p.file).name, p.row) for p in alone + folder] == [
        ("x.npz", 1), ("x.npz", 2), ("x.npz", 3), ("a.png", 0), ("b.png", 0)
    ]  # fmt: skip
    for one, other in zip(folder, alone, strict=False):
        assert one.label == other.label
        assert one.probabilities == pytest.approx(other.probabilities, rel=1e-4)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "more").symlink_to(sites.place / "photos" / "3")  # as training finds them
    linked = list(predict(clinic, [tmp_path / "empty"]))
    assert len(linked) == len(list((sites.place / "photos" / "3").glob("*.png"))) > 0
    (tmp_path / "empty" / "gone.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PbflError, match=r"there is no .*gone\.png"):
        list(predict(clinic, [tmp_path / "empty"]))
    garden = open_exported(exported["garden"])
    rows = list(predict(garden, [flowers.place / "iris.csv"]))
    assert [row.row for row in rows] == list(range(1, 151))
    turned = tmp_path / "turned.csv"  # columns are found by name, the label is not needed
    turned.write_text("petal width,petal length,sepal width,sepal length\n-1,-0.5,0,0.5\n")
    expected = live(flowers, "garden", torch.tensor([[0.5, 0.0, -0.5, -1.0]]))[0].softmax(dim=1)[0]
    assert next(predict(garden, [turned])).probabilities == pytest.approx(expected.tolist(), rel=1e-4)


def call(*arguments: object) -> tuple[int, str]:
    result = pbfl(*arguments)
    return result.exit_code, result.output


def test_the_command_and_its_formats(exported: dict[str, Path], flowers: Ran) -> None:
    model, file = exported["garden"], flowers.place / "iris.csv"
    code, text = call("predict", model, file, "--format", "csv", "--by", "global")
    assert (code, text.splitlines()[0], len(text.splitlines())) == (0, "file,row,class,probability", 151)
    entries = json.loads(call("predict", model, file, "--format", "json")[1])
    assert set(entries[0]["probabilities"]) == {"setosa", "versicolor", "virginica"}
    assert sum(entries[7]["probabilities"].values()) == pytest.approx(1)
    assert entries[7]["probability"] == max(entries[7]["probabilities"].values())
    code, text = call("predict", model, file)
    assert (code, text.split()[:4]) == (0, ["file", "row", "class", "probability"])
    code, text = call("predict", model, file, "--by", "etf")
    assert (code, "this model has head, global, global-local, local" in text) == (2, True)
    assert call("predict", flowers.place, file)[0] == 2


def test_what_does_not_fit_is_one_line(
    exported: dict[str, Path], sites: Ran, flowers: Ran, tmp_path: Path
) -> None:
    clinic, garden = (open_exported(exported[name]) for name in ("clinic", "garden"))
    image = next((sites.place / "photos").rglob("*.png"))
    np.savez(tmp_path / "small.npz", x=np.zeros((2, 3, 8, 8), np.uint8))
    np.savez(tmp_path / "float.npz", x=np.zeros((2, 3, 16, 16)))
    np.savez(tmp_path / "nan.npz", x=np.full((2, 4), np.nan))
    np.savez(tmp_path / "huge.npz", x=np.full((2, 4), 1e39))
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    (tmp_path / "noise.png").write_bytes(b"no picture")
    (tmp_path / "few.csv").write_text("sepal length,petal width\n1,2\n")
    (tmp_path / "empty").mkdir()
    table, small = flowers.place / "iris.csv", tmp_path / "small.npz"
    cases: list[tuple[Exported, Path, str]] = [
        (garden, image, r"is an image, but this model takes numbers of shape \(4,\)"),
        (clinic, table, r"is a table, but this model takes images of shape \(3, 16, 16\)"),
        (clinic, small, r"x is uint8 \(2, 3, 8, 8\), this model takes uint8 \('N', 3, 16, 16\)"),
        (clinic, tmp_path / "float.npz", "x is float64"),
        (garden, tmp_path / "nan.npz", "holds NaN, infinity or a number beyond float32"),
        (garden, tmp_path / "huge.npz", "holds NaN, infinity or a number beyond float32"),
        (garden, tmp_path / "y.npz", r"has no array 'x'; it has \['y'\]"),
        (clinic, tmp_path / "noise.png", "is not a readable image"),
        (garden, tmp_path / "few.csv", "has no column 'sepal width'"),
        (clinic, tmp_path / "empty", "holds no image"),
        (clinic, tmp_path / "nothing.png", "there is no"),
        (clinic, exported["clinic"] / "card.json", "must be one of images"),
    ]
    for model, file, message in cases:
        with pytest.raises(PbflError, match=message):
            list(predict(model, [file]))


def test_nothing_is_unpickled_and_damage_is_found(exported: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(exported["garden"], tmp_path / "copy")
    (copy / "model.pt2").write_bytes(b"a program that would run")  # never read
    open_exported(copy)
    for name in ("model.safetensors", "prototypes.safetensors"):
        good = (copy / name).read_bytes()
        (copy / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(
            PbflError, match=rf"{name} cannot be read \(its sha256 is not the one in card.json\)"
        ):
            open_exported(copy)
        (copy / name).write_bytes(good)
    content = json.loads((copy / "card.json").read_text())
    for change, message in (
        ({"architecture": "har-cnn"}, "har-cnn"),
        ({"architecture": "os:getcwd"}, "is the code os:getcwd, .* allow it with --model os:getcwd"),
        ({"feature_dim": 9}, "the weights are not those of mlp5"),
        ({"feature_dim": 10**9}, "feature_dim: Input should be less than or equal to 65536"),
        ({"labels": ["a"]}, "1 labels for 3 classes"),
        ({"scale": [1.0]}, "one number per channel"),
        ({"surprise": 1}, "surprise: Extra inputs"),
    ):
        (copy / "card.json").write_text(json.dumps({**content, "card": {**content["card"], **change}}))
        with pytest.raises(PbflError, match=message):
            open_exported(copy)
    for text, message in (
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"format": 2}', "format 2, expected 1"),
    ):
        (copy / "card.json").write_text(text)
        with pytest.raises(PbflError, match=message):
            open_exported(copy)


def test_files_of_an_exported_model_are_files_with_an_end(exported: dict[str, Path], tmp_path: Path) -> None:
    for name in ("card.json", "model.safetensors"):
        copy = shutil.copytree(exported["clinic"], tmp_path / name)
        (copy / name).unlink()
        (copy / name).symlink_to("/dev/zero")
        with pytest.raises(PbflError, match=f"{name} is not a regular file"):
            open_exported(copy)
        (copy / name).unlink()
        os.mkfifo(copy / name)
        with pytest.raises(PbflError, match=f"{name} is not a regular file"):
            open_exported(copy)
        (copy / name).unlink()
        (copy / name).symlink_to(exported["clinic"] / name)  # as in a cache of files named by their hashes
        open_exported(copy)


def test_where_a_state_is_looked_for(sites: Ran, tmp_path: Path) -> None:
    folder = next((sites.place / "state").iterdir())
    file = folder / "named-lab.safetensors"
    assert (
        state_file(file, "") == state_file(folder, "lab") == state_file(sites.place / "state", "lab") == file
    )
    with pytest.raises(PbflError, match=r"holds the clients clinic, lab, van; select one with --client"):
        state_file(folder, "")
    with pytest.raises(PbflError, match=r"--client lab: .* is the state of one client; name its directory"):
        state_file(file, "lab")
    with pytest.raises(PbflError, match=r"holds no client 3; it holds the clients clinic, lab, van"):
        state_file(folder, "3")
    with pytest.raises(PbflError, match="does not exist"):
        state_file(tmp_path / "nothing", "")
    with pytest.raises(PbflError, match="holds neither a run nor client states"):
        state_file(tmp_path, "")
    for age, name in enumerate(("b", "a", "c")):
        (tmp_path / "several" / name).mkdir(parents=True)
        (tmp_path / "several" / name / "named-lab.safetensors").touch()
        os.utime(tmp_path / "several" / name, (10**9 - age, 10**9 - age))
    with pytest.raises(PbflError, match=r"states of several runs; .* newest first: \S+/b, \S+/a, \S+/c$"):
        state_file(tmp_path / "several", "")
    run = tmp_path / "run"
    (run / "clients/e").mkdir(parents=True)
    about = RunDirectory(sites.place / "run").record()
    about = about.model_copy(update={"experiment": "e", "configuration": {"state-dir": ""}})
    (run / "run.json").write_text(json.dumps(about.to_json()))
    (run / "clients/e/client-00012.safetensors").touch()
    assert state_file(run, "12") == state_file(run, "") == run / "clients/e/client-00012.safetensors"
    with pytest.raises(PbflError, match="already holds files"):
        export(sites.kept("lab"), run)


def test_a_folder_of_states_that_may_not_be_read_is_not_passed_over(
    tmp_path: Path, unreadable: Callable[..., None]
) -> None:
    for name in ("new", "old", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "named-lab.safetensors").touch()
    unreadable(tmp_path / "new", tmp_path / "lost+found")
    with pytest.raises(PbflError, match=r"/new cannot be read \(Permission denied\)$"):
        state_file(tmp_path, "lab")
    (tmp_path / "new").rename(tmp_path / "lost+found" / "new")
    assert state_file(tmp_path, "lab") == tmp_path / "old" / "named-lab.safetensors"


def five_axes(settings: Settings, client: int) -> ClientData:
    """What an app's own data may be, and data that are read from files may not."""
    labels = torch.arange(8) % 2
    x = torch.randn(8, 2, 2, 2, 2, 2, generator=torch.Generator().manual_seed(client))
    ones = torch.ones(2, 1, 1, 1, 1)
    return ClientData(Shard(x, labels), Shard(x, labels), 2, ("a", "b"), ones, 0 * ones)


def test_a_model_that_no_card_describes_does_not_fail_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fed = federation(
        tmp_path, data=five_axes, on_disk=True, num_clients=2, models="mlp5", feature_dim=8
    ).run()
    assert [(line.trained, line.failures) for line in fed.strategy.history] == [([0, 1], [])] * 2
    message = [each for each in caplog.messages if "exported" in each]
    assert len(message) == 2  # after their first training
    assert "client 0: its model cannot be exported (input_shape: Tuple should have" in message[0]
    with pytest.raises(
        PbflError, match=r"does not describe its model's inputs: .* or exceeds the limits of a card"
    ):
        read_state(state_file(tmp_path / "run", "0"))


@pytest.mark.parametrize(
    ("shift", "exported"),
    [
        (torch.tensor([[1.0], [2], [3]]), (1, 2, 3)),
        (torch.tensor(0.5), (0.5, 0.5, 0.5)),
        (torch.tensor([1.0, 2, 3]), None),  # of the last axis
        (torch.rand(3, 3), None),
    ],
)
def test_an_apps_normalisation_is_by_channel_for_an_export(
    shift: Tensor, exported: tuple[float, ...] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def windows(settings: Settings, client: int) -> ClientData:
        labels = torch.arange(8) % 2
        shard = Shard(torch.randn(8, 3, 3, generator=torch.Generator().manual_seed(client)), labels)
        return ClientData(shard, shard, 2, ("a", "b"), torch.full((3, 1), 0.25), shift)

    federation(tmp_path, data=windows, on_disk=True, num_clients=1, models="mlp5", feature_dim=8).run()
    reason = f"cannot be exported (shift has the shape {tuple(shift.shape)}; must be a number by channel)"
    assert (reason in caplog.text) is (exported is None)
    if exported:
        card = read_state(state_file(tmp_path / "run", "0")).card
        assert (card.scale, card.shift) == ((0.25, 0.25, 0.25), exported)


CODE = """
import torch
class Net(torch.nn.Module):
    def __init__(self, task):
        super().__init__()
        self.body = torch.nn.Linear(task.input_shape[0], task.feature_dim)
        self.head = torch.nn.Linear(task.feature_dim, task.num_classes)
    def features(self, x):
        return torch.tanh(self.body(x))
def build(task):
    return Net(task)
"""


def card_of(architecture: str, **keys: Any) -> Card:
    """The card of a model of three classes for four numbers."""
    about: dict[str, Any] = {
        "method": "fedproto", "client": "0", "round": 1, "participations": 1, "num_classes": 3, "feature_dim": 5,
        "input_shape": (4,), "labels": ("a", "b", "c"), "columns": (), "images": False, "scale": (1.0,) * 4,
        "shift": (0.0,) * 4,
    }  # fmt: skip
    return Card(architecture=architecture, **{**about, **keys})


def test_a_network_in_the_users_code_must_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "garden_nets.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    two = {
        "num_classes": 2,
        "labels": ("a", "b"),
        "input_shape": (2,),
        "scale": (2.0, 1.0),
        "shift": (0.0, 1.0),
    }
    card = card_of("garden_nets:build", feature_dim=3, **two)
    weights = build_model(own_code("garden_nets:build", ["garden_nets:build"]), card.task, 1).state_dict()
    kept = SavedModel(card, dict(weights), {})
    with pytest.raises(PbflError, match="allow it with --model garden_nets:build"):
        export(kept, tmp_path / "out")
    assert "card.json" in export(kept, tmp_path / "out", frozenset({"garden_nets:build"})).files
    with pytest.raises(PbflError, match="allow it with --model garden_nets:build"):
        open_exported(tmp_path / "out")
    model = open_exported(tmp_path / "out", frozenset({"garden_nets:build"}))
    x = np.array([[1.0, -1.0]], np.float32)
    fed = torch.tensor([[2.0, 0.0]])  # x·scale + shift
    z = torch.tanh(fed @ weights["body.weight"].T + weights["body.bias"])
    expected = (z @ weights["head.weight"].T + weights["head.bias"]).softmax(dim=1)
    torch.testing.assert_close(model.probabilities(x).float(), expected)
    np.savez(tmp_path / "x.npz", x=x)
    several = ("--model", "garden_nets:other", "--model", "garden_nets:build", "--model", "garden_nets:more")
    assert pbfl("predict", tmp_path / "out", tmp_path / "x.npz", *several).exit_code == 0


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        (
            "torch.jit.script(self.body)",
            "self.body(x)",
            r"TypeError: Linear\.forward\(\) takes 2 .* given \(refused_nets\.py:9\)",
        ),
        (
            "self.body",
            "self.body(x.reshape(len(x), -1))",
            r"UserError: Constraints violated \(batch\)! "
            r"It must take any number of samples, as x\.shape\[0\], not len\(x\)",
        ),
        (
            "self.body",
            "self.body(x if x.sum() > 0 else -x)",
            r"GuardOnDataDependentSymNode: Could not guard on .* \(refused_nets\.py:9\)",
        ),
    ],
    ids=["scripted", "len", "data"],
)
def test_a_network_that_is_no_program_is_exported_without_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    body: str,
    line: str,
    reason: str,
) -> None:
    code = CODE.replace("self.head", f"self.body = {body}; self.head").replace("self.body(x)", line)
    (tmp_path / "refused_nets.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "refused_nets", raising=False)
    name = "refused_nets:build"
    card = card_of(name)
    kept = SavedModel(card, build_model(own_code(name, [name]), card.task, 1).state_dict(), {})
    files, notes = export(kept, tmp_path / "out", frozenset({name}))
    assert files == ["card.json", "model.safetensors"]
    (note,) = notes
    assert re.fullmatch(f"no model.pt2, model.onnx: torch.export refuses {name}: {reason}", note)
    assert capfd.readouterr() == ("", "")
    x = np.ones((3, 4), np.float32)
    model = open_exported(tmp_path / "out", frozenset({name}))
    assert model.probabilities(x).shape == (3, 3)


def test_a_program_that_torch_refuses_is_a_line_beside_the_other_files(
    runs: dict[str, Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        try:
            raise LookupError("no function for aten.odd\nTraceback")
        except LookupError as error:
            raise RuntimeError("\x1b[96mStep 3/3\x1b[0m failed. Create an issue ...") from error

    state = runs["garden"].place / "state"
    monkeypatch.setattr("pbfl_flwr.serving.export.lacking_for_onnx", str)
    monkeypatch.setattr(torch.onnx, "export", refuse)
    done = pbfl("export", state, "--client", "garden", "--out", tmp_path / "out")
    files = "card.json, model.pt2, model.safetensors, prototypes.safetensors"
    note = "no model.onnx: torch.onnx.export refuses mlp5: LookupError: no function for aten.odd"
    assert (done.exit_code, done.output.splitlines()[1:]) == (
        0,
        [f"written to {tmp_path}/out: {files}", note],
    )
    monkeypatch.setattr(torch.export, "export", refuse)
    done = pbfl("export", state, "--client", "garden", "--out", tmp_path / "less")
    assert done.exit_code == 0
    assert (
        "\nno model.pt2, model.onnx: torch.export refuses mlp5: RuntimeError: Step 3/3 failed." in done.output
    )
    assert {file.name for file in (tmp_path / "less").iterdir()} == {*files.split(", ")} - {"model.pt2"}


def test_of_an_export_that_cannot_be_written_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = MagicMock()
    full.save.side_effect = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("pbfl_flwr.serving.export.lacking_for_onnx", str)
    monkeypatch.setattr(torch.onnx, "export", lambda *arguments, **keywords: full)
    card = card_of("mlp5")
    kept = SavedModel(card, build_model("mlp5", card.task, 1).state_dict(), {})
    (tmp_path / "empty").mkdir()
    for place in ("new", "empty"):
        with pytest.raises(PbflError, match=r"cannot be written \(No space left on device\)$"):
            export(kept, tmp_path / place)
    assert not (tmp_path / "new").exists()
    assert [*(tmp_path / "empty").iterdir()] == []


def test_a_head_on_unit_features() -> None:
    """FedNH's predictor, written out, and the served network give the same logits."""
    assert build_method(parse({"method": "fednh", "models": "mlp5"})).unit_features
    assert not build_method(parse({"method": "fedproto"})).unit_features
    card = card_of("mlp5", method="fednh", unit_features=True)
    model = build_model("mlp5", card.task, 2)
    assert isinstance(model.head, nn.Linear)
    nn.init.zeros_(model.head.bias)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    logits, features = Served(model, card).eval()(x)
    torch.testing.assert_close(logits, F.linear(F.normalize(features, dim=1), model.head.weight))


def test_many_grey_images_of_an_array_are_told_row_by_row(tmp_path: Path) -> None:
    images = {"input_shape": (1, 16, 16), "images": True, "scale": (1 / 255,), "shift": (-0.5,)}
    card = card_of("cnn2", num_classes=10, labels=tuple("0123456789"), feature_dim=8, **images)
    model = Exported(card, Served(build_model("cnn2", card.task, 0), card).eval(), {})
    x, _ = pictures(0, 2 * BATCH + 3)
    np.savez(tmp_path / "flat.npz", x=x)
    np.savez(tmp_path / "channel.npz", x=x[:, None])
    np.savez(tmp_path / "none.npz", x=x[:0])
    flat, channel, none = (
        list(predict(model, [tmp_path / f"{name}.npz"])) for name in ("flat", "channel", "none")
    )
    assert none == []
    assert [one.row for one in flat] == list(range(1, len(x) + 1))
    assert [one.probabilities for one in flat] == [one.probabilities for one in channel]
    for row in (0, BATCH - 1, BATCH, len(x) - 1):
        (alone,) = model.probabilities(x[row][None, None])
        assert flat[row].probabilities == pytest.approx(alone.tolist(), rel=1e-4)
        assert (flat[row].label, flat[row].probability) == (
            str(int(alone.argmax())),
            max(flat[row].probabilities),
        )


def test_predictions_for_people_and_for_other_programs() -> None:
    actual = [
        Prediction("photo.png", 0, "b", 0.75, (0.25, 0.75)),
        Prediction("x.npz", 12, "a,c", 1.0, (1.0, 0.0)),
    ]
    assert written(actual, ["a,c", "b"], "table").splitlines() == [
        "file       row  class  probability",
        "photo.png       b      0.750000",
        "x.npz      12   a,c    1.000000",
    ]
    assert written(actual, ["a,c", "b"], "csv").splitlines() == [
        "file,row,class,probability", "photo.png,,b,0.750000", 'x.npz,12,"a,c",1.000000',
    ]  # fmt: skip
    (line,) = json.loads(written(actual[1:], ["a,c", "b"], "json"))
    assert line.pop("probabilities") == {"a,c": 1.0, "b": 0.0}
    assert line == {"file": "x.npz", "row": 12, "label": "a,c", "probability": 1.0}


def test_sizes_in_a_card_allocate_no_memory() -> None:
    K = 10**6  # whose head would take 262 GB
    card = card_of("mlp5", num_classes=K, feature_dim=65_536, labels=tuple(map(str, range(K))))
    with pytest.raises(PbflError, match=r"are not those of mlp5 \(Missing key.* \"head.bias\""):
        rebuild(card, {}, frozenset(), "there")


def test_of_a_model_that_began_pretrained_the_weights_it_began_with_are_not_asked_for() -> None:
    card = card_of("mlp5@nowhere")
    weights = build_model("mlp5", card.task, 1).state_dict()
    served = rebuild(card, weights, frozenset(), "there")
    assert torch.equal(served.model.state_dict()["head.weight"], weights["head.weight"])


# Texts ------------------------------------------------------------------------------------------------------


def test_run_json_and_the_card_have_the_size_of_the_vocabulary(texts: Ran) -> None:
    members = json.loads((texts.place / "run/run.json").read_text())["clients"]
    card = texts.kept("north").card
    assert [m["task"]["vocabulary_size"] for m in members] == [card.vocabulary_size] * 2
    assert card.vocabulary_size == 4 + len({*" ".join(TOPICS).split(), "the", "."})


@pytest.mark.parametrize(
    "name",
    [
        *("bilstm", "transformer-8-2"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("text-logistic", "lstm", "gru")),
    ],
)
def test_every_network_for_texts_becomes_a_program(texts: Ran, name: str, tmp_path: Path) -> None:
    kept = texts.kept("north").card
    shape = {"input_shape": (12,), "scale": kept.scale[:12], "shift": kept.shift[:12]}
    card = kept.model_copy(update={"architecture": name, **shape})
    model = build_model(name, card.task, 5).eval()
    names, _ = export(SavedModel(card, model.state_dict(), {}), tmp_path / "out")
    ids = random_inputs(card.task, 3)
    ids[:, 0], ids[1, 5:], ids[2] = 1, 0, 0
    with torch.inference_mode():
        features = model.features(ids)
        expected = model.head(features), features
        program = torch.export.load(tmp_path / "out/model.pt2").module()
        torch.testing.assert_close(program(ids), expected)
        torch.testing.assert_close(program(ids[:1])[0], expected[0][:1])  # the batch is free
    assert ("model.onnx" in names) == (not lacking_for_onnx())
    if not lacking_for_onnx():
        reference = pytest.importorskip("onnx.reference").ReferenceEvaluator(str(tmp_path / "out/model.onnx"))
        for result, wanted in zip(reference.run(None, {"inputs": ids.numpy()}), expected, strict=True):
            np.testing.assert_allclose(result, wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_writing_onnx_prints_no_warning_of_the_library(
    texts: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that there is no torchvision; the library itself need not be there."""

    def write(*arguments: object, **keywords: object) -> MagicMock:
        assert not logging.getLogger("torch.onnx.exporter").isEnabledFor(logging.WARNING)
        return MagicMock()

    monkeypatch.setattr("pbfl_flwr.serving.export.lacking_for_onnx", str)
    monkeypatch.setattr(torch.onnx, "export", write)
    export(texts.kept("north"), tmp_path / "out")


def test_token_ids_of_an_array(texts: Ran, exported: dict[str, Path], tmp_path: Path) -> None:
    test = texts.data["north"].test
    np.savez(tmp_path / "ids.npz", x=test.inputs.numpy())
    result = list(predict(open_exported(exported["north"]), [tmp_path / "ids.npz"]))
    assert [one.row for one in result] == list(range(1, len(test) + 1))
    names = texts.data["north"].label_names
    correct = sum(one.label == names[y] for one, y in zip(result, test.labels.tolist(), strict=True))
    assert correct == texts.correct("north")["head"]


def test_other_files_are_refused_in_a_line(exported: dict[str, Path], tmp_path: Path) -> None:
    model = open_exported(exported["north"])
    beyond = model.card.vocabulary_size
    np.savez(tmp_path / "beyond.npz", x=np.full((2, 200), beyond))
    np.savez(tmp_path / "numbers.npz", x=np.zeros((2, 200)))
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    (tmp_path / "t.txt").write_text("treaty\n")
    for file, message in (
        ("beyond.npz", f"x holds {beyond} to {beyond}; must be ids 0..{beyond - 1}"),
        ("numbers.npz", "this model takes token ids"),
        ("t.csv", r"is a table, but this model takes token ids of shape \(200,\)"),
        ("t.txt", "must be one of images"),
    ):
        with pytest.raises(PbflError, match=message):
            list(predict(model, [tmp_path / file]))
    np.savez(tmp_path / "ids.npz", x=np.ones((2, 200), int))
    assert len(list(predict(model, [tmp_path / "ids.npz"]))) == 2


def test_a_card_has_a_name_for_every_column() -> None:
    with pytest.raises(ValueError, match="there must be as many columns as an input has values"):
        card_of("mlp5", columns=("only one",))


def test_a_client_that_predicts_with_two_networks_is_not_exported(tmp_path: Path) -> None:
    federation(tmp_path, "fedmrl", on_disk=True, num_clients=1, num_server_rounds=1).run()
    with pytest.raises(PbflError, match=r"does not describe its model's inputs: .* two networks \(fedmrl\)"):
        read_state(state_file(tmp_path / "run", "0"))
