"""Nodes that the server loses all at once, as when its own link is down for a minute: the round is asked again."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.common.constant import ErrorCode

from pbfl_flwr.flower.server.stopping import RunEnded
from pbfl_flwr.flower.server.strategy import MAX_REPEATS
from pbfl_flwr.runs.records import NOT_CONNECTED, REPEATED
from tests.flower.inprocess import (
    NUM_CLIENTS,
    Answer,
    Fault,
    Federation,
    federation,
    flower_error,
    raises,
    silent,
)

CODES = [ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE]


def while_it_lasts(times: int, *, trains: bool = False, code: int = CODES[0]) -> Fault:
    """The node is lost so many times, whether or not the client has trained; after that it answers."""
    left = times

    def fault(message: Message, answer: Answer) -> Message | None:
        nonlocal left
        left -= 1
        if left < 0:
            return answer()
        if trains:
            answer()
        return flower_error("Error: Node Unavailable", code)(message, answer)

    return fault


def outage(times: int, code: int = CODES[0], number: int = 2) -> dict[tuple[int, int], Fault]:
    """The server loses all nodes in a round; some clients have trained by then."""
    return {
        (client, number): while_it_lasts(times, trains=client < 3, code=code) for client in range(NUM_CLIENTS)
    }


@pytest.mark.parametrize(("times", "code"), [(MAX_REPEATS, CODES[0]), *((1, code) for code in CODES)])
def test_repeats_a_round_if_all_nodes_were_lost(times: int, code: int, tmp_path: Path) -> None:
    whole = federation(tmp_path / "whole").run()
    faults = outage(times, code, number=1) | outage(times, code)  # every round has its own tries
    run = federation(tmp_path / "lost", on_disk=True, faults=faults).run()
    assert run.fingerprint == whole.fingerprint
    assert [line.round for line in run.directory.round_records()] == [1, 2]
    message = "round repeated because too many nodes were unreachable"
    assert [line.warnings.count(message) for line in run.strategy.history] == [1, 1]
    assert [line.failures for line in run.strategy.history] == [[], []]


def test_tries_of_a_repeated_round_count_in_its_bytes(tmp_path: Path) -> None:
    """In the first try of round 2 four nodes are lost and one answers; all answer in the second."""
    whole = federation(tmp_path / "whole").run().strategy.history
    others = {key: fault for key, fault in outage(1).items() if key[0] != 0}
    once = federation(tmp_path / "lost", faults=others, min_replies=2).run().strategy.history
    assert [line.bytes_down.payload for line in once] == [
        whole[0].bytes_down.payload,
        2 * whole[1].bytes_down.payload,
    ]
    assert once[0].bytes_up == whole[0].bytes_up
    assert 1.0 < once[1].bytes_up.payload / whole[1].bytes_up.payload < 2.0
    assert once[1].scalars == whole[1].scalars


def test_client_joining_in_a_repeated_round_is_recorded(tmp_path: Path) -> None:
    run = federation(tmp_path, faults=outage(1))

    def joins(asked: Sequence[Message], answers: Sequence[Message]) -> None:
        if len(run.grid.sent) == 3 * NUM_CLIENTS:  # the handshake, round 1 and the first try of round 2
            assert run.strategy.membership is not None
            run.strategy.membership.add_joined(["kitchen"])

    run.grid.watchers.append(joins)
    assert run.run().strategy.history[1].joined == ["kitchen"]
    assert "client kitchen has joined the run" in run.strategy.history[1].warnings


def test_nodes_lost_repeatedly_end_the_run(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True, faults=outage(MAX_REPEATS + 1))
    with pytest.raises(
        RunEnded, match="round 2: 0 valid replies, min-replies is 1: client 0: Error: Node Unavailable"
    ):
        run.run()
    assert [line.round for line in run.directory.round_records()] == [1]
    asked = [client for client, number, kind in run.grid.asked if number == 2 and kind == "train"]
    assert len(asked) == NUM_CLIENTS * (MAX_REPEATS + 1)
    resumed = federation(tmp_path, on_disk=True, resume=True).run()
    assert resumed.fingerprint == federation(tmp_path / "whole").run().fingerprint


def test_run_ends_if_nodes_do_not_return_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = federation(tmp_path, on_disk=True, faults=outage(1))
    nodes, grid = run.grid.nodes, run.grid
    grid.watchers.append(lambda asked, answers: setattr(grid, "nodes", nodes if len(grid.sent) < 15 else []))
    with pytest.raises(RunEnded, match="round 2: 0 valid replies"):
        run.run()
    assert "Waiting up to 0 s for nodes" in caplog.text  # join-timeout is half a second here


def scored_last(directory: Path, tries: int, **options: Any) -> Federation:
    """A run of FedAvg that is scored before training, in whose final scoring all nodes are lost so many times."""
    final = {(client, -1): while_it_lasts(tries) for client in range(NUM_CLIENTS)}
    return federation(
        directory, "fedavg", models="cnn4", num_server_rounds=1, on_disk=True, faults=final, **options
    )


def test_repeats_the_final_scoring_if_all_nodes_were_lost(tmp_path: Path) -> None:
    whole, lost = scored_last(tmp_path / "whole", 0).run(), scored_last(tmp_path / "lost", 1).run()
    assert lost.directory.result() == whole.directory.result()
    (once,), (twice,) = whole.strategy.history, lost.strategy.history
    assert twice.final == once.final
    assert REPEATED in twice.warnings
    assert (twice.bytes_up, twice.bytes_down) == (once.bytes_up, once.bytes_down)  # as if it had answered


def test_a_run_whose_final_scoring_nobody_answers_is_not_finished(tmp_path: Path) -> None:
    whole = scored_last(tmp_path / "whole", 0).run()
    with pytest.raises(
        RunEnded, match="round 1: 0 valid replies, min-replies is 1: client 0: Error: Node Un"
    ):
        scored_last(tmp_path / "lost", MAX_REPEATS + 1).run()
    resumed = scored_last(tmp_path / "lost", 0, resume=True).run()
    assert resumed.directory.result() == whole.directory.result()


def test_a_client_that_cannot_be_scored_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """It would fail again, whatever min-replies says of the clients that train."""
    run = scored_last(tmp_path, 0, min_replies=NUM_CLIENTS)
    run.grid.faults[0, -1] = flower_error("boom", 2)
    (record,) = run.run().strategy.history
    assert record.final is not None
    assert [failure.client for failure in record.final.failures] == [0]
    assert run.directory.result()


@pytest.mark.parametrize(("least", "failed"), [(3, [0, 1]), (4, [1]), (5, None)])
def test_waits_only_if_too_few_replied(tmp_path: Path, least: int, failed: list[int] | None) -> None:
    faults: dict[tuple[int, int], Fault] = {(0, 2): while_it_lasts(1), (1, 2): raises}
    run = federation(tmp_path, faults=faults, min_replies=least)
    if failed is None:
        with pytest.raises(RunEnded, match="round 2: 3 valid replies, min-replies is 5"):
            run.run()
    else:
        assert [failure.client for failure in run.run().strategy.history[1].failures] == failed


def test_repeated_round_ages_classes_once_and_loses_no_state(tmp_path: Path) -> None:
    run = federation(tmp_path, faults={**outage(2), (3, 2): silent}, min_replies=2).run()
    assert run.strategy.history[1].trained == [0, 1, 2, 4]
    assert [(line.ages or [])[6] for line in run.strategy.history] == [0, 1]  # client 3 alone holds it
    assert "lost its state" not in str(run.strategy.history)  # three have answered a second time


def test_waits_for_nodes_that_were_gone_before_the_round(tmp_path: Path) -> None:
    """A client fails, so that the server looks for its nodes; just then none is connected."""
    fed = federation(tmp_path, num_server_rounds=3, faults={(1, 1): raises})
    looks = count(1)  # of round 2
    fed.grid.online = lambda: [] if fed.strategy.done == 1 and next(looks) == 1 else fed.grid.nodes
    run = fed.run()
    assert [line.trained for line in run.strategy.history] == [[0, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert NOT_CONNECTED not in str(run.strategy.history)
    assert REPEATED in run.strategy.history[1].warnings


def test_replies_of_clients_that_are_only_scored_make_no_round(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fraction_train": 0.4, "min_replies": 2}
    one = federation(tmp_path / "first", **keys).run().strategy.history[1].trained[0]
    run = federation(tmp_path / "second", faults={(one, 2): raises}, **keys)
    with pytest.raises(RunEnded, match="round 2: 1 valid replies, min-replies is 2"):
        run.run()


def test_does_not_wait_for_clients_that_are_only_scored(tmp_path: Path) -> None:
    """Who trains fails by itself: that the others' nodes are lost changes nothing."""
    first = federation(tmp_path / "first", fraction_train=0.4).run()
    training = first.strategy.history[1].trained
    faults: dict[tuple[int, int], Fault] = {(client, 2): raises for client in training}
    faults |= {(client, -1): while_it_lasts(9) for client in range(NUM_CLIENTS)}  # whenever it is only scored
    run = federation(tmp_path / "lost", fraction_train=0.4, faults=faults)
    with pytest.raises(RunEnded, match="round 2: 0 valid replies"):
        run.run()
    assert len([client for client, number, _ in run.grid.asked if number == 2]) == NUM_CLIENTS
