"""A run that gets no better ends by itself, and whoever reads it knows that nothing is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import configuration, watch
from pbfl_flwr.experiments.accuracies import scores
from pbfl_flwr.flower.history import ENDED, RunDirectory, last_round
from pbfl_flwr.flower.patience import exhausted, note_of, score_of
from pbfl_flwr.methods import SECTIONS
from tests.flower.inprocess import Federation, federation
from tests.runs import pbfl

STILL: dict[str, Any] = {
    "learning_rate": 1e-30,
    "models": "cnn4",
    "predictor": "head",
}  # nothing changes, so round 1 stays the best


def line(number: int, test: float | None, validation: float | None = None) -> dict[str, Any]:
    return {
        "round": number,
        "accuracy": {} if test is None else {"global": {"weighted": test}, "head": {"weighted": 1 - test}},
        **({} if validation is None else {"validation": {"global": {"weighted": validation}}}),
    }


def history(*scores: float | None) -> list[dict[str, Any]]:
    return [line(number, score) for number, score in enumerate(scores, start=1)]


@pytest.mark.parametrize(
    ("scores", "patience", "best"),
    [
        ((0.5, 0.4, 0.4), 2, 1),
        ((0.5, 0.4), 2, None),
        ((0.5, 0.4, 0.5), 2, 1),  # of equals the first
        ((0.5, 0.4, 0.6), 2, None),
        ((0.3, 0.6, 0.5, 0.4, 0.5), 3, 2),
        ((0.5, 0.4, 0.4), 0, None),
        ((None, None, None), 1, None),  # as long as nothing is scored a run goes on
        ((None, 0.5, None), 1, 2),
        ((0.5,), 1, None),
        ((), 1, None),
    ],
)
def test_when_patience_ends(scores: tuple[float | None, ...], patience: int, best: int | None) -> None:
    assert exhausted(history(*scores), "global", patience) == best


def test_validation_counts_where_there_is_some() -> None:
    lines = [line(1, 0.9, 0.1), line(2, 0.5, 0.2)]
    assert [score_of(entry, "global") for entry in lines] == [0.1, 0.2]
    assert exhausted(lines, "global", 1) is None
    assert exhausted(lines, "head", 1) is None
    assert "on validation data" in note_of(1, 2, validated=True)
    assert exhausted(history(0.9, 0.5), "head", 1) is None
    assert exhausted(history(0.9, 0.5), "global", 1) == 1


def ended(tmp_path: Path, rounds: int = 9, **keys: Any) -> Federation:
    return federation(
        tmp_path, num_server_rounds=rounds, on_disk=True, **{**STILL, "patience": 2, **keys}
    ).run()


def test_a_run_ends_by_itself_and_is_finished(tmp_path: Path) -> None:
    run = ended(tmp_path)
    assert [entry["round"] for entry in run.strategy.history] == [1, 2, 3]
    said = [note for note in run.strategy.history[-1]["notes"] if "patience" in note]
    assert said == [note_of(1, 2, validated=False)]
    assert said == ["no better score on test data for 2 rounds, since round 1: the run ends here (patience)"]
    assert not any("patience" in note for entry in run.strategy.history[:2] for note in entry["notes"])
    there = run.directory
    about = there.read()
    assert about[ENDED] == last_round(about) == 3
    assert there.result()
    assert watch.look(there.path, 0.0).state == "finished"
    assert watch.look(there.path, 0.0).wanted == 3
    shown = pbfl("show", there.path)
    assert shown.exit_code == 0
    assert "go on with" not in shown.stdout
    assert json.loads(pbfl("show", there.path, "--format", "json").stdout)["rounds"] == {
        "done": 3,
        "wanted": 3,
    }


def test_the_last_round_has_its_last_scoring(tmp_path: Path) -> None:
    run = ended(tmp_path, evaluate_moment="before", patience=1)
    assert ["final" in entry for entry in run.strategy.history] == [False, True]
    assert scores(run.strategy.history)["head"].best[0] == 0  # scored before training: the initial models
    said = "no better score on test data for 1 round, since round 0: the run ends here (patience)"
    assert said in run.strategy.history[-1]["notes"]


def test_new_clients_come_after_it(tmp_path: Path) -> None:
    run = ended(tmp_path, new_clients=1, new_client_rounds=2)
    assert len(run.strategy.history) == 3
    assert [entry["after"] for entry in run.strategy.newcomers] == [3, 3]
    assert run.directory.result()
    assert watch.look(run.directory.path, 0.0).state == "finished"


def test_without_patience_or_with_better_rounds_all_are_made(tmp_path: Path) -> None:
    assert len(ended(tmp_path / "a", rounds=4, patience=0).strategy.history) == 4
    run = ended(tmp_path / "b", rounds=4, patience=4)
    assert len(run.strategy.history) == 4
    assert ENDED not in run.directory.read()
    assert run.directory.result()


def test_it_goes_on_when_it_is_told_to_and_comes_to_the_same(tmp_path: Path) -> None:
    whole = ended(tmp_path / "whole", rounds=5, patience=0, learning_rate=0.05)
    parts = ended(tmp_path / "parts", rounds=5)
    assert len(parts.strategy.history) == 3
    again = ended(tmp_path / "parts", rounds=5, patience=0, resume=True)
    assert len(again.strategy.history) == 5
    assert ENDED not in again.directory.read()
    alone = ended(tmp_path / "alone", rounds=5, patience=0)
    assert again.directory.result() == alone.directory.result() != whole.directory.result()


def test_a_run_that_is_resumed_as_it_was_ends_where_it_ended(tmp_path: Path) -> None:
    first = ended(tmp_path)
    result = first.directory.result()
    again = ended(tmp_path, rounds=12, resume=True)
    assert len(again.strategy.history) == 3
    assert again.directory.read()[ENDED] == 3
    assert again.directory.result() == result


def test_one_that_was_killed_before_it_wrote_that_down_ends_there_too(tmp_path: Path) -> None:
    first = ended(tmp_path)
    result = first.directory.result()
    about = first.directory.read()
    del about[ENDED]
    (first.directory.path / "run.json").write_text(json.dumps(about))
    first.directory.unseal()
    assert watch.look(first.directory.path, 0.0).state != "finished"
    again = ended(tmp_path, resume=True)
    assert len(again.strategy.history) == 3
    assert again.directory.read()[ENDED] == 3
    assert again.directory.result() == result


def test_what_is_complete(tmp_path: Path) -> None:
    path = ended(tmp_path).directory.path

    def complete(**keys: Any) -> bool:
        changed = {**RunDirectory(path).read()["configuration"], **keys}
        return configuration.complete(path, parse(changed, SECTIONS))

    assert complete()
    assert complete(**{"num-server-rounds": 50})
    assert not complete(patience=0)
    assert not complete(patience=5)
    assert complete(patience=0, **{"num-server-rounds": 3})


def test_patience_needs_scores() -> None:
    with pytest.raises(
        PbflError, match="patience = 3: with client-report = 'none' nobody says how clients score"
    ):
        parse({"patience": 3, "client-report": "none"})
