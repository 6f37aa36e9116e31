"""docs/examples/faulty_client.py: which messages its mods hit, and what that costs."""

import random
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from flwr.app import Context, Message

from tests.flower.inprocess import (
    NUM_CLIENTS,
    federation,
    plain,
    round_of,
    same_tensors,
    silent,
    stored_rounds,
)

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
EVERY = ",".join(f"faulty_client:{kind}" for kind in ("drop", "crash", "corrupt", "stale"))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which clients import as well."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("faulty_client")


def chosen(faults: Any, hit: set[tuple[int, int]]) -> Any:
    """Hit (client, round) in ``hit`` and none else."""

    def hits(kind: str, message: Message, context: Context) -> bool:
        return (context.node_config["partition-id"], round_of(message)) in hit

    return patch.object(faults, "hits", hits)


def test_its_share_of_training_messages_is_hit(faults: Any) -> None:
    class Asked:
        def __init__(self, kind: str) -> None:
            self.metadata = self
            self.message_type = kind

    random.seed(0)
    hit = [faults.hits("delay", Asked("train"), None) for _ in range(2000)]
    assert 0.26 < sum(hit) / 2000 < 0.34  # three standard deviations are 0.03
    assert not any(faults.hits("delay", Asked(kind), None) for kind in ("query", "evaluate") * 50)


@pytest.mark.parametrize(
    ("word", "reason", "stored"),
    [
        ("drop", "injected fault: its reply was dropped", (2, 2)),  # it trained, only its answer is lost
        ("corrupt,faulty_client:drop", "injected fault: its reply was dropped", (2, 2)),
        ("crash", "injected fault: crash", (1, 1)),
        ("corrupt", "upload rejected: its bytes do not match their checksum", (2, 2)),
        ("stale", "sent its upload of round 1 instead of round 2", (1, 1)),
    ],
)
def test_fault_affects_its_client_only(
    tmp_path: Path, faults: Any, word: str, reason: str, stored: tuple[int, int]
) -> None:
    with chosen(faults, {(2, 2)}):
        faulty = federation(tmp_path / "a", mods=f"faulty_client:{word}").run()
    without = federation(tmp_path / "b", faults={(2, 2): silent}).run()
    assert plain(faulty.strategy.history[1].failures) == [{"client": 2, "reason": reason}]
    assert faulty.strategy.history[1].trained == [0, 1, 3, 4]
    first, second = (line.bytes_up.payload for line in faulty.strategy.history)
    assert (first == second) == (word in ("corrupt", "stale")), "what is rejected came all the same"
    assert same_tensors(faulty.strategy.state.to_tensors(), without.strategy.state.to_tensors())
    assert stored_rounds(faulty) == {**dict.fromkeys(range(NUM_CLIENTS), (2, 2)), 2: stored}


def test_there_is_no_stale_answer_in_round_1(tmp_path: Path, faults: Any) -> None:
    with chosen(faults, {(2, 1)}):
        run = federation(tmp_path, mods="faulty_client:stale").run()
    assert [line.failures for line in run.strategy.history] == [[], []]


def test_delay_sleeps(tmp_path: Path, faults: Any) -> None:
    slept: list[float] = []
    with chosen(faults, {(1, 2)}), patch.object(time, "sleep", slept.append):
        run = federation(tmp_path, mods="faulty_client:delay").run()
    assert [seconds for seconds in slept if seconds] == [faults.SECONDS]
    assert run.strategy.history[1].failures == []


def test_faults_do_not_depend_on_order_or_resume(tmp_path: Path, faults: Any) -> None:
    keys: dict[str, Any] = {"num_server_rounds": 4, "mods": EVERY}
    with patch.dict(faults.RATES, dict.fromkeys(faults.RATES, 0.2)):
        one = federation(tmp_path / "a", **keys).run()
        other = federation(tmp_path / "b", order=5, **keys).run()
        federation(tmp_path / "c", on_disk=True, **{**keys, "num_server_rounds": 2}).run()
        resumed = federation(tmp_path / "c", on_disk=True, resume=True, **keys).run()
    failures = [line.failures for line in one.strategy.history]
    assert sum(map(len, failures)) >= 4
    assert failures == [line.failures for line in other.strategy.history]
    assert failures == [line.failures for line in resumed.strategy.history]
    assert one.fingerprint == other.fingerprint == resumed.fingerprint
