"""evaluate-every: clients are scored in every N-th round and in the last; all that reads a run knows the others."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from pbfl_flwr.experiments.results import FinishedRun
from pbfl_flwr.flower.server.schedule import Schedule
from pbfl_flwr.runs.tensor_files import load_tensors
from tests.flower.inprocess import Answer, altered, federation, numbers, same_tensors, shown
from tests.small_runs import pbfl

KEYS: dict[str, Any] = {"num_server_rounds": 5, "evaluate_every": 2, "models": "cnn4", "on_disk": True}


@pytest.mark.parametrize(
    ("moment", "every", "scored"),
    [
        ("after", 1, [1, 2, 3, 4, 5]),
        ("after", 2, [2, 4, 5]),
        ("after", 9, [5]),
        ("before", 1, [1, 2, 3, 4, 5]),
        ("before", 2, [1, 3, 5]),
        ("before", 9, [1]),
    ],
)
def test_which_rounds_are_scored(moment: Any, every: int, scored: list[int]) -> None:
    assert [number for number in range(1, 6) if Schedule(5, moment, every).is_scored(number)] == scored


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_the_other_rounds_train_alike_and_have_no_scores(tmp_path: Path, method: str) -> None:
    """The first is scored after training, the second before it."""
    more: dict[str, Any] = {"per_class": True, "auc": True, "fraction_train": 0.6}
    always = federation(tmp_path / "a", method, **{**KEYS, **more, "evaluate_every": 1}).run()
    run = federation(tmp_path / "b", method, **KEYS, **more).run()
    moment = run.strategy.moment
    assert moment == ("after" if method == "fedproto" else "before")
    for line, whole in zip(run.strategy.history, always.strategy.history, strict=True):
        assert (line.failures, line.trained, line.client_metrics) == ([], whole.trained, whole.client_metrics)
        if Schedule(5, moment, 2).is_scored(line.round):
            assert (line.accuracy, line.test_loss) == (whole.accuracy, whole.test_loss)
        else:
            assert (line.accuracy, line.validation, line.test_loss) == ({}, {}, None)
            assert line.seconds.clients["evaluate"] == 0
    assert run.strategy.history[-1].final == always.strategy.history[-1].final
    assert run.strategy.history[-1].latest.accuracy == always.strategy.history[-1].latest.accuracy


def test_clients_that_do_not_train_get_no_message_in_the_other_rounds(tmp_path: Path) -> None:
    run = federation(tmp_path, fraction_train=0.4, **KEYS).run()
    kinds = {number: {kind for _, at, kind in run.grid.asked if at == number} for number in range(1, 6)}
    assert kinds == {
        1: {"train"},
        2: {"train", "evaluate"},
        3: {"train"},
        4: {"train", "evaluate"},
        5: kinds[4],
    }


def test_scores_that_nobody_asked_for_are_ignored(tmp_path: Path) -> None:
    def boast(content: Any) -> None:
        scores = numbers(content["m"], "c")
        content["m"]["c"] = [4, *scores[1:]]

    run = federation(tmp_path, faults={(0, 1): altered(boast)}, **KEYS).run()
    assert (run.strategy.history[0].accuracy, run.strategy.history[0].failures) == ({}, [])


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_an_extended_run_is_one_made_at_once(tmp_path: Path, method: str) -> None:
    whole = federation(tmp_path / "a", method, **KEYS).run()
    shorter = federation(tmp_path / "b", method, **{**KEYS, "num_server_rounds": 3}).run()
    read = FinishedRun.load(shorter.directory.path)
    assert [number for number, _ in read.curve()][-1] == 3
    extended = federation(tmp_path / "b", method, resume=True, **KEYS).run()
    assert extended.strategy.history[2].latest.accuracy != {}  # it was the last one
    assert extended.directory.result() == whole.directory.result()
    read, expected = (FinishedRun.load(each.directory.path) for each in (extended, whole))
    assert read.curve() == expected.curve()
    assert read.client_curves() == expected.client_curves()
    assert read.scores == expected.scores


def test_patience_does_not_count_on_the_scores_of_a_shorter_run(tmp_path: Path) -> None:
    """They are of a round in which the run would not have been scored, had it been made at once."""
    keys = {**KEYS, "num_server_rounds": 30, "evaluate_every": 4, "learning_rate": 1e-6, "patience": 3}
    keys["patience_on"] = "test"
    whole = federation(tmp_path / "a", **keys).run()
    assert whole.strategy.done == 8
    federation(tmp_path / "b", **{**keys, "num_server_rounds": 6}).run()
    better = tmp_path / "b" / "run" / "rounds.jsonl"
    lines = [json.loads(line) for line in better.read_text().splitlines()]
    lines[5]["accuracy"]["global"]["weighted"] = 0.9
    better.write_text("".join(json.dumps(line) + "\n" for line in lines))
    extended = federation(tmp_path / "b", resume=True, **keys).run()
    assert extended.strategy.done == 8
    assert extended.directory.result() == whole.directory.result()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_scores_of_a_shorter_run_keep_no_state_from_being_the_best(tmp_path: Path, moment: str) -> None:
    keys = {**KEYS, "data": None, "max_samples": 600, "models": "mlp", "learning_rate": 0.1}
    keys |= {"evaluate_moment": moment, "num_server_rounds": 8}
    whole = federation(tmp_path / "a", "fedavg", **keys).run()
    shorter = federation(tmp_path / "b", "fedavg", **{**keys, "num_server_rounds": 3}).run()
    history = shorter.directory.path / "rounds.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    (lines[2] if moment == "after" else lines[2]["final"])["accuracy"]["head"]["weighted"] = 1.0
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    extended = federation(tmp_path / "b", "fedavg", resume=True, **keys).run()
    (tensors, about), (expected, best) = (
        load_tensors(each.directory.path / "best.safetensors") for each in (extended, whole)
    )
    assert about == best
    assert int(best["round"]) > 3
    assert same_tensors(tensors, expected)


@pytest.mark.parametrize("method", ["fedproto", "gfpl", "feddistill"])
def test_a_killed_round_that_becomes_the_last_one_is_scored_on_all_clients(
    tmp_path: Path, method: str
) -> None:
    """Those that had trained in it when nobody was to be scored answer with their scores."""
    keys: dict[str, Any] = {**KEYS, "models": "resnet4", "per_class": True, "auc": True}
    whole = federation(tmp_path / "a", method, **{**keys, "num_server_rounds": 3}).run()
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path / "b", method, faults={(2, 3): killed}, **keys).run()
    run = federation(tmp_path / "b", method, resume=True, **{**keys, "num_server_rounds": 3}).run()
    (last, expected) = (each.strategy.history[-1] for each in (run, whole))
    assert (last.failures, last.accuracy) == ([], expected.accuracy)
    assert last.test_loss == expected.test_loss is not None
    assert run.fingerprint == whole.fingerprint
    assert run.directory.result() == whole.directory.result() != ""


def killed(message: Message, answer: Answer) -> Message:
    raise KeyboardInterrupt


def test_patience_counts_on_scores_only(tmp_path: Path) -> None:
    keys = {**KEYS, "num_server_rounds": 30, "evaluate_every": 3, "learning_rate": 1e-6, "patience": 2}
    keys["patience_on"] = "test"
    run = federation(tmp_path, **keys).run()
    last = run.strategy.history[-1]
    assert last.round < 30
    assert last.round % 3 == 0
    assert last.accuracy


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_what_reads_a_run_knows_rounds_without_scores(tmp_path: Path, method: str) -> None:
    run = federation(tmp_path, method, **KEYS).run()
    path = run.directory.path
    read = FinishedRun.load(path)
    by = read.predictor
    assert [number for number, _ in read.curve()] == ([2, 4, 5] if method == "fedproto" else [0, 2, 4, 5])
    assert set(read.accuracies()) == set(range(5))
    assert by in shown(path)
    for words in (
        ["show", path],
        ["list", "runs", path.parent],
        ["watch", path, "--once"],
    ):
        result = pbfl(*words)
        assert result.exit_code == 0, result.output
    result = pbfl("report", path, "--out", tmp_path / "report")
    assert result.exit_code == 0, result.output


def test_an_unfinished_run_shows_its_last_scores(tmp_path: Path) -> None:
    run = federation(tmp_path, **KEYS).run()
    path = run.directory.path
    for name in ("rounds.jsonl", "clients.jsonl"):
        lines = (path / name).read_text().splitlines()
        (path / name).write_text("\n".join(lines[:3]) + "\n")
    read = FinishedRun.load(path)
    assert read.scores[read.predictor].last[0] == 2
    assert read.accuracies()
    second = json.loads((path / "clients.jsonl").read_text().splitlines()[1])
    assert len(read.accuracies()) == sum(tests > 0 for tests in second["num_test"])


def test_a_table_of_rounds_has_empty_cells(tmp_path: Path) -> None:
    run = federation(tmp_path, **KEYS).run()
    result = pbfl("report", run.directory.path, "--out", tmp_path / "report")
    assert result.exit_code == 0, result.output
    for file in (tmp_path / "report").rglob("*.csv"):
        with file.open() as stream:
            assert not any("nan" in cell.lower() for row in csv.reader(stream) for cell in row), file
