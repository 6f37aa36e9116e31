"""AG News in its two CSV files, made up here: tokens, vocabulary, ids, and what is said of files that are wrong."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import check_data, client_data, export_pfl_directory, load_pool
from pbfl_flwr.data.sources import tokens
from pbfl_flwr.data.validation import validate
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.registry import architectures
from tests.small_runs import pbfl

TRAIN = """"3","Wall St. Bears","Short-sellers (band) of ""cynics"", seeing green."
"4","Bears","It's a bug;<br />a bug"
"""
TEST = '"1","Bears","seeing"\n"2","Goal! Goal?","a goal"\n'
TEXTS = (
    'Wall St. Bears Short-sellers (band) of "cynics", seeing green.',
    "Bears It's a bug;<br />a bug",
    "Bears seeing",
    "Goal! Goal? a goal",
)


def settings(path: Path, **keys: Any) -> DataSettings:
    return DataSettings(dataset="ag-news", data_dir=str(path), **keys)


def write(folder: Path, train: str = TRAIN, test: str = TEST) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.csv").write_text(train, encoding="utf-8")
    (folder / "test.csv").write_text(test, encoding="utf-8")
    return folder


def test_the_rules_of_basic_english() -> None:
    # torchtext 0.15: get_tokenizer("basic_english")("You can now install TorchText using pip!") and by its table
    assert tokens.split("You can now install TorchText using pip!") == (
        ["you", "can", "now", "install", "torchtext", "using", "pip", "!"]
    )
    assert tokens.split('It\'s "A.B", (c)? d;e:f<br />g  h\\i\n') == (
        ["it", "'", "s", "a", ".", "b", ",", "(", "c", ")", "?", "d", "e", "f", "g", "h\\i"]
    )


def test_the_vocabulary_is_by_frequency_then_by_text() -> None:
    texts = ["b b c", "a <unk> <unk> <unk>", "d b c"]
    assert tokens.vocabulary(texts, 100) == ("<pad>", "<cls>", "<unk>", "<eos>", "b", "c", "a", "d")
    assert tokens.vocabulary(texts, 6) == ("<pad>", "<cls>", "<unk>", "<eos>", "b", "c")


def test_ids_are_cut_and_filled() -> None:
    ids = np.full((3, 4), 9, np.int32)
    tokens.encode(["b", "c b x b", ""], ("<pad>", "<cls>", "<unk>", "<eos>", "b", "c"), ids)
    assert ids.tolist() == [[1, 4, 0, 0], [1, 5, 4, 2], [1, 0, 0, 0]]
    ids = np.empty((1, 8), np.int32)  # special tokens that a text spells out are unknown words
    tokens.encode(["b <pad> <CLS> <unk> <eos> pad"], (*tokens.SPECIALS, "b", "pad"), ids)
    assert ids.tolist() == [[1, 4, 2, 2, 2, 2, 5, 0]]


@pytest.mark.parametrize("folder", ["", "ag_news_csv", "AG_NEWS"])
@pytest.mark.parametrize("header", ["", "Class Index,Title,Description\n"])
def test_both_files_make_one_pool(tmp_path: Path, folder: str, header: str) -> None:
    write(tmp_path / folder, header + TRAIN, header + TEST)
    pool = load_pool(settings(tmp_path))
    assert (pool.input_shape, pool.num_train) == ((200,), 2)
    assert pool.inputs.dtype == np.int32
    assert (pool.labels.tolist(), pool.label_names[0]) == ([2, 3, 0, 1], "World")
    # bears and goal 3 times, a 3; bug, seeing twice, ... by their text
    vocabulary = tokens.vocabulary(TEXTS, 100)
    assert vocabulary[4:9] == ("a", "bears", "goal", ".", "bug")
    assert pool.vocabulary_size == len(vocabulary) == 25
    words = [[vocabulary[j] for j in row[row > 0]] for row in pool.inputs]
    assert words[0][:6] == ["<cls>", "wall", "st", ".", "bears", "short-sellers"]
    assert words[0][6:] == ["(", "band", ")", "of", "cynics", ",", "seeing", "green", "."]
    assert words[1] == ["<cls>", "bears", "it", "'", "s", "a", "bug", "a", "bug"]


def test_the_vocabulary_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pbfl_flwr.data.sources.ag_news"], "MAX_TOKENS", 6)
    pool = load_pool(settings(write(tmp_path)))
    assert tokens.vocabulary(TEXTS, 6) == (*tokens.SPECIALS, "a", "bears")
    assert (pool.vocabulary_size, int(pool.inputs.max())) == (6, 5)
    assert pool.inputs[2, :4].tolist() == [1, 5, 2, 0]  # "Bears seeing"


def test_ids_stay_ids_on_their_way_to_a_network(tmp_path: Path) -> None:
    keys = settings(write(tmp_path), partition="iid")
    data = client_data(keys, 2, 0)
    assert data.train.inputs.dtype == torch.int32
    assert data.prepare(data.train.inputs) is data.train.inputs
    task = data.task(16)
    assert (task.input_shape, task.vocabulary_size, task.num_classes) == ((200,), data.vocabulary_size, 4)
    again = load_pool(keys)  # from the cache
    assert again.vocabulary_size == data.vocabulary_size == 25
    assert again.task(16) == task


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    pool = load_pool(settings(write(tmp_path)))
    pool.inputs[1, 2] = pool.vocabulary_size
    with pytest.raises(PbflError, match=f"token ids 0 to {pool.vocabulary_size}; must be 0"):
        validate(pool, "ag-news")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="'ag-news' not found") as caught:
        check_data(settings(tmp_path), 2)
    assert f"{tmp_path}/train.csv, {tmp_path}/ag_news_csv/train.csv" in str(caught.value)
    write(tmp_path)
    (tmp_path / "test.csv").unlink()
    with pytest.raises(PbflError, match=f"looked for {tmp_path}/test.csv"):
        check_data(settings(tmp_path), 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('"1","a","b"\n"5","a","b"\n', "train.csv, line 2: '5,a,b'; expected are a class 1 to 4, title"),
        ('"1","only a title"\n', "train.csv, line 1: '1,only a title'; expected"),
        ("Class Index,Title,Description\n", "train.csv has no rows"),
        ('"1","a","' + "b" * 200_000, "train.csv is not a readable CSV file in UTF-8: field larger"),
        (b'"1","\xe9","b"', "train.csv is not a readable CSV file in UTF-8"),
    ],
)
def test_rows_that_are_wrong_are_named(tmp_path: Path, text: str | bytes, reason: str) -> None:
    (write(tmp_path) / "train.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PbflError, match=reason):
        load_pool(settings(tmp_path))


def test_check_data_shows_it_and_tries_networks(tmp_path: Path) -> None:
    def call(*more: str) -> tuple[int, str]:
        result = pbfl("check-data", write(tmp_path), "--dataset", "ag-news", *more)
        return result.exit_code, " ".join(result.output.split())

    code, text = call("--model", "text-2")
    assert code == 0
    assert "4 samples of shape 200, int32" in text
    assert "token ids in a vocabulary of 25" in text
    assert f"data-path='{tmp_path}' dataset='ag-news' model='{architectures('text-2')[0]}'" in text
    for model, message in (
        ("cnn4", "expected images (channels, height, width), found input shape (200,)"),
        ("mlp5", "does not accept input of shape (2, 200) of token ids"),
        ("har-cnn", "expected windows"),
    ):
        code, text = call("--model", model)
        assert code == 2
        assert message in text


def test_texts_are_not_written_as_a_pflib_folder(tmp_path: Path) -> None:
    keys = settings(write(tmp_path), partition="iid")
    with pytest.raises(PbflError, match="PFLlib folders cannot be written for texts"):
        export_pfl_directory(check_data(keys, 2), load_pool(keys), tmp_path / "out")
    assert not (tmp_path / "out").exists()
