"""Injected faults: drawn from seed, client and round, and what they cost."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.flower.client import fault_injection as faults
from tests.flower.inprocess import (
    NUM_CLIENTS,
    federation,
    injected,
    plain,
    same_tensors,
    silent,
    stored_rounds,
)


def test_draws_depend_only_on_seed_client_and_round() -> None:
    def draw(
        rates: Mapping[str, Scalar], client: int | str, server_round: int, seed: int = 0
    ) -> faults.Fault:
        return faults.draw(parse({**rates, "seed": seed}), client, server_round)

    half: dict[str, Scalar] = {"faults.drop": 0.5}
    others: dict[str, Scalar] = {"faults.crash": 0.5, "faults.delay": 0.5, "faults.stale": 0.1}
    assert draw(half, 3, 7) == draw(half, 3, 7)
    several = {draw(half, c, r, s).drop for c in range(3) for r in range(5) for s in (0, 1)}
    assert several == {True, False}
    for client in range(20):  # another fault beside it moves nothing
        one, more = draw(half, client, 1), draw({**half, **others}, client, 1)
        assert one.drop == more.drop
    drops = [draw({"faults.drop": 0.3}, client, 1).drop for client in range(2000)]
    assert 0.26 < sum(drops) / 2000 < 0.34  # three standard deviations are 0.03


@pytest.mark.parametrize(
    ("word", "reason", "stored"),
    [
        ("drop", "injected fault: its reply was dropped", (2, 2)),  # it trained, only its answer is lost
        ("crash", "injected fault: crash", (1, 1)),
        ("corrupt", "upload rejected: its bytes do not match their checksum", (2, 2)),
        ("stale", "sent its upload of round 1 instead of round 2", (1, 1)),
    ],
)
def test_fault_affects_its_client_only(
    tmp_path: Path, word: str, reason: str, stored: tuple[int, int]
) -> None:
    with injected(word, {(2, 2)}):
        faulty = federation(tmp_path / "a").run()
    without = federation(tmp_path / "b", faults={(2, 2): silent}).run()
    assert plain(faulty.strategy.history[1].failures) == [{"client": 2, "reason": reason}]
    assert faulty.strategy.history[1].trained == [0, 1, 3, 4]
    first, second = (line.bytes_up.payload for line in faulty.strategy.history)
    assert (first == second) == (word in ("corrupt", "stale")), "what is rejected came all the same"
    assert same_tensors(faulty.strategy.state.to_tensors(), without.strategy.state.to_tensors())
    assert stored_rounds(faulty) == {**dict.fromkeys(range(NUM_CLIENTS), (2, 2)), 2: stored}


def test_delay_sleeps(tmp_path: Path) -> None:
    slept: list[float] = []
    with injected("seconds", {(1, 2)}), patch.object(time, "sleep", slept.append):
        run = federation(tmp_path).run()
    assert [seconds for seconds in slept if seconds] == [1.5]
    assert run.strategy.history[1].failures == []


FAULTS: dict[str, Any] = {f"faults.{kind}": 0.2 for kind in ("drop", "crash", "corrupt", "stale")}
ATTACK: dict[str, Any] = {"attack.kind": "noise", "attack.share": 0.4}


@pytest.mark.parametrize(("keys", "least"), [(FAULTS, 4), (ATTACK, 0)], ids=["faults", "attack"])
def test_faults_and_attacks_do_not_depend_on_order_or_resume(
    tmp_path: Path, keys: dict[str, Any], least: int
) -> None:
    keys = {**keys, "num_server_rounds": 4}
    one = federation(tmp_path / "a", **keys).run()
    other = federation(tmp_path / "b", order=5, **keys).run()
    federation(tmp_path / "c", on_disk=True, **{**keys, "num_server_rounds": 2}).run()
    resumed = federation(tmp_path / "c", on_disk=True, resume=True, **keys).run()
    failures = [line.failures for line in one.strategy.history]
    assert sum(map(len, failures)) >= least
    assert failures == [line.failures for line in other.strategy.history]
    assert failures == [line.failures for line in resumed.strategy.history]
    assert one.fingerprint == other.fingerprint == resumed.fingerprint


def test_faults_are_off_by_default_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation(tmp_path / "a", num_server_rounds=1).run()
    assert "faults are injected" not in caplog.text
    rarely: dict[str, Any] = {"faults.corrupt": 0.001}
    federation(tmp_path / "b", num_server_rounds=1, **rarely).run()
    assert "faults are injected: corrupt 0.001" in caplog.text
