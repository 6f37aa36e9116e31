"""Faults on purpose, stragglers, clients that come back, full disks, a server that is killed: in one process."""

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import Timeout
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import app as client_module
from pbfl_flwr.flower.client import fault_injection as faults
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server import membership as returning
from pbfl_flwr.flower.server.exchange import MAX_OVERDUE_ROUNDS, Instructions, OverdueReplies, OverdueReply
from pbfl_flwr.flower.server.membership import checked_roster, handshake_with_new_nodes
from pbfl_flwr.flower.server.roster import client_from_reply
from pbfl_flwr.flower.server.rounds import updated_ages
from pbfl_flwr.flower.server.stopping import RunEnded
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs import checkpoint
from pbfl_flwr.runs import client_store as store
from pbfl_flwr.runs import directory as history
from pbfl_flwr.runs.client_store import load_tensors
from pbfl_flwr.runs.records import ClientRecord, Scores
from pbfl_flwr.task import Task
from pbfl_flwr.util.atomic_files import write_atomically
from tests.flower.inprocess import (
    NUM_CLIENTS,
    Federation,
    InProcessGrid,
    after_round,
    delayed,
    federation,
    flower_error,
    handshake_reply,
    plain,
    raises,
    reply_of,
    same_tensors,
    scripted,
    silent,
    unreported,
)

TASK = Task(num_classes=4, feature_dim=6, input_shape=(1, 16, 16))


# The grammar ------------------------------------------------------------------------------------------------


def test_draws_depend_on_seed_client_and_round_and_not_on_each_other() -> None:
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


# What they do -----------------------------------------------------------------------------------------------


def states(found: Federation) -> dict[int, Any]:
    """Return client -> (round, participations) on its disk."""
    directory = Path(str(found.config["run-dir"])) / "clients" / found.strategy.experiment
    kept = {}
    for file in directory.glob("client-*.safetensors"):
        _, about = load_tensors(file)
        kept[int(about["client"])] = int(about["round"]), int(about["participations"])
    return kept


def only(word: str, hit: set[tuple[int, int]]) -> Any:
    """Draw this fault for (client, round) in hit and none else."""
    none: dict[str, Any] = {"drop": False, "crash": False, "corrupt": False, "stale": False, "seconds": 0.0}

    def drawn(settings: Any, client: Any, server_round: int) -> faults.Fault:
        value = {word: 1.5 if word == "seconds" else True} if (client, server_round) in hit else {}
        return faults.Fault(**{**none, **value}, places=(0.5, 0.9))

    return patch.object(faults, "draw", drawn)


@pytest.mark.parametrize(
    ("word", "reason", "kept"),
    [
        ("drop", "injected fault: its reply was dropped", (2, 2)),  # it trained, only its answer is lost
        ("crash", "injected fault: crash", (1, 1)),
        ("corrupt", "upload rejected: its bytes do not match their checksum", (2, 2)),
        ("stale", "sent its upload of round 1 instead of round 2", (1, 1)),
    ],
)
def test_a_fault_costs_its_own_client_only(
    tmp_path: Path, word: str, reason: str, kept: tuple[int, int]
) -> None:
    with only(word, {(2, 2)}):
        faulty = federation(tmp_path / "a").run()
    without = federation(tmp_path / "b", faults={(2, 2): silent}).run()
    assert plain(faulty.strategy.history[1].failures) == [{"client": 2, "reason": reason}]
    assert faulty.strategy.history[1].trained == [0, 1, 3, 4]
    first, second = (line.bytes_up.payload for line in faulty.strategy.history)
    assert (first == second) == (word in ("corrupt", "stale")), "what is rejected came all the same"
    assert same_tensors(faulty.strategy.state.to_tensors(), without.strategy.state.to_tensors())
    assert states(faulty) == {**dict.fromkeys(range(NUM_CLIENTS), (2, 2)), 2: kept}


def test_a_delay_is_slept(tmp_path: Path) -> None:
    slept: list[float] = []
    with only("seconds", {(1, 2)}), patch.object(time, "sleep", slept.append):
        found = federation(tmp_path).run()
    assert [seconds for seconds in slept if seconds] == [1.5]
    assert found.strategy.history[1].failures == []


def test_injected_faults_are_the_same_in_any_order_and_after_a_resume(tmp_path: Path) -> None:
    keys: dict[str, Any] = {f"faults.{kind}": 0.2 for kind in ("drop", "crash", "corrupt", "stale")}
    keys["num_server_rounds"] = 4
    one = federation(tmp_path / "a", **keys).run()
    other = federation(tmp_path / "b", order=5, **keys).run()
    federation(tmp_path / "c", on_disk=True, **{**keys, "num_server_rounds": 2}).run()
    resumed = federation(tmp_path / "c", on_disk=True, resume=True, **keys).run()
    failures = [line.failures for line in one.strategy.history]
    assert sum(map(len, failures)) >= 4
    assert failures == [line.failures for line in other.strategy.history]
    assert failures == [line.failures for line in resumed.strategy.history]
    assert one.fingerprint == other.fingerprint == resumed.fingerprint


def test_faults_are_off_and_said_when_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation(tmp_path / "a", num_server_rounds=1).run()
    assert "faults are injected" not in caplog.text
    rarely: dict[str, Any] = {"faults.corrupt": 0.001}
    federation(tmp_path / "b", num_server_rounds=1, **rarely).run()
    assert "faults are injected: corrupt 0.001" in caplog.text


# Stop or go on ----------------------------------------------------------------------------------------------


def test_stop_ends_the_run_at_the_first_failure_and_it_can_go_on(tmp_path: Path) -> None:
    found = federation(
        tmp_path / "a", faults={(3, 2): raises}, on_disk=True, num_server_rounds=3, failure_policy="stop"
    )
    with pytest.raises(RunEnded) as error:
        found.run()
    text = str(error.value)
    assert text.startswith("round 2: client 3 failed: ZeroDivisionError: boom in the middle of the round")
    assert "failure-policy is 'stop'. Rounds up to 1 are kept and can be resumed" in text
    assert "\n" not in text
    assert [line.round for line in found.directory.round_records()] == [1]
    # The policy may change when the run goes on; what is repeated gives the same bits.
    resumed = federation(tmp_path / "a", on_disk=True, resume=True, num_server_rounds=3).run()
    assert resumed.fingerprint == federation(tmp_path / "b", num_server_rounds=3).run().fingerprint


@pytest.mark.parametrize(("at", "moment"), [(2, "after"), (-1, "before")])
def test_a_round_that_ended_the_run_counts_once_when_it_is_started_again(
    tmp_path: Path, at: int, moment: str
) -> None:
    """FedTGP's server trains on from its state, so a round that was aggregated twice would show."""
    keys: dict[str, Any] = {"failure_policy": "stop", "evaluate_moment": moment}
    fault = flower_error("its node is unavailable")
    found = federation(tmp_path / "a", "fedtgp", faults={(3, at): fault}, on_disk=True, **keys)
    with pytest.raises(RunEnded, match="Rounds up to 1 are kept"):
        found.run()
    tensors, _ = load_tensors(found.directory.path / "checkpoint.safetensors")
    assert same_tensors(found.strategy.state.to_tensors(), tensors), "the state of the last finished round"
    found.grid.faults = {}
    found.run()
    whole = federation(tmp_path / "b", "fedtgp", **keys).run()
    assert found.fingerprint == whole.fingerprint
    assert [line.round for line in found.directory.round_records()] == [1, 2]


# Late answers -----------------------------------------------------------------------------------------------


def prototypes(rows: dict[int, float]) -> Prototypes:
    values, present = torch.zeros(4, 6), torch.zeros(4, dtype=torch.bool)
    for label, value in rows.items():
        values[label], present[label] = value, True
    return Prototypes(values, present)


TIMEOUT = 10.0  # of a round; every reply takes a second


def arrives_after(rounds: int) -> float:
    """Seconds until a reply that misses the deadline arrives: at once, or within so many further rounds."""
    return TIMEOUT + max(0.0, rounds - 0.5)


def straggling(
    late: Mapping[tuple[int, int], float],
    rounds: int,
    answers: Callable[[int, int], RecordDict | Message] | None = None,
    **keys: Scalar,
) -> tuple[MethodStrategy, InProcessGrid]:
    """Run three clients of which some answer late: client c sends c + 1 for class 0 (and client 2 for class 3), ten
    times as much a round later.

    Args:
        late: (client, round) -> seconds until its reply arrives.
        rounds: of the run.
        answers: other replies.
    """

    def answer(client: int, server_round: int) -> RecordDict:
        value = (client + 1.0) * 10.0 ** (server_round - 1)
        report = Report(10, 4, server_round, {"head": 2}, 0.5, round=server_round)
        return reply_of(prototypes({0: value, 3: value} if client == 2 else {0: value}), report)

    base = {"num-clients": 3, "num-server-rounds": rounds, "feature-dim": 6, "join-timeout": 0.2}
    more = {key.replace("_", "-"): value for key, value in keys.items()}
    strategy = MethodStrategy(parse({**base, "round-timeout": TIMEOUT, **more}, SECTIONS))
    faults = {when: delayed(seconds) for when, seconds in late.items()}
    grid = InProcessGrid(scripted(TASK, answers or answer), {}, 3, faults=faults, seconds=1.0)
    strategy.start(grid)
    return strategy, grid


def asked(grid: InProcessGrid, server_round: int) -> list[int]:
    """Return the clients that were asked to train in a round, once for every time."""
    return [client for client, number, kind in grid.asked if (number, kind) == (server_round, "train")]


def test_a_late_answer_is_no_part_of_a_later_round(caplog: pytest.LogCaptureFixture) -> None:
    strategy, grid = straggling({(2, 1): arrives_after(0)}, 2)
    assert asked(grid, 1) == asked(grid, 2) == [0, 1, 2]
    first, second = strategy.history
    assert first.trained == [0, 1]
    assert first.failures[0].client == 2
    assert plain(second.late) == [{"client": 2, "round": 1, "weight": 0.0, "reason": "a newer one arrived"}]
    assert second.trained == [0, 1, 2]
    assert float(strategy.state.broadcast.values[0, 0]) == 20.0  # (10 + 20 + 30)/3


def test_a_client_that_owes_an_answer_is_not_asked_and_its_answer_left_out() -> None:
    strategy, grid = straggling({(2, 1): arrives_after(1)}, 2)
    assert (asked(grid, 1), asked(grid, 2)) == ([0, 1, 2], [0, 1])
    second = strategy.history[1]
    assert plain(second.failures) == [{"client": 2, "reason": "still busy with round 1"}]
    assert plain(second.late) == [{"client": 2, "round": 1, "weight": 0.0, "reason": "stale-weight is 0"}]
    assert float(strategy.state.broadcast.values[0, 0]) == 15.0  # (10 + 20)/2
    assert strategy.state.broadcast.present.tolist() == [True, False, False, False]


@pytest.mark.parametrize(("rounds_late", "weight"), [(1, 0.5), (2, 0.25)])
def test_with_a_stale_weight_it_counts_for_less(rounds_late: int, weight: float) -> None:
    strategy, _ = straggling({(2, 1): arrives_after(rounds_late)}, 1 + rounds_late, stale_weight=0.5)
    line = strategy.history[-1]
    assert plain(line.late) == [{"client": 2, "round": 1, "weight": weight, "reason": ""}]
    assert line.trained == [0, 1]
    a, b = 10.0**rounds_late, 2 * 10.0**rounds_late
    expected = (a + b + weight * 3) / (2 + weight)
    torch.testing.assert_close(strategy.state.broadcast.values[0], torch.full((6,), expected))
    assert float(strategy.state.broadcast.values[3, 0]) == 3.0  # the only one that holds the class
    assert line.ages == [0, -1, -1, rounds_late]
    assert line.accuracy["head"].clients == 2  # its scores are of another round


@pytest.mark.parametrize(
    ("claimed", "weight", "reason"),
    [(1, 0.25, ""), (3, 0.0, "sent its upload of round 3 instead of round 2")],
)
def test_a_late_reply_with_an_earlier_upload_is_as_old_as_that(
    claimed: int, weight: float, reason: str
) -> None:
    """The reply to round 2 comes in round 3, with the upload of round 1, or with one of a round to come."""

    def answer(client: int, server_round: int) -> RecordDict:
        number = claimed if (client, server_round) == (2, 2) else server_round
        return reply_of(prototypes({0: 1.0}), Report(10, 4, server_round, {"head": 2}, 0.5, round=number))

    strategy, _ = straggling({(2, 2): arrives_after(1)}, 3, answer, stale_weight=0.5)
    (item,) = strategy.history[2].late
    assert plain(item) == {"client": 2, "round": min(claimed, 2), "weight": weight, "reason": reason}


def test_who_never_answers_is_asked_again_after_some_rounds() -> None:
    strategy, grid = straggling({(2, 1): math.inf}, 2 + MAX_OVERDUE_ROUNDS)
    rounds = range(1, 3 + MAX_OVERDUE_ROUNDS)
    assert [2 in asked(grid, n) for n in rounds] == [True] + [False] * (MAX_OVERDUE_ROUNDS - 1) + [True] * 2
    assert strategy.history[-1].trained == [0, 1, 2]


def test_what_came_late_is_handed_over_newest_first_whenever_it_came() -> None:
    owed = {
        f"question {n}": OverdueReply(client, number, True)
        for n, (client, number) in enumerate([(0, 1), (2, 2), (1, 2)])
    }
    grid: Any = SimpleNamespace(
        pull_messages=lambda ids: [
            SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=question)) for question in ids
        ]
    )
    debts = OverdueReplies()
    debts.add(owed)
    debts.collect(grid)
    assert [(overdue.round, overdue.client) for overdue, _ in debts.received] == [(2, 1), (2, 2), (1, 0)]
    debts.recorded(debts.received)
    assert debts.received == []


def test_what_came_late_counts_in_the_round_that_is_asked_again() -> None:
    """Client 2's answer to round 1 comes in the first try of round 2, in which the server loses the others."""
    lost = 2

    def answer(client: int, server_round: int) -> RecordDict | Message:
        nonlocal lost
        if server_round == 2 and client < 2 and lost:
            lost -= 1
            question = Message(RecordDict(), dst_node_id=100 + client, message_type="train")
            return Message(Error(code=ErrorCode.NODE_UNAVAILABLE, reason="lost"), reply_to=question)
        report = Report(10, 4, server_round, {"head": 2}, 0.5, round=server_round)
        return reply_of(prototypes({0: 10.0 ** (server_round - 1)}), report)

    late = {(2, 1): arrives_after(1), (2, 2): math.inf}
    strategy, grid = straggling(late, 2, answer, stale_weight=0.5)
    assert (asked(grid, 1), asked(grid, 2)) == ([0, 1, 2], [0, 1, 0, 1, 2])
    line = strategy.history[1]
    assert line.trained == [0, 1]
    assert plain(line.late) == [{"client": 2, "round": 1, "weight": 0.5, "reason": ""}]
    assert float(strategy.state.broadcast.values[0, 0]) == pytest.approx((10 + 10 + 0.5) / 2.5)


def test_a_late_answer_that_is_malformed_is_said_and_left_out() -> None:
    def answer(client: int, server_round: int) -> RecordDict:
        good = reply_of(prototypes({0: 1.0}))
        if client == 2 and server_round == 1:
            good["p"] = wire.with_checksum(b"rubbish")
        return good

    strategy, _ = straggling({(2, 1): arrives_after(1)}, 2, answer, stale_weight=1.0)
    (item,) = strategy.history[1].late
    assert item.weight == 0
    assert item.reason.startswith("upload rejected: not a safetensors payload")


def test_an_answer_with_an_earlier_upload_counts_with_a_stale_weight(tmp_path: Path) -> None:
    with only("stale", {(2, 2)}):
        found = federation(tmp_path, stale_weight=0.5).run()
    second = found.strategy.history[1]
    assert plain(second.late) == [{"client": 2, "round": 1, "weight": 0.5, "reason": ""}]
    assert second.failures == []
    assert second.trained == [0, 1, 3, 4]


@pytest.mark.parametrize("method", ["fedtgp", "gfpl"])
def test_a_method_that_is_no_sum_refuses_a_stale_weight(tmp_path: Path, method: str) -> None:
    with pytest.raises(PbflError, match=r"stale-weight = 0\.5: .* by a weighted sum, .*must be 0 \(off\)"):
        federation(tmp_path, method, stale_weight=0.5).run()


def test_a_straggler_trains_on_and_comes_back_in_its_own_round(tmp_path: Path) -> None:
    """Late in round 1 with real clients: its work counts half in round 2, and it is asked again in round 3."""
    faults = {(4, 1): delayed(arrives_after(1))}
    found = federation(
        tmp_path, num_server_rounds=3, stale_weight=0.5, round_timeout=TIMEOUT, faults=faults, seconds=1.0
    ).run()
    one, two, three = found.strategy.history
    assert (one.trained, two.trained, three.trained) == ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert plain(two.late) == [{"client": 4, "round": 1, "weight": 0.5, "reason": ""}]
    assert states(found)[4] == (3, 2)


# Nodes that go and come -------------------------------------------------------------------------------------


def test_a_client_that_comes_back_on_another_node_goes_on(tmp_path: Path) -> None:
    found = federation(tmp_path, num_server_rounds=3, faults={(1, 2): unreported})

    def restarted() -> None:  # its SuperNode was started again, without a key: Flower gives it another id
        found.grid.nodes[1] = 99

    with after_round(2, restarted):
        found.run()
    assert found.strategy.history[2].trained == [0, 1, 2, 3, 4]
    assert found.strategy.roster is not None
    assert found.strategy.roster.clients[1].node == 99
    assert states(found)[1] == (3, 2)  # its own state, two participations


def test_a_node_that_is_gone_is_named_and_not_asked(tmp_path: Path) -> None:
    found = federation(tmp_path, num_server_rounds=3, faults={(1, 2): silent}, fraction_train=0.6)
    nodes = list(found.grid.nodes)

    def changed() -> None:
        found.grid.nodes[:] = nodes if found.strategy.done != 2 else [*nodes[:1], -1, *nodes[2:]]

    found.grid.faults |= {(1, number): silent for number in (1, 2)}
    with (
        after_round(0, changed),
        patch.object(found.grid, "get_node_ids", lambda: [node for node in found.grid.nodes if node > 0]),
    ):
        found.run()
    third = found.strategy.history[2]
    assert plain(third.failures) == [{"client": 1, "reason": "its node is not connected"}]
    assert len(third.trained) == 3  # 60 % of five, of those who are there
    assert not any(client == 1 and number == 3 for client, number, _ in found.grid.asked)


def test_a_second_node_of_a_living_client_is_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = federation(tmp_path, num_server_rounds=3, faults={(1, 1): raises})

    def connected() -> None:
        found.grid.nodes.append(99)
        found.grid.partitions.append(3)

    with after_round(1, connected):
        found.run()
    first = found.grid.nodes[3]
    assert f"a new node is not used: client-id 3 is used by two nodes, {first} and 99" in caplog.text
    assert found.strategy.history[2].trained == [0, 1, 2, 3, 4]
    assert states(found)[3] == (3, 3)


# Ages, the best state ---------------------------------------------------------------------------------------


def test_ages_by_hand() -> None:
    assert updated_ages(None, {1: 0}, 3) == [-1, 0, -1]
    assert updated_ages([-1, 0, 4], {0: 0}, 3) == [0, 1, 5]
    assert updated_ages([2, 0, 4], {0: 1}, 3) == [1, 1, 5]  # the latest upload of class 0 was a round late
    assert updated_ages(None, None, 3) is None
    assert updated_ages([0, 1, -1], None, 3) == [1, 2, -1]  # nobody sent anything


def test_ages_are_in_the_history_and_survive_a_resume(tmp_path: Path) -> None:
    # Classes 6 and 1, 3, 4 are held by one client (or one more); client 3 alone holds 6, nobody 9.
    quiet = {(3, number): silent for number in (2, 3)}
    federation(tmp_path, on_disk=True, faults=quiet, num_server_rounds=2).run()
    resumed = federation(tmp_path, on_disk=True, faults=quiet, num_server_rounds=3, resume=True).run()
    ages = [record.ages or [] for record in resumed.directory.round_records()]
    assert [line[6] for line in ages] == [0, 1, 2]
    assert [line[9] for line in ages] == [-1, -1, -1]
    assert [line[0] for line in ages] == [0, 0, 0]
    assert bool(resumed.strategy.state.broadcast.present[6]), "it keeps its last prototype"


def test_a_class_that_nobody_sends_for_ten_rounds_is_said_once() -> None:
    def answer(client: int, server_round: int) -> RecordDict:
        sent = prototypes({0: 1.0, 2: 1.0} if server_round == 1 else {0: 1.0})
        return reply_of(sent, Report(10, 4, server_round))

    config = {"num-clients": 1, "num-server-rounds": 13, "feature-dim": 6}
    strategy = MethodStrategy(parse(config, SECTIONS))
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 1))
    said = [(line.round, note) for line in strategy.history for note in line.warnings]
    assert said == [(11, "no client sent these classes for 10 rounds or more: 2")]
    assert strategy.history[-1].ages == [0, -1, 12, -1]


@pytest.mark.parametrize("moment", ["after", "before"])
def test_the_best_state_is_the_one_that_was_scored(tmp_path: Path, moment: str) -> None:
    found = federation(tmp_path, on_disk=True, num_server_rounds=5, learning_rate=0.3, evaluate_moment=moment)
    sent: dict[int, Any] = {}
    build = Instructions.phase

    def watching(self: Instructions, state: Any, roster: Any, plan: Any) -> Any:
        last = set(plan.kinds.values()) == {"evaluate"}
        sent[plan.number + last] = state.to_tensors()
        return build(self, state, roster, plan)

    with patch.object(Instructions, "phase", watching):
        found.run()
    figures = {}
    for line in found.strategy.history:
        entries: list[tuple[Scores | None, int]] = [(line, line.round), (line.final, line.round + 1)]
        for entry, number in entries:
            if entry is not None and "global" in entry.accuracy:
                figures[number] = entry.accuracy["global"].weighted
    best = max(figures, key=lambda number: (figures[number], -number))
    tensors, about = load_tensors(tmp_path / "run" / "best.safetensors")
    assert float(about["accuracy"]) == pytest.approx(figures[best], abs=1e-6)
    assert about["predictor"] == "global"
    assert same_tensors(tensors, sent[best])


# Disks ------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_clear_line_and_nothing_is_lost(tmp_path: Path) -> None:
    """Client 2's disk is full in round 2: an error, the state of round 1; then it has room again and goes on."""
    found = federation(tmp_path / "a", num_server_rounds=3)
    during = {"round": 0}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def writing(path: Path, data: bytes, **how: bool) -> None:
        during["round"] += path.name == "client-00002.safetensors"
        if path.name == "client-00002.safetensors" and during["round"] == 2:
            with patch.object(os, "fsync", full):
                write_atomically(path, data, **how)
        else:
            write_atomically(path, data, **how)

    after: list[Any] = []
    with (
        patch.object(store, "write_atomically", writing),
        after_round(2, lambda: after.append(states(found)[2])),
    ):
        found.run()
    (failure,) = found.strategy.history[1].failures
    assert failure.client == 2
    assert failure.reason.endswith(
        "client-00002.safetensors cannot be written (No space left on device); its previous content is kept"
    )
    assert "\n" not in failure.reason
    assert after == [(1, 1)]
    # From then on all is as if it had not been reached in round 2.
    without = federation(tmp_path / "b", num_server_rounds=3, faults={(2, 2): silent}).run()
    assert same_tensors(found.strategy.state.to_tensors(), without.strategy.state.to_tensors())
    assert states(found) == states(without)
    assert not list((tmp_path / "a").rglob("*.tmp"))


@pytest.mark.parametrize("name", ["rounds.jsonl", "checkpoint.safetensors", "best.safetensors"])
def test_a_full_disk_of_the_server_ends_the_run_which_can_be_resumed(tmp_path: Path, name: str) -> None:
    whole = federation(tmp_path / "b", on_disk=True).run()
    found = federation(tmp_path / "a", on_disk=True)
    fsync, rounds = os.fsync, {"seen": 0}

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            rounds["seen"] += 1
            if rounds["seen"] == 2 or name == "best.safetensors":
                raise OSError(28, "No space left on device")
        fsync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("reads /proc")
    with (
        patch.object(os, "fsync", full),
        pytest.raises(PbflError, match=rf"{name} cannot be written \(No sp"),
    ):
        found.run()
    resumed = federation(tmp_path / "a", on_disk=True, resume=True).run()
    assert resumed.fingerprint == whole.fingerprint


# The server is killed ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here; no handler of ours runs in its stead."""


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (MethodStrategy, "_read", 2),  # the clients have trained round 2, the server knows nothing of it
        (MethodStrategy, "_commit", 2),
        (checkpoint, "save_best", 1),
        (checkpoint, "save", 2),  # the history is a round ahead of the checkpoint
        (MethodStrategy, "_plan", 3),
        (MethodStrategy, "_final_scoring", 3),
    ],
)
def test_a_killed_server_goes_on_bit_for_bit(tmp_path: Path, owner: Any, name: str, at: int) -> None:
    keys: dict[str, Any] = {"num_server_rounds": 3, "momentum": 0.5, "optimizer_state": "kept"}
    if name == "_final_scoring":
        keys["evaluate_moment"] = "before"
    whole = federation(tmp_path / "a", on_disk=True, **keys).run()
    calls, trained = {"seen": 0}, []
    real, update = getattr(owner, name), Pipeline.local_update

    def killed(*args: Any, **given: Any) -> Any:
        calls["seen"] += 1
        if calls["seen"] == at:
            raise Killed
        return real(*args, **given)

    def counting(self: Pipeline, client: Any, down: Any) -> Any:
        trained.append((client.id, client.round))
        return update(self, client, down)

    with patch.object(Pipeline, "local_update", counting):
        with patch.object(owner, name, killed), pytest.raises(Killed):
            federation(tmp_path / "b", on_disk=True, **keys).run()
        resumed = federation(tmp_path / "b", on_disk=True, resume=True, **keys).run()

    assert len(trained) == len(set(trained)) == 3 * NUM_CLIENTS, "nobody trains for a round twice"
    assert resumed.fingerprint == whole.fingerprint
    for file in ("checkpoint.safetensors", "prototypes.safetensors", "best.safetensors"):
        ours, theirs = (load_tensors(tmp_path / run / "run" / file)[0] for run in "ab")
        assert same_tensors(ours, theirs), file
    assert states(resumed) == states(whole)
    volatile = ("seconds", "peak_mb")
    lines, expected = (
        [
            {k: v for k, v in record.to_json().items() if k not in volatile}
            for record in found.directory.round_records()
        ]
        for found in (resumed, whole)
    )
    assert lines == expected


def test_two_servers_do_not_write_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ended the stream of `flwr run` and not the run, and somebody resumes it."""
    monkeypatch.setattr(history, "HANDOVER_SECONDS", 0.2)
    found = federation(tmp_path, on_disk=True)
    second = federation(tmp_path, on_disk=True, resume=True)

    def second_server() -> None:
        with pytest.raises(
            PbflError, match=f"run-dir = '{tmp_path / 'run'}' is being written by another run"
        ):
            second.run()

    with after_round(1, second_server):
        found.run()
    assert [line.round for line in found.strategy.history] == [1, 2]
    second.run()  # now it may


def test_two_processes_of_one_client_take_turns(tmp_path: Path) -> None:
    """A SuperNode that still works for a run that was killed, and the one that resumes it: the file is held."""
    found = federation(tmp_path, num_server_rounds=1)
    held: list[bool] = []
    trained = client_module._train_and_save

    def watching(opened: Any, message: Message) -> Message:
        lock = opened.store.locked()
        with pytest.raises(Timeout):
            lock.acquire(timeout=0)
        held.append(True)
        return trained(opened, message)

    with patch.object(client_module, "_train_and_save", watching):
        found.run()
    assert held == [True] * NUM_CLIENTS


def test_a_client_that_comes_back_as_another_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def member(client: int, node: int, **said: Any) -> ClientRecord:
        return client_from_reply(node, ConfigRecord({**handshake_reply(client, TASK), **said}))

    before = checked_roster([member(0, 11), member(1, 12)])
    came = [member(1, 22, architecture="resnet4"), member(5, 23)]
    monkeypatch.setattr(returning, "send_handshake", lambda *arguments: (came, {}))
    nobody: Any = None  # the greeting is replaced: no grid is asked
    after, refused = handshake_with_new_nodes(nobody, before, {11, 22, 23}, {1}, "e", 1.0)
    assert after == before
    assert refused == {
        22: "client 1 reconnected with another architecture: resnet4, it had cnn4",
        23: "client-id 5 on node 23 is not part of this run",
    }


def test_of_two_new_nodes_of_a_client_that_failed_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def member(node: int) -> ClientRecord:
        return client_from_reply(node, ConfigRecord(handshake_reply(1, TASK)))

    monkeypatch.setattr(returning, "send_handshake", lambda *arguments: ([member(23), member(22)], {}))
    nobody: Any = None  # the greeting is replaced: no grid is asked
    after, refused = handshake_with_new_nodes(
        nobody, checked_roster([member(12)]), {12, 22, 23}, {1}, "e", 1.0
    )
    assert after.clients[1].node == 22
    assert refused == {23: "client-id 1 is used by two nodes, 22 and 23"}


def test_a_device_that_starts_again_while_a_resumed_run_waits_for_others_is_one_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def member(client: int, node: int) -> ClientRecord:
        return client_from_reply(node, ConfigRecord(handshake_reply(client, TASK)))

    runs_on = {11: 0, 21: 0, 22: 1}  # node -> client
    online = iter([[11], [21], [21, 22]])
    monkeypatch.setattr(
        returning,
        "send_handshake",
        lambda _, nodes, *__: ([member(runs_on[node], node) for node in nodes], {}),
    )
    monkeypatch.setattr(returning, "wait_for_nodes", lambda *_, **__: next(online))
    nobody: Any = None  # greeting and waiting are replaced: no grid is asked
    recorded = [member(client, 1) for client in (0, 1)]
    roster, strange = returning.resumed_handshake(nobody, recorded, "e", 1.0, 1.0, 2)
    assert {client: at.node for client, at in roster.clients.items()} == {0: 21, 1: 22}
    assert strange == []
