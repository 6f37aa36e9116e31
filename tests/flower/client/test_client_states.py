"""Clients of a method that keeps nothing between rounds store no state, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.serving.averaged import averaged
from pbfl_flwr.serving.states import state_file
from tests.flower.inprocess import NUM_CLIENTS, Answer, Federation, after_round, federation, plain

KEYS: dict[str, Any] = {"models": "cnn4", "num_server_rounds": 3, "fraction_train": 0.6, "on_disk": True}


def states(run: Federation) -> list[str]:
    return sorted(file.name for file in run.directory.path.rglob("clients/**/*.safetensors"))


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_client_that_keeps_nothing_stores_nothing(tmp_path: Path, method: str) -> None:
    without = federation(tmp_path / "a", method, **KEYS).run()
    kept = federation(tmp_path / "b", method, client_states="always", **KEYS).run()
    assert (states(without), len(states(kept))) == ([], NUM_CLIENTS)
    assert without.fingerprint == kept.fingerprint
    assert without.directory.result() == kept.directory.result() != ""
    counted, expected = ([*run.directory.client_records()] for run in (without, kept))
    assert [line.participations for line in counted] == [line.participations for line in expected]
    assert not any(
        "lost its state" in warning for line in without.strategy.history for warning in line.warnings
    )


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("fedavg", {"models": "resnet4"}),  # BatchNorm's statistics
        ("fedavg", {"evaluate_moment": "after"}),
        ("fedavg", {"optimizer_state": "kept", "momentum": 0.5}),
        ("fedper", {}),
        ("fedproto", {}),
        ("fedala", {}),
    ],
)
def test_a_client_that_keeps_something_stores_it(tmp_path: Path, method: str, keys: dict[str, Any]) -> None:
    assert states(federation(tmp_path, method, **{**KEYS, **keys}).run()) != []


def test_a_killed_run_comes_to_the_same_bits_without_states(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    whole = federation(tmp_path / "a", "fedavg", **KEYS).run()
    with after_round(2, kill), pytest.raises(Killed):
        federation(tmp_path / "b", "fedavg", **KEYS).run()
    resumed = federation(tmp_path / "b", "fedavg", resume=True, **KEYS).run()
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.directory.result() == whole.directory.result()


def test_a_repeated_question_gets_the_same_answer(tmp_path: Path) -> None:
    def twice(message: Message, answer: Answer) -> Message:
        answer()
        return answer()

    once = federation(tmp_path / "a", "fedavg", **KEYS).run()
    repeated = federation(tmp_path / "b", "fedavg", faults={(0, 1): twice, (3, 2): twice}, **KEYS).run()
    assert repeated.fingerprint == once.fingerprint
    assert plain(repeated.strategy.history)[0]["failures"] == []


def test_an_export_says_what_to_set(tmp_path: Path) -> None:
    run = federation(tmp_path, "fedavg", **KEYS).run()
    with pytest.raises(
        PbflError, match="once it has trained, with FedAvg and its kind only if client-states = 'always'"
    ):
        averaged(run.directory.path)
    with pytest.raises(
        PbflError, match="once it has trained, with FedAvg and its kind only if client-states = 'always'"
    ):
        state_file(run.directory.path, "1")


def test_only_averaging_methods_keep_nothing(tmp_path: Path) -> None:
    strategy = federation(tmp_path, "fedavg").strategy
    assert isinstance(strategy, MethodStrategy)
    assert strategy.method.keeps_nothing
    assert not federation(tmp_path, "fedproto").strategy.method.keeps_nothing
