"""A run that gets no better ends by itself, and whoever reads it knows that nothing is missing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import status
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.results import scores
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.directory import RESULT, RunDirectory
from pbfl_flwr.runs.early_stopping import (
    Score,
    StopsOn,
    all_scores,
    best,
    early_stop_warning,
    patience_exhausted,
    scores_on,
)
from pbfl_flwr.runs.records import FinalScores, RoundRecord
from pbfl_flwr.runs.tensor_files import load_tensors
from tests.flower.inprocess import Federation, federation
from tests.small_runs import entry, pbfl, refused

DETERMINISTIC: dict[str, Any] = {
    "learning_rate": 1e-30,
    "models": "cnn4",
    "predictor": "head",
    "patience_on": "test",
}  # nothing changes, so round 1 stays the best


def line(number: int, test: float | None, validation: float | None = None) -> RoundRecord:
    made = RoundRecord.from_json(entry(number, 0.0 if test is None else 1 - test, test), "a line")
    if test is None:
        made = made.model_copy(update={"accuracy": {}})
    if validation is None:
        return made
    on_validation = RoundRecord.from_json(entry(number, 0.0, validation), "a line").accuracy["global"]
    return made.model_copy(update={"validation": {"global": on_validation}})


def history(*scores: float | tuple[float, float] | None) -> list[RoundRecord]:
    """Rounds with an accuracy on test data, or (on test data, on validation data)."""
    made = [score if isinstance(score, tuple) else (score, None) for score in scores]
    return [line(number, *score) for number, score in enumerate(made, start=1)]


@pytest.mark.parametrize(
    ("on", "scores", "patience", "at"),
    [
        ("test", (0.5, 0.4, 0.4), 2, 1),
        ("test", (0.5, 0.4), 2, None),
        ("test", (0.5, 0.4, 0.5), 2, 1),  # of equals the first
        ("test", (0.5, 0.4, 0.6), 2, None),
        ("test", (0.3, 0.6, 0.5, 0.4, 0.5), 3, 2),
        ("test", (0.5, 0.4, 0.4), 0, None),
        ("test", (None, None, None), 1, None),  # as long as nothing is scored a run goes on
        ("test", (None, 0.5, None), 1, 2),
        ("test", (0.5,), 1, None),
        ("test", (), 1, None),
        ("test", ((0.9, 0.1), (0.5, 0.2)), 1, 1),
        ("validation", ((0.9, 0.1), (0.5, 0.2)), 1, None),
        ("validation", (0.8, (0.5, 0.2), 0.9), 1, 2),
        ("validation", (0.8, (0.5, 0.2), 0.9, (0.5, 0.3), 0.95), 1, 4),
        ("validation", (0.8, 0.7, 0.6), 1, None),  # what test data say ends no run
    ],
)
def test_patience_by_hand(
    on: StopsOn, scores: tuple[float | tuple[float, float] | None, ...], patience: int, at: int | None
) -> None:
    by_round = scores_on(history(*scores), on, "global")
    ends = patience_exhausted(by_round, len(scores), patience)
    assert (best(by_round) if ends else None) == at


def covering(number: int, share: float, clients: int, answered: int = 9) -> RoundRecord:
    """A round with this accuracy by ``local`` of so many of the clients that answered."""
    made = RoundRecord.from_json(entry(number, 0.0, share), "a line")
    local = made.accuracy["global"].model_copy(update={"clients": clients})
    head = made.accuracy["head"].model_copy(update={"clients": answered})
    return made.model_copy(update={"accuracy": {"head": head, "local": local}})


@pytest.mark.parametrize(
    ("rounds", "at"),
    [
        (((0.9, 1), (0.7, 3), (0.6, 4), (0.5, 4)), 3),  # as more clients have trained
        (((0.9, 1), (0.7, 3), (0.8, 3)), 3),
        (((0.5, 4), (0.7, 3), (0.6, 4)), 2),  # a device is away for a round
        (((0.9, 4), (0.8, 3), (0.95, 3)), 3),  # or for ever
        (((0.5, 4), (0.6, 4), (0.4, 6), (0.5, 6)), 4),  # two have joined
        (((0.5, 4), (0.6, 4), (0.4, 6), (0.5, 4)), 4),  # and left
    ],
)
def test_first_rounds_that_cover_fewer_clients_are_no_better(
    rounds: tuple[tuple[float, int], ...], at: int
) -> None:
    history = [covering(number, *each) for number, each in enumerate(rounds, start=1)]
    assert scores(history)["local"].best[0] == at
    assert best(scores_on(history, "test", "local")) == at
    assert best(all_scores(history, "local")) == (at, False)


@pytest.mark.parametrize(
    ("rounds", "last", "at"),
    [
        # (accuracy by local, clients that have it, clients that answered)
        ([(0.9, 1, 3), (0.8, 3, 3), (0.7, 3, 3)], (0.75, 6, 6), (2, False)),  # a sample was asked
        ([(0.9, 1, 3), (0.8, 3, 3), (0.7, 3, 3)], (0.85, 6, 6), (3, True)),
        (
            [(0.9, 6, 7), (0.8, 8, 9), (0.7, 7, 8)],
            (0.75, 9, 10),
            (2, False),
        ),  # somebody failed in every round
        ([(0.9, 1, 5), (0.8, 2, 5)], (0.7, 3, 5), (2, True)),  # more have trained
        ([(0.9, 1, 5), (0.8, 2, 5)], (0.7, 3, 6), (2, False)),
    ],
)
def test_the_final_scoring_leaves_the_rounds_in_which_fewer_were_asked(
    rounds: list[tuple[float, int, int]], last: tuple[float, int, int], at: tuple[int, bool]
) -> None:
    history = [
        covering(number, *each).model_copy(update={"accuracy_of_round": number - 1})
        for number, each in enumerate(rounds, start=1)
    ]
    scoring = FinalScores(accuracy=covering(1, *last).accuracy, validation={}, failures=[])
    history[-1] = history[-1].model_copy(update={"final": scoring})
    assert best(all_scores(history, "local")) == at
    assert scores(history)["local"].best[0] == (at[0] if at[1] else at[0] - 1)


def test_run_whose_first_rounds_cover_few_clients_goes_on(tmp_path: Path) -> None:
    """One of three clients trains in a round, and only those that have trained are covered by ``local``."""
    run = ended(tmp_path, num_clients=3, fraction_train=0.3, predictor="local", method="fedproto", patience=4)
    covered = [entry.accuracy["local"].clients for entry in run.strategy.history]
    assert covered[0] == 1 < max(covered)
    most = 1 + covered.index(max(covered))  # nothing changes after it
    assert len(covered) == most + 4
    _, about = load_tensors(run.directory.path / "best.safetensors")
    assert about["round"] == str(most - 1)


def test_accuracies_are_of_the_predictor_and_said_to_be_on_validation_data() -> None:
    assert patience_exhausted(scores_on(history(0.9, 0.5), "test", "global"), 2, 1)
    assert not patience_exhausted(scores_on(history(0.9, 0.5), "test", "head"), 2, 1)
    by_round = scores_on(history((0.9, 0.1), (0.5, 0.2)), "validation", "global")
    assert by_round == {1: Score(True, 2, 0.1, 2), 2: Score(True, 2, 0.2, 2)}
    assert "on validation data" in early_stop_warning(by_round, "validation", "after", 2)


def test_patience_without_validation_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    said = "patience = 2: no client has validation data to stop by; set validation-share, e.g. 0.2, or patience-on=test"
    for share in (0, 0.001):  # no client has a thousand samples
        keys = ("--set", "patience=2", "--set", f"validation-share={share}")
        assert refused("run", "--dry-run", *keys) == f"error: {said}"
    assert pbfl("run", "--dry-run", "--set", "patience=2", "--set", "validation-share=0.2").exit_code == 0
    with pytest.raises(PbflError, match=f"^{re.escape(said)}$"):  # of clients with data of their own
        ended(tmp_path, patience_on="validation")
    assert not (tmp_path / "run" / "run.json").exists()


def ended(tmp_path: Path, rounds: int = 9, **keys: Any) -> Federation:
    return federation(
        tmp_path, num_server_rounds=rounds, on_disk=True, **{**DETERMINISTIC, "patience": 2, **keys}
    ).run()


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A run of at most nine rounds that has ended after three, to be looked at only."""
    return ended(tmp_path_factory.mktemp("early"))


def test_run_ends_early_and_is_finished(early: Federation) -> None:
    assert [entry.round for entry in early.strategy.history] == [1, 2, 3]
    messages = [note for note in early.strategy.history[-1].warnings if "patience" in note]
    assert messages == [
        "no better accuracy on test data for 2 rounds, since round 1: the run ends early (patience)"
    ]
    assert not any("patience" in note for entry in early.strategy.history[:2] for note in entry.warnings)
    directory = early.directory
    about = directory.record()
    assert about.ended_after == about.last_round == 3
    assert directory.result()
    assert status.snapshot(directory.path).state == "finished"
    assert status.snapshot(directory.path).wanted == 3
    shown = pbfl("show", directory.path)
    assert shown.exit_code == 0
    assert "resume with" not in shown.stdout
    assert json.loads(pbfl("show", directory.path, "--format", "json").stdout)["rounds"] == {
        "done": 3,
        "wanted": 3,
    }


def test_patience_that_ends_in_the_last_round_is_no_early_end(tmp_path: Path) -> None:
    run = ended(tmp_path, rounds=3)
    assert not any("early" in note for entry in run.strategy.history for note in entry.warnings)


def test_last_round_of_early_end_has_a_final_scoring(tmp_path: Path) -> None:
    run = ended(tmp_path, evaluate_moment="before")
    assert [entry.final is not None for entry in run.strategy.history] == [False, False, True]
    (output,) = [note for note in run.strategy.history[-1].warnings if "patience" in note]
    assert "since round 0:" in output  # as the tables call it
    assert scores(run.strategy.history)["head"].best[0] == 0


def test_fewer_requested_rounds_are_no_early_end(tmp_path: Path) -> None:
    run = federation(tmp_path, num_server_rounds=4, on_disk=True, **DETERMINISTIC)
    run.strategy.start(run.grid, num_rounds=2)
    assert run.directory.record().ended_after is None
    assert run.directory.record().last_round == 2
    assert run.directory.record().configuration["num-server-rounds"] == 2
    assert run.directory.result()


def test_run_resumed_without_patience_has_the_same_result(tmp_path: Path) -> None:
    whole = ended(tmp_path / "whole", rounds=5, patience=0, learning_rate=0.05)
    parts = ended(tmp_path / "parts", rounds=5)
    assert len(parts.strategy.history) == 3
    again = ended(tmp_path / "parts", rounds=5, patience=0, resume=True)
    assert len(again.strategy.history) == 5
    assert again.directory.record().ended_after is None
    alone = ended(tmp_path / "alone", rounds=5, patience=0)
    assert again.directory.result() == alone.directory.result() != whole.directory.result()


@pytest.mark.parametrize("recorded", [True, False])
def test_resumed_run_stays_ended(tmp_path: Path, early: Federation, recorded: bool) -> None:
    """Also one that was killed before it wrote down that it had ended."""
    run = RunDirectory(shutil.copytree(early.directory.path, tmp_path / "run"))
    if not recorded:
        run.update(ended_after=None)
        run.remove(RESULT)
        assert status.snapshot(run.path).state != "finished"
    again = ended(tmp_path, rounds=12 if recorded else 9, resume=True)
    assert len(again.strategy.history) == 3
    assert again.directory.record().ended_after == 3
    assert again.directory.result() == early.directory.result()


def test_run_is_complete_with_the_same_patience(early: Federation) -> None:
    def complete(**keys: Any) -> bool:
        changed = {**early.directory.record().configuration, **keys}
        done = early.directory.finished_rounds()
        return configuration.is_complete(early.directory, parse(changed, SECTIONS), done)

    assert complete()
    assert complete(**{"num-server-rounds": 50})
    assert not complete(patience=0)
    assert not complete(patience=5)
    assert complete(patience=0, **{"num-server-rounds": 3})
    assert not complete(patience=0, **{"num-server-rounds": 4})


def test_warns_of_patience_before_the_first_exchange() -> None:
    words = ["--set", "models=mlp5", "--set", "dataset=digits", "--set", "method=gfpl", "--dry-run"]
    words += ["--set", "validation-share=0.2"]
    message = (
        "gfpl: patience = 3: the run may end as early as one with num-server-rounds = 4: the first exchange"
    )
    assert message in pbfl("run", *words, "--set", "patience=3").stdout
    assert "end as early" not in pbfl("run", *words, "--set", "patience=10").stdout
    assert "end as early" not in pbfl("run", *words).stdout
