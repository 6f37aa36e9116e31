"""Clients keep the state of the best round beside their last one, and an export finds it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server import strategy as strategies
from pbfl_flwr.payloads import part_of
from pbfl_flwr.runs.client_store import ClientStore, kept_best, load_tensors
from pbfl_flwr.runs.early_stopping import Score
from pbfl_flwr.runs.records import RoundRecord
from pbfl_flwr.serving.states import best_of, of_round, read_state, state_file
from tests.flower.inprocess import Federation, federation, same_tensors
from tests.small_runs import pbfl

CLIENTS = range(5)


def run(tmp_path: Path, rounds: int, best: int = 0, **keys: Any) -> Federation:
    """Run so many rounds, the best of which is said to be this one."""
    keys = {"models": "cnn4", "keep_best": True, **keys}
    fed = federation(tmp_path, num_server_rounds=rounds, on_disk=True, **keys)

    def better_until_best(history: Sequence[RoundRecord], predictor: str) -> dict[int, Score]:
        return {
            record.round: (False, float(record.round if record.round <= best else 0))
            for record in history
            if best
        }

    with patch.object(strategies, "scores_by_round", better_until_best):
        return fed.run()


def home(fed: Federation) -> Path:
    path: Path = fed.directory.path
    return path / "clients" / fed.directory.record().experiment


def store(fed: Federation, client: int) -> Path:
    return ClientStore(home(fed), "", client, "").path


def model(file: Path) -> dict[str, torch.Tensor]:
    return part_of(load_tensors(file)[0], "model")


@pytest.mark.parametrize("links", [True, False])
def test_keeps_state_of_the_best_round(links: bool, tmp_path: Path) -> None:
    short = run(tmp_path / "short", 2, keep_best=False)
    if links:
        long = run(tmp_path / "long", 4, best=2)
    else:
        with patch.object(Path, "hardlink_to", side_effect=PermissionError("no links here")):
            long = run(tmp_path / "long", 4, best=2)
    for client in CLIENTS:
        last = store(long, client)
        ((number, stored),) = kept_best(last).items()
        assert number == 2
        assert stored.stat().st_mode & 0o777 == 0o600
        assert same_tensors(model(stored), model(store(short, client)))
        assert not same_tensors(model(stored), model(last))
        assert kept_best(store(short, client)) == {}
    with pytest.raises(PbflError, match="of earlier rounds it has none"):
        of_round(state_file(short.directory.path, "0"), 1)
    assert short.directory.result() != long.directory.result()


@pytest.fixture(scope="module")
def best_of_three(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A run of three rounds of which the first was the best, to be looked at only."""
    return run(tmp_path_factory.mktemp("best"), 3, best=1)


def test_keep_best_does_not_change_results(best_of_three: Federation, tmp_path: Path) -> None:
    without = run(tmp_path, 3, keep_best=False)
    assert best_of_three.directory.result() == without.directory.result()
    told = [
        {
            message.content[wire.CONFIG].get("best")
            for message in federation.grid.sent
            if wire.CONFIG in message.content
        }
        for federation in (best_of_three, without)
    ]
    assert told == [{None, 1}, {None}]


def test_better_round_replaces_the_best_one(tmp_path: Path) -> None:
    fed = run(tmp_path, 4, best=9)  # every round is better than the one before
    assert [set(kept_best(store(fed, client))) for client in CLIENTS] == [{3}] * 5
    assert {read_state(of_round(store(fed, 0), 3)).card.round} == {3}
    assert of_round(store(fed, 0), 4) == store(fed, 0)


def test_idle_client_keeps_its_state_of_the_best_round(tmp_path: Path) -> None:
    fed = run(tmp_path, 6, best=3, fraction_train=0.4)
    trained: dict[int, list[int]] = {client: [] for client in CLIENTS}
    for record in fed.directory.round_records():
        for client in record.trained:
            trained[client].append(record.round)
    for client, rounds in trained.items():
        if not (before := [number for number in rounds if number <= 3]):
            continue
        assert read_state(of_round(store(fed, client), 3)).card.round == max(before)
    assert any(rounds and max(rounds) > 3 >= min(rounds) for rounds in trained.values())


def test_exports_the_best_round(best_of_three: Federation, tmp_path: Path) -> None:
    path = best_of_three.directory.path
    done = pbfl("export", path, "--client", 1, "--round", 1, "--out", tmp_path / "one")
    assert done.exit_code == 0, done.stderr
    assert "after round 1:" in done.stdout
    with patch("pbfl_flwr.serving.states.best_round", lambda scores: 1):
        done = pbfl("export", path, "--client", 1, "--best", "--out", tmp_path / "best")
    assert "after round 1:" in done.stdout
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "best")]
    assert weights[0] == weights[1]
    assert "after round 3:" in pbfl("export", path, "--client", 1, "--out", tmp_path / "last").stdout
    refused = pbfl("export", path, "--client", 1, "--round", 2, "--out", tmp_path / "two")
    assert refused.exit_code == 2
    output = " ".join(refused.stderr.split())
    assert "last trained in round 3, after round 2; of earlier rounds it has round 1" in output
    both = pbfl("export", path, "--client", 1, "--round", 2, "--best", "--out", tmp_path / "two")
    assert "--best and --round: must be one of the two" in both.stderr
    device = pbfl("export", home(best_of_three), "--client", 1, "--best", "--out", tmp_path / "two")
    assert "is not a run directory" in " ".join(device.stderr.split())
    at_home = pbfl("export", home(best_of_three), "--client", 1, "--round", 1, "--out", tmp_path / "three")
    assert at_home.exit_code == 0
    assert (tmp_path / "three" / "model.safetensors").read_bytes() == weights[0]


def test_which_round_is_the_best(tmp_path: Path) -> None:
    fed = run(tmp_path, 2, best=1)
    path = fed.directory.path
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    primary_predictor = fed.directory.record().primary_predictor
    for line, score in zip(lines, (0.9, 0.2), strict=True):
        line["accuracy"][primary_predictor] = {**line["accuracy"]["head"], "weighted": score}
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_of(path) == 1
    for line in lines:
        line["accuracy"] = {}
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(PbflError, match=r"no round of .* was scored"):
        best_of(path)


def test_no_best_state_if_scored_before_training(tmp_path: Path) -> None:
    fed = run(tmp_path, 2, keep_best=False, evaluate_moment="before")
    refused = pbfl("export", fed.directory.path, "--client", 1, "--best", "--out", tmp_path / "best")
    assert refused.exit_code == 2
    assert "were scored before local training" in " ".join(refused.stderr.split())


def test_best_states_of_similar_names_differ(tmp_path: Path) -> None:
    for name in ("a", "a.5", "a.5.best"):
        one = ClientStore(tmp_path, "e", name, "cnn4")
        one.path.write_bytes(b"x")
        one.keep_best(7)
    assert kept_best(tmp_path / "named-a.safetensors") == {7: tmp_path / "named-a.7.best"}
    assert kept_best(tmp_path / "named-a.5.safetensors") == {7: tmp_path / "named-a.5.7.best"}
    assert kept_best(tmp_path / "named-a.5.best.safetensors") == {7: tmp_path / "named-a.5.best.7.best"}
