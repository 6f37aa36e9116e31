"""Clients that come after the last round: they learn from the federation, it does not learn from them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from pbfl_flwr.config import Scalar
from pbfl_flwr.data import check_data, load_pool
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import show, status
from pbfl_flwr.experiments.plan.configuration import RequestedKeys
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, check_finished
from pbfl_flwr.experiments.report import fairness_sheet
from pbfl_flwr.experiments.results import FinishedRun, load, series
from pbfl_flwr.prototypes.privacy import epsilon_of
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.serving.states import state_file
from tests.flower.inprocess import KINDS, Answer, Federation, federation, raises, same_tensors, shown
from tests.small_runs import entry, write_run

NEW: dict[str, Any] = {"new_clients": 2, "new_client_rounds": 3}


class Stopped(Exception):
    """Somebody pulled the plug."""


def again(tmp_path: Path, **keys: Any) -> Federation:
    return federation(tmp_path, on_disk=True, resume=True, **NEW, **keys)


def asked(run: Federation, kind: str) -> dict[int, set[int]]:
    """Return round -> clients that were asked to do something."""
    rounds: dict[int, set[int]] = {}
    for client, number, what in run.grid.asked:
        if what == kind:
            rounds.setdefault(number, set()).add(client)
    return rounds


@pytest.mark.parametrize("method", KINDS)
def test_new_clients_do_not_affect_the_regular_rounds(tmp_path: Path, method: str) -> None:
    rounds: dict[str, Any] = {"num_clients": 3, "new_clients": 1, "new_client_rounds": 2}
    small = federation(tmp_path / "small", method, num_clients=2).run()
    run = federation(tmp_path, method, **rounds).run()
    assert run.fingerprint == small.fingerprint
    assert asked(run, "train") == {1: {0, 1}, 2: {0, 1}, 3: {2}, 4: {2}}
    lines = run.strategy.new_client_rounds
    assert [line.round for line in lines] == [3, 4]
    assert {line.after for line in lines} == {2}
    for line in lines:
        assert line.failures == []
        assert line.accuracy["head"].clients == 1
        assert line.columns.client == [2]
    assert [line.columns.participations for line in lines] == [[1], [2]]


def test_new_clients_get_the_final_state_and_do_not_change_it(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True, **NEW)
    states: list[Any] = []

    def watching(sent: Any, replies: Any) -> None:
        states.append(run.strategy.state)

    run.grid.watchers.append(watching)
    run.run()
    assert all(state is states[-1] for state in states[3:]), "the handshake and two rounds come before"
    saved = run.directory.new_client_records(2)
    assert saved == run.strategy.new_client_rounds
    correct = [sum(each["head"] for each in record.columns.correct) for record in saved]
    assert [record.accuracy["head"].weighted for record in saved] == [hits / 10 for hits in correct]


def test_new_clients_scored_before_training_get_a_final_scoring(
    tmp_path: Path,
) -> None:
    run = federation(tmp_path, "fedavg", evaluate_moment="before", **NEW).run()
    lines = run.strategy.new_client_rounds
    assert [line.accuracy_of_round for line in lines] == [2, 3, 4]
    assert [line.final is not None for line in lines] == [False, False, True]
    assert lines[-1].final is not None
    assert lines[-1].final.accuracy["head"].clients == 2
    assert [at for at, _ in series(lines)] == [2, 3, 4, 5]
    assert asked(run, "evaluate") == {2: {0, 1, 2}, 5: {3, 4}}


def test_longer_run_trains_new_clients_from_scratch(tmp_path: Path) -> None:
    federation(tmp_path, on_disk=True, **NEW).run()
    longer = again(tmp_path, num_server_rounds=3).run()
    straight = federation(tmp_path / "straight", num_server_rounds=3, **NEW).run()
    assert longer.strategy.new_client_rounds[0].columns.participations == [1, 1]
    assert [line.accuracy for line in longer.strategy.new_client_rounds] == [
        line.accuracy for line in straight.strategy.new_client_rounds
    ]
    assert [len(longer.directory.new_client_records(after)) for after in (1, 2, 3)] == [0, 3, 3]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_run_ended_in_a_round_of_new_clients_resumes_there(tmp_path: Path, torn: bool, policy: str) -> None:
    """Killed once client 4 has trained, or because client 4 failed; with or without half a line of its record."""

    def pull(message: Message, answer: Answer) -> Message:
        answer()
        raise Stopped

    fault = raises if policy == "stop" else pull
    ended = federation(tmp_path, on_disk=True, faults={(4, 4): fault}, failure_policy=policy, **NEW)
    reason = r"new client 4 failed: .*boom.*failure-policy is 'stop'\. All rounds"
    with pytest.raises(PbflError, match=reason) if policy == "stop" else pytest.raises(Stopped):
        ended.run()
    assert [record.round for record in ended.directory.new_client_records(2)] == [3]
    assert status.snapshot(ended.directory.path).state != "finished"
    rest = "1 of 3 rounds of the new clients; resume with: pbfl run --resume"
    assert rest in shown(ended.directory.path)
    if torn:
        with (ended.directory.path / "new-clients.jsonl").open("a") as file:
            file.write('{"round": 4, "aft')
    run = again(tmp_path, failure_policy=policy).run()
    assert asked(run, "train") == {4: {3, 4}, 5: {3, 4}}
    straight = federation(tmp_path / "straight", **NEW).run()
    accuracies = [line.accuracy for line in straight.strategy.new_client_rounds]
    assert [line.accuracy for line in run.strategy.new_client_rounds] == accuracies
    assert [line.round for line in run.directory.new_client_records(2)] == [3, 4, 5]
    assert status.snapshot(run.directory.path).state == "finished"
    assert asked(again(tmp_path).run(), "train") == {}, "all is done"


def test_failing_new_client_is_named_and_does_not_affect_others(tmp_path: Path) -> None:
    run = federation(tmp_path, faults={(3, 3): raises}, **NEW).run()
    (failure,) = run.strategy.new_client_rounds[0].failures
    (line,) = show.failure_lines([*run.strategy.history, *run.strategy.new_client_rounds])
    assert line.startswith("new client 3 failed in round 1 of its own: ")
    assert failure.client == 3
    assert "boom" in failure.reason
    assert [line.columns.client for line in run.strategy.new_client_rounds] == [[4], [3, 4], [3, 4]]


def test_new_client_on_another_node_is_found(tmp_path: Path) -> None:
    """Nobody asks it anything during the rounds, so that its node is known to be another one only now."""
    run = federation(tmp_path, **NEW)

    def restarted(asked: Any, replies: Any) -> None:
        if asked[0].metadata.group_id == "1":
            run.grid.nodes[4] = 99

    run.grid.watchers.append(restarted)
    run.run()
    assert [line.failures for line in run.strategy.history + run.strategy.new_client_rounds] == [[]] * 5
    assert {len(line.columns.client) for line in run.strategy.new_client_rounds} == {2}


def test_tables_and_summaries_show_new_clients(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"num_clients": 4, "max_samples": 200, "dp_clip": 1.0, "dp_noise": 1.0, **NEW}
    run = federation(tmp_path, on_disk=True, data=None, **keys).run()
    path = run.directory.path
    output = shown(path)
    assert "4 clients (2 of them new after the last round)" in output
    assert "2 new clients after round 2: sample-weighted accuracy, %" in output
    # Three releases of a new client against two of the others.
    assert f"ε = {epsilon_of(1.0, 3, 1e-5):.3g} for client 2" in " ".join(output.split())
    partition = check_data(run.strategy.settings.data, 4)
    theirs = replace(partition, splits=partition.splits[2:])
    skew = 100 * (theirs.majority(load_pool(run.strategy.settings.data).labels) or 0.0)
    assert f"Always predicting a new client's most frequent training class: {skew:.2f} %" in output
    last = run.strategy.new_client_rounds[-1].accuracy["global"].weighted
    assert FinishedRun.load(path).new_client_accuracy() == last
    sheet = fairness_sheet(load([path]))
    assert sheet.columns[-1] == "new clients"
    assert sheet.rows[0][-1] == f"{100 * last:.2f}"
    counts = RunDirectory(path).partition().counts
    assert counts is not None
    assert len(counts) == 4
    traffic = [line.bytes_up.payload for line in run.strategy.history]
    assert f"{sum(traffic) / 2 / 2 / 1e3:.1f} kB" in output, (
        "a mean over the two that take part in the rounds"
    )


def test_comparison_waits_for_new_clients(tmp_path: Path) -> None:
    keys: dict[str, Scalar] = {"new-clients": 1, "new-client-rounds": 2}
    path = write_run(tmp_path / "run", [entry(1, 0.5, 0.25)], **keys)
    requested = RequestedKeys({"num-clients": 2, "num-server-rounds": 1, "feature-dim": 4, **keys})
    planned = PlannedRun("FedProto", requested, path)
    lines = [entry(2, 0.5, 0.5, after=1), entry(3, 0.5, 0.625, after=1), entry(4, 0.5, 1.0, after=2)]
    for number in (0, 1):
        (path / "new-clients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:number]))
        assert not check_finished(planned)
    (path / "new-clients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_finished(planned)


def test_state_of_new_clients_has_its_own_directory(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True, **NEW).run()
    name = run.strategy.experiment
    stored = {
        at.name: sorted(f.name for f in at.glob("*.safetensors"))
        for at in (tmp_path / "run" / "clients").iterdir()
    }
    assert stored == {
        name: [f"client-{client:05d}.safetensors" for client in (0, 1, 2)],
        f"{name}-new-2": [f"client-{client:05d}.safetensors" for client in (3, 4)],
    }
    again(tmp_path, num_server_rounds=10).run()
    file = state_file(run.directory.path, "3")
    assert file.parent.name == f"{name}-new-10", "of the last time that it came"
    assert state_file(run.directory.path, "2").parent.name == name
    moved = tmp_path / "run" / "clients" / "node-3" / file.parent.name / file.name  # as of a device here
    moved.parent.mkdir(parents=True)
    file.rename(moved)
    assert state_file(run.directory.path, "3") == moved


def test_new_clients_give_the_same_bits_in_any_order(tmp_path: Path) -> None:
    one, other = (federation(tmp_path / str(order), order=order, **NEW).run() for order in (1, 2))
    assert same_tensors(one.strategy.state.to_tensors(), other.strategy.state.to_tensors())
    columns = [[line.columns.correct for line in run.strategy.new_client_rounds] for run in (one, other)]
    assert columns[0] == columns[1]
    assert torch.isfinite(torch.tensor([line.test_loss for line in one.strategy.new_client_rounds])).all()
