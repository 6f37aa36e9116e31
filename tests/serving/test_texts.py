"""Two devices with the same texts, trained by real messages, exported, and asked about texts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pbfl_flwr.data import own_data
from pbfl_flwr.data.own import tokens
from pbfl_flwr.data.own.inspection import settings_for
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import random_inputs
from pbfl_flwr.serving.export import export, has_onnx
from pbfl_flwr.serving.exported import open_exported
from pbfl_flwr.serving.predict import predict
from pbfl_flwr.serving.states import SavedModel, read_state, state_file
from tests.flower.inprocess import federation
from tests.small_runs import pbfl

TOPICS = ("treaty embassy border", "goal coach league", "profit merger shares", "satellite chip browser")
NETWORKS = {"north": "fasttext", "south": "textcnn"}


def write(folder: Path) -> None:
    draw = random.Random(0)
    folder.mkdir()
    for name, rows in (("train", 80), ("test", 20)):
        lines = []
        for row in range(rows):
            title, text = (" ".join(draw.choices(TOPICS[row % 4].split(), k=k)) for k in (2, 6))
            lines.append(f'"{row % 4 + 1}","{title.title()}","The {text}."\n')
        (folder / f"{name}.csv").write_text("".join(lines))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBFL_HOME", str(place / "home"))
        write(place / "news")
        nodes = [
            {"client-id": name, "data-path": str(place / "news"), "dataset": "ag-news", "model": network,
             "state-dir": str(place / "state")}
            for name, network in NETWORKS.items()
        ]  # fmt: skip
        federation(
            place, data=None, on_disk=True, node_configs=nodes, partitions=range(2), num_clients=2,
            num_server_rounds=3, feature_dim=16, learning_rate=0.005,
        ).run()  # fmt: skip
        yield place


@pytest.fixture(scope="module", params=NETWORKS)
def exported(place: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    name, out = request.param, place / f"exported-{request.param}"
    done = pbfl("export", place / "state", "--client", name, "--out", out)
    assert done.exit_code == 0, done.output
    return name, out


def test_run_json_and_the_card_have_the_vocabulary(place: Path) -> None:
    members = json.loads((place / "run/run.json").read_text())["clients"]
    card = read_state(state_file(place / "state", "north")).card
    assert [m["task"]["vocabulary_size"] for m in members] == [len(card.vocabulary)] * 2
    assert card.vocabulary[:4] == ("<pad>", "<cls>", "<unk>", "<eos>")
    assert {"treaty", "coach", "the", "."} <= set(card.vocabulary)


def test_program_and_predictions_are_those_of_the_live_model(place: Path, exported: tuple[str, Path]) -> None:
    name, out = exported
    test = own_data(settings_for(place / "news", dataset="ag-news")).test
    kept = read_state(state_file(place / "state", name))
    model = build_model(kept.card.architecture, kept.card.task, 5)
    model.load_state_dict(kept.weights)
    model.eval()
    with torch.inference_mode():
        features = model.features(test.inputs)
        expected = model.head(features), features
        program = torch.export.load(out / "model.pt2").module()
        torch.testing.assert_close(program(test.inputs.long()), expected)
    line = json.loads((place / "run/clients.jsonl").read_text().splitlines()[-1])
    correct = line["correct"][line["name"].index(name)]
    for by, number in correct.items():
        result = open_exported(out).probabilities(test.inputs.numpy(), by)
        assert int((result.argmax(dim=1) == test.labels).sum()) == number, by
    if has_onnx():
        session = pytest.importorskip("onnx.reference").ReferenceEvaluator(str(out / "model.onnx"))
        result = session.run(["logits", "features"], {"inputs": test.inputs.long().numpy()})
        np.testing.assert_allclose(result[0], expected[0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("bilstm", "transformer-8-2"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("text-logistic", "lstm", "gru")),
    ],
)
def test_every_network_for_texts_becomes_a_program(place: Path, name: str, tmp_path: Path) -> None:
    known = read_state(state_file(place / "state", "north")).card
    shape = {"input_shape": (12,), "scale": known.scale[:12], "shift": known.shift[:12]}
    card = known.model_copy(update={"architecture": name, **shape})
    model = build_model(name, card.task, 5).eval()
    names = export(SavedModel(card, model.state_dict(), {}), tmp_path / "out")
    ids = random_inputs(card.task, 3)
    ids[:, 0], ids[1, 5:], ids[2] = 1, 0, 0
    with torch.inference_mode():
        features = model.features(ids)
        expected = model.head(features), features
        program = torch.export.load(tmp_path / "out/model.pt2").module()
        torch.testing.assert_close(program(ids), expected)
        torch.testing.assert_close(program(ids[:1])[0], expected[0][:1])  # the batch is free
    assert ("model.onnx" in names) == has_onnx()
    if has_onnx():
        reference = pytest.importorskip("onnx.reference").ReferenceEvaluator(str(tmp_path / "out/model.onnx"))
        for result, wanted in zip(reference.run(None, {"inputs": ids.numpy()}), expected, strict=True):
            np.testing.assert_allclose(result, wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_a_text_a_line(exported: tuple[str, Path], tmp_path: Path) -> None:
    name, out = exported
    (tmp_path / "a.txt").write_text("\n".join(TOPICS) + "\n")
    result = list(predict(open_exported(out), [tmp_path / "a.txt"], "local"))
    assert [one.row for one in result] == [1, 2, 3, 4]
    (tmp_path / "a.csv").write_text("label,text\n" + "".join(f'?,"{text}"\n' for text in TOPICS))
    again = list(predict(open_exported(out), [tmp_path / "a.csv"], "local"))
    assert [(one.row, one.label) for one in again] == [(one.row, one.label) for one in result]
    (tmp_path / "b.txt").write_text("one\u2028text\x0cof\x85four words\r\nanother\n", encoding="utf-8")
    assert [one.row for one in predict(open_exported(out), [tmp_path / "b.txt"])] == [1, 2]
    if name == "north":  # TextCNN's dropout of 0.8 takes longer than three rounds
        assert [one.label for one in result] == ["World", "Sports", "Business", "Sci/Tech"]


def test_other_files_are_refused_in_a_line(exported: tuple[str, Path], tmp_path: Path) -> None:
    model = open_exported(exported[1])
    beyond = len(model.card.vocabulary)
    np.savez(tmp_path / "beyond.npz", x=np.full((2, 200), beyond))
    np.savez(tmp_path / "numbers.npz", x=np.zeros((2, 200)))
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    for file, message in (
        ("beyond.npz", f"x holds {beyond} to {beyond}; must be ids 0..{beyond - 1}"),
        ("numbers.npz", "this model takes token ids"),
        ("t.csv", "has no column 'text' with texts; it has a, b"),
    ):
        with pytest.raises(PbflError, match=message):
            list(predict(model, [tmp_path / file]))
    np.savez(tmp_path / "ids.npz", x=np.ones((2, 200), int))
    assert len(list(predict(model, [tmp_path / "ids.npz"]))) == 2


def test_texts_are_found_in_the_column_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    words = {word for topic in TOPICS for word in topic.split()}
    (tmp_path / "words.txt").write_text("\n".join([*tokens.SPECIALS, *sorted(words)]) + "\n")
    rows = [f"{topic},{topic[::-1]},{number}" for number, topic in enumerate(TOPICS) for _ in range(4)]
    (tmp_path / "t.csv").write_text("\n".join(["body,title,label", *rows]) + "\n")
    node = {
        "client-id": "north", "data-path": str(tmp_path / "t.csv"), "vocabulary": str(tmp_path / "words.txt"),
        "text-column": "body", "input-shape": "8", "model": "fasttext", "state-dir": str(tmp_path / "state"),
    }  # fmt: skip
    federation(
        tmp_path, data=None, on_disk=True, node_configs=[node], partitions=[0], num_clients=1, num_server_rounds=1,
        feature_dim=16,
    ).run()  # fmt: skip
    out = tmp_path / "out"

    def call(*arguments: object) -> tuple[int, str]:
        done = pbfl(*arguments)
        return done.exit_code, done.output

    assert call("export", tmp_path / "state", "--out", out)[0] == 0
    assert open_exported(out).card.text_column == "body"
    code, bodies = call("predict", out, tmp_path / "t.csv", "--format", "csv")
    assert (code, len(bodies.splitlines())) == (0, 17)
    code, titles = call("predict", out, tmp_path / "t.csv", "--format", "csv", "--text-column", "title")
    answers = {line.split(",")[-1] for line in titles.splitlines()[1:]}
    assert (code, len(answers)) == (0, 1)  # none of their words is known
    code, message = call("predict", out, tmp_path / "t.csv", "--text-column", "other")
    assert (code, "has no column 'other' with texts" in " ".join(message.split())) == (2, True)
    assert call("predict", out, tmp_path / "t.csv", "--format", "csv", "--text-column", "body") == (0, bodies)
