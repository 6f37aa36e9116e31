"""Texts that devices bring: a common vocabulary, a run of three devices, and what is said of files that are wrong."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings, Scalar, parse
from pbfl_flwr.data import load_pool
from pbfl_flwr.data.own.texts import read_vocabulary
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.server.stopping import RunEnded
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from tests.flower.inprocess import InProcessGrid
from tests.small_runs import pbfl

WORDS = ("<pad>", "<cls>", "<unk>", "<eos>", "rain", "sun", "goal", "match")


def vocabulary(path: Path, words: tuple[str, ...] = WORDS) -> Path:
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return path


def settings(path: Path, words: Path | None, **keys: Any) -> DataSettings:
    return DataSettings(dataset="text", data_dir=str(path), vocabulary=str(words or ""), **keys)


def test_a_table_of_texts_becomes_ids(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text('label,text,client\nsport,"Goal, goal!",b\nweather,Rain or SUN,a\n', encoding="utf-8")
    pool = load_pool(settings(file, vocabulary(tmp_path / "words.txt"), input_shape="6"))
    # <cls> goal , goal ! <pad> with ',' and '!' unknown; <cls> rain or sun, 'or' unknown
    assert pool.inputs.tolist() == [[1, 6, 2, 6, 2, 0], [1, 4, 2, 5, 0, 0]]
    assert (pool.label_names, pool.labels.tolist()) == (("sport", "weather"), [0, 1])
    assert pool.owner is not None
    assert pool.owner.tolist() == [1, 0]
    assert pool.vocabulary == WORDS
    assert pool.notes == ("42.9% of the tokens are not in the vocabulary",)  # 3 of 7


def test_names_of_columns_and_the_length(tmp_path: Path) -> None:
    file = tmp_path / "t.tsv"
    file.write_text("said\tkind\nrain\t1.0\nsun\t0\n", encoding="utf-8")
    words = vocabulary(tmp_path / "words.txt")
    pool = load_pool(settings(file, words, text_column="said", label_column="kind"))
    assert pool.inputs.shape == (2, 200)
    assert (pool.label_names, pool.labels.tolist()) == (("0", "1"), [1, 0])


GOOD = "text,label\nrain,a\nsun,b\n"


@pytest.mark.parametrize(
    ("table", "words", "keys", "text"),
    [
        (GOOD, None, {}, "dataset = 'text' needs vocabulary"),
        (GOOD, WORDS[1:], {}, "its first lines must be <pad>, <cls>, <unk>, <eos>"),
        (GOOD, (*WORDS, "rain"), {}, "line 9 repeats 'rain'"),
        (GOOD, (*WORDS, "", "x"), {}, "line 9 is empty"),
        (GOOD, (*WORDS, "two words "), {}, "line 9 has spaces"),
        (GOOD, WORDS, {"input_shape": "3,4"}, "allowed with texts is one number"),
        (GOOD, WORDS, {"text_column": "said"}, "has no column 'said' with texts; it has text, label"),
        (GOOD, WORDS, {"label_column": "text"}, "column 'text' is both text and class"),
        ("text,label\nrain,a\n ,b\n", WORDS, {}, "row 2, column 'text': the cell is empty"),
        ("text,label\nrain,\n", WORDS, {}, "row 1, column 'label': the cell is empty"),
        ("text,label\n", WORDS, {}, "has no rows"),
    ],
)
def test_rejects_wrong_content(
    tmp_path: Path, table: str, words: tuple[str, ...] | None, keys: dict[str, str], text: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_text(table, encoding="utf-8")
    known = None if words is None else vocabulary(tmp_path / "words.txt", words)
    with pytest.raises(PbflError, match=re.escape(text)):
        load_pool(settings(file, known, **keys))


def test_rejects_a_missing_or_unused_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(GOOD, encoding="utf-8")
    with pytest.raises(PbflError, match="is not a file"):
        load_pool(settings(tmp_path / "t.csv", tmp_path / "nowhere.txt"))
    with pytest.raises(PbflError, match="dataset 'digits' does not use one; allowed with dataset = 'text'"):
        load_pool(DataSettings(vocabulary=str(vocabulary(tmp_path / "words.txt"))))


def test_vocabulary_command(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(GOOD * 1 + "rain and rain,a\nsun,b\n" * 4, encoding="utf-8")
    (tmp_path / "more.txt").write_text("sun sun sun sun\nsun sun\n", encoding="utf-8")
    out = tmp_path / "words.txt"
    made = pbfl("vocabulary", tmp_path / "t.csv", tmp_path / "more.txt", "--out", out, "--most", 6)
    assert made.exit_code == 0, made.output
    assert read_vocabulary(out) == ("<pad>", "<cls>", "<unk>", "<eos>", "sun", "rain")  # 11 times, 9 times
    again = pbfl("vocabulary", tmp_path / "t.csv", "--out", out)
    assert (again.exit_code, "already exists" in again.output) == (2, True)
    assert pbfl("vocabulary", tmp_path / "t.jpg", "--out", tmp_path / "no.txt").exit_code == 2
    checked = pbfl("check-data", tmp_path / "t.csv", "--vocabulary", out, "--model", "text-2")
    assert checked.exit_code == 0, checked.output
    assert "token ids in a vocabulary of 6" in checked.output
    assert f"vocabulary='{out}'" in checked.output.replace("\n", "")


def devices(place: Path) -> list[dict[str, Scalar]]:
    """Three devices whose own texts differ, with one vocabulary."""
    words = vocabulary(place / "words.txt")
    rng = np.random.default_rng(0)
    result: list[dict[str, Scalar]] = []
    for number in range(3):
        rows = [
            (" ".join(rng.choice(kind, 5)), label)
            for label, kind in (
                ("weather", ["rain", "sun", f"w{number}"]),
                ("sport", ["goal", "match", f"s{number}"]),
            )
            for _ in range(16)
        ]
        file = place / f"{number}.csv"
        file.write_text(
            "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows), encoding="utf-8"
        )
        result.append({
            "client-id": f"site-{number}", "data-path": str(file), "vocabulary": str(words), "input-shape": "8",
            "model": "fasttext", "state-dir": str(place / f"state-{number}"),
        })  # fmt: skip
    return result


CONFIG: dict[str, Scalar] = {
    "num-clients": 3,
    "num-server-rounds": 3,
    "feature-dim": 16,
    "batch-size": 4,
    "local-epochs": 5,
    "learning-rate": 0.5,
    "threads": 1,
    "join-timeout": 0.5,
    "vocabulary": "/only/on/the/server.txt",  # the server's paths mean nothing to a device
}


def test_devices_with_texts_of_their_own_learn_together(tmp_path: Path) -> None:
    strategy = MethodStrategy(parse(CONFIG, SECTIONS))
    strategy.start(InProcessGrid(make_client_app(), CONFIG, 3, node_configs=devices(tmp_path)))
    assert strategy.history[-1].trained == [0, 1, 2]
    assert strategy.history[-1].accuracy["head"].weighted > 0.8


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{place}/other.txt", "clients disagree on words of the vocabulary"),
        ("{place}/longer.txt", "clients disagree on vocabulary size V"),
        ("words.txt", r"vocabulary = 'words\.txt' in --node-config: must be an absolute"),
    ],
)
def test_rejects_devices_whose_vocabulary_does_not_fit(tmp_path: Path, path: str, message: str) -> None:
    nodes = devices(tmp_path)
    vocabulary(tmp_path / "other.txt", (*WORDS[:-1], "snow"))
    vocabulary(tmp_path / "longer.txt", (*WORDS, "snow"))
    nodes[2]["vocabulary"] = path.format(place=tmp_path)
    strategy = MethodStrategy(parse(CONFIG, SECTIONS))
    with pytest.raises((PbflError, RunEnded), match=message):
        strategy.start(InProcessGrid(make_client_app(), CONFIG, 3, node_configs=nodes))
