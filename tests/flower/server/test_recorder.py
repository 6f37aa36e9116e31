"""What a run writes and resumes from: histories, checkpoints, why it ended; full disks and killed servers."""

import errno
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from pbfl_flwr import calls
from pbfl_flwr.config import DataSettings, Scalar
from pbfl_flwr.data import check_data, client_data, load_pool
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.status import snapshot
from pbfl_flwr.flower.client import app as client_module
from pbfl_flwr.flower.client import handshake
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.client.session import ClientSession
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.flower.server.recorder import RunRecorder, log_record
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.flower.server.stopping import RunEnded
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs import checkpoint
from pbfl_flwr.runs import directory as history
from pbfl_flwr.runs.directory import ERROR, RunDirectory, RunRefused
from pbfl_flwr.runs.records import Accuracies, ClientsRecord, RoundRecord
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from pbfl_flwr.util.atomic_files import DamagedState, UnsavedState
from server_app import app as server_app
from tests.flower.inprocess import (
    KINDS,
    NUM_CLIENTS,
    Answer,
    Fault,
    Federation,
    InProcessGrid,
    Killed,
    after_round,
    federation,
    flower_error,
    raises,
    same_tensors,
    silent,
    stored_rounds,
)
from tests.small_runs import edit, entry, over, rounds_of


def lines(run: Federation) -> list[dict[str, Any]]:
    """Return the history on disk without what a clock or the memory says."""
    dumps = [record.model_dump(exclude={"seconds", "peak_mb"}) for record in run.directory.round_records()]
    for failure in (failure for dump in dumps for failure in dump["failures"]):
        failure["reason"] = re.sub(r"within \d+ s", "in time", failure["reason"])
    return dumps


@pytest.mark.parametrize("method", ["fedproto", "fedtgp"])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, method: str) -> None:
    """Client 3 alone holds class 6; nobody holds class 9."""
    keys: dict[str, Any] = {"momentum": 0.5, "optimizer_state": "kept", "on_disk": True}
    keys["faults"] = {(3, number): silent for number in (2, 3)}
    whole = federation(tmp_path / "a", method, num_server_rounds=4, **keys).run()
    federation(tmp_path / "b", method, num_server_rounds=2, **keys).run()
    second = federation(tmp_path / "b", method, num_server_rounds=4, resume=True, **keys).run()
    assert same_tensors(second.strategy.state.to_tensors(), whole.strategy.state.to_tensors())
    assert lines(second) == lines(whole)
    assert second.strategy.history == second.directory.round_records()
    ages = [record.ages or [] for record in second.directory.round_records()]
    assert [(line[0], line[6], line[9]) for line in ages] == [(0, 0, -1), (0, 1, -1), (0, 2, -1), (0, 0, -1)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A run of two rounds, to be looked at only."""
    return federation(tmp_path_factory.mktemp("finished"), "local", on_disk=True).run()


@pytest.fixture
def two_rounds(finished: Federation, tmp_path: Path) -> Federation:
    """A copy of a run of two rounds."""
    shutil.copytree(finished.directory.path, tmp_path / "run")
    return federation(tmp_path, "local", on_disk=True)


def again(tmp_path: Path, **keys: Any) -> Federation:
    return federation(tmp_path, "local", on_disk=True, **{"resume": True, **keys})


def test_history_ahead_of_the_checkpoint_is_truncated(tmp_path: Path, two_rounds: Federation) -> None:
    run = tmp_path / "run"
    before = lines(two_rounds)
    for name in ("rounds.jsonl", "clients.jsonl"):
        last = json.loads((run / name).read_text().splitlines()[-1])
        with (run / name).open("a") as file:
            file.write(json.dumps({**last, "round": 3}) + '\n{"round": 4, "accu')
    resumed = again(tmp_path, num_server_rounds=2).run()
    assert lines(resumed) == before
    text = (run / "clients.jsonl").read_text()
    assert [json.loads(line)["round"] for line in text.splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"resume": False}, "already holds a run"),
        ({"resume": False, "partitions": [0, 1, 1, 3, 4]}, "already holds a run"),  # before anybody is asked
        ({"learning_rate": 0.5}, "was made with another configuration"),
        (
            {"state_dir": "/elsewhere"},
            "state-dir = '/elsewhere': a resumed run keeps its clients' state where it is",
        ),
        ({"num_server_rounds": 1}, "num-server-rounds = 1: the run has 2 rounds already"),
    ],
)
def test_refused_run_does_not_change_an_existing_one(
    finished: Federation, keys: dict[str, Any], reason: str
) -> None:
    run = finished.directory
    before = {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    with pytest.raises(RunRefused, match=reason):
        again(run.path.parent, **keys).run()
    assert {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()} == before


def test_a_run_that_began_during_the_handshake_is_left_as_it_is(finished: Federation) -> None:
    run = finished.directory
    before = {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    other = again(run.path.parent, resume=False).strategy
    # Their partition would be written.
    clients = [
        one.model_copy(update={"simulated": True, "configured_data": True}) for one in run.record().clients
    ]
    with pytest.raises(RunRefused, match="already holds a run"):
        other._recorder.begin("other", "after", clients)
    assert {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()} == before


def test_a_run_is_beside_others_neither_around_nor_in_one(tmp_path: Path) -> None:
    """Lists and reports would leave out the inner ones."""
    run = federation(tmp_path, "local", on_disk=True).run().directory.path
    for place, reason in (
        (tmp_path, "holds other runs, 'run' for one"),
        (run / "inner", "lies in the directory"),
    ):
        with pytest.raises(RunRefused, match=reason):
            federation(place, "local", on_disk=True, run_dir=str(place)).run()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [run.name]


@pytest.mark.parametrize("newer", ["learning-rate", "threads", "trim-share"])
def test_a_run_that_is_older_than_a_key_resumes_with_its_default(
    tmp_path: Path, two_rounds: Federation, newer: str
) -> None:
    configuration = two_rounds.directory.record().configuration
    edit(tmp_path / "run" / "run.json", configuration={k: v for k, v in configuration.items() if k != newer})
    with pytest.raises(RunRefused, match=r"another configuration, learning-rate = 0\.01; only min-clients, "):
        again(tmp_path, num_server_rounds=3, learning_rate=0.5).run()
    assert again(tmp_path, num_server_rounds=3).run().strategy.done == 3
    assert newer in two_rounds.directory.record().configuration


def test_the_checkpoint_of_another_configuration_is_refused(tmp_path: Path, two_rounds: Federation) -> None:
    other = federation(tmp_path / "other", "local", on_disk=True, learning_rate=0.5).run().directory.path
    shutil.copy(other / "checkpoint.safetensors", tmp_path / "run")
    with pytest.raises(RunRefused, match=r"checkpoint\.safetensors is not of the run in .*/run"):
        again(tmp_path).run()


def test_lost_or_damaged_checkpoint_is_reported_and_history_kept(
    tmp_path: Path, two_rounds: Federation
) -> None:
    file = tmp_path / "run" / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DamagedState, match=r"checkpoint\.safetensors"):
        again(tmp_path).run()
    file.unlink()
    with pytest.raises(DamagedState, match="is missing, but the history holds 2 rounds"):
        again(tmp_path).run()
    with pytest.raises(PbflError, match="was made with another configuration"):
        again(tmp_path, learning_rate=0.5).run()
    with pytest.raises(PbflError, match=r"is not a run directory: it has no run.json"):
        again(tmp_path / "elsewhere").run()
    assert len(lines(two_rounds)) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.json", '{"experiment": '), ("run.json", "{}"), ("run.json", "[1]"), ("rounds.jsonl", "{x\n")],
)
def test_damaged_records_are_reported_by_file(
    tmp_path: Path, two_rounds: Federation, name: str, text: str
) -> None:
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(PbflError, match=name) as error:
        again(tmp_path).run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("training", [range(5), [0, 2]])
def test_warns_once_of_client_that_lost_its_state(tmp_path: Path, training: Sequence[int]) -> None:
    """Whether it is to train or only scored."""
    federation(tmp_path, on_disk=True, num_server_rounds=1).run()
    (one,) = (tmp_path / "run" / "clients").glob("*/client-00001.safetensors")
    one.unlink()
    run = federation(tmp_path, on_disk=True, num_server_rounds=3, resume=True)
    with patch.object(Roster, "sample", lambda self, *_: [*training]):
        run.run()
    notes = [[note for note in line.warnings if "lost" in note] for line in run.strategy.history]
    assert notes == [[], ["client 1 lost its state and starts from scratch"], []]


def test_two_devices_with_one_key_are_noticed_by_their_states(tmp_path: Path) -> None:
    """Client 1 is copied after round 1; the copy takes part in round 4, the original in all others."""
    federation(tmp_path, on_disk=True, num_server_rounds=1).run()
    (state,) = tmp_path.rglob("client-00001.safetensors")
    copied = state.read_bytes()
    federation(tmp_path, on_disk=True, num_server_rounds=3, resume=True).run()
    original = state.read_bytes()
    state.write_bytes(copied)
    federation(tmp_path, on_disk=True, num_server_rounds=4, resume=True).run()
    state.write_bytes(original)
    run = federation(tmp_path, on_disk=True, num_server_rounds=6, resume=True).run()
    notes = [[note for note in line.warnings if "state" in note] for line in run.strategy.history]
    known = "client 1 went on from a state unknown here: 4 rounds trained instead of at most 3; "
    assert notes == [
        *[[]] * 3,
        ["client 1 went back to an older state: 2 rounds trained instead of 4"],
        [known + "a second device may have its key"],
        [],
    ]


def killed(message: Message, answer: Answer) -> Message:
    answer()
    raise KeyboardInterrupt


@pytest.mark.parametrize("method", KINDS)
def test_a_resumed_round_takes_the_replies_that_clients_have_stored(tmp_path: Path, method: str) -> None:
    """Also fedkd's, which is then sent another form of the same mentee; and states without a digest."""
    keys: dict[str, Any] = {"on_disk": True, "num_server_rounds": 3, "client_states": "always"}
    whole = federation(tmp_path / "a", method, **keys).run()
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path / "b", method, faults={(3, 3): killed}, **keys).run()
    (old,) = (tmp_path / "b").rglob("client-00001.safetensors")
    tensors, about = load_tensors(old)
    del about["server-state"]
    save_tensors(old, tensors, about)
    trained: list[int] = []
    with patch.object(client_module, "_train_and_save", watched(client_module._train_and_save, trained)):
        resumed = federation(tmp_path / "b", method, resume=True, **keys).run()
    assert trained == [4]
    assert resumed.strategy.history[-1].failures == []
    assert resumed.directory.result() == whole.directory.result() != ""


def watched(train: Any, trained: list[int]) -> Any:
    def training(session: ClientSession, message: Message, worker: Worker) -> Message:
        trained.append(session.client.id)
        reply: Message = train(session, message, worker)
        return reply

    return training


def test_a_stored_reply_does_not_count_in_another_history(tmp_path: Path) -> None:
    """The run is restored from a backup and goes on without client 0, which has trained further."""
    run, backup = tmp_path / "run", tmp_path / "backup"
    federation(tmp_path, on_disk=True, num_server_rounds=1).run()
    shutil.copytree(run, backup)
    federation(tmp_path, on_disk=True, num_server_rounds=3, resume=True).run()
    (ahead,) = run.rglob("client-00000.safetensors")
    further = ahead.read_bytes()
    shutil.rmtree(run)
    backup.rename(run)
    ahead.write_bytes(further)
    again = federation(tmp_path, on_disk=True, num_server_rounds=4, resume=True).run()
    told = [[failure.reason for failure in line.failures] for line in again.strategy.history]
    assert told[:2] == [[], ["asked for round 2, but its state is already of round 3"]]
    (reason,) = told[2]
    assert reason.startswith("its state of round 3 was trained on another broadcast, ")
    assert again.strategy.history[2].trained == [1, 2, 3, 4]
    assert told[3] == []


def test_a_first_state_that_is_made_anew_may_have_other_bits(tmp_path: Path) -> None:
    """As on another CPU: until there is a checkpoint, a stored reply is known by its round alone."""
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, "fedtgp", on_disk=True, faults={(3, 1): killed}).run()
    first = calls.first_state

    def rounded(method: Any, task: Any, seed: int) -> Any:
        state = first(method, task, seed)
        tensors = {
            name: tensor * 1.000001 if tensor.is_floating_point() else tensor
            for name, tensor in state.to_tensors().items()
        }
        return type(state).from_tensors(tensors, task)

    with patch.object(calls, "first_state", rounded):
        resumed = federation(tmp_path, "fedtgp", on_disk=True, resume=True).run()
    assert [line.failures for line in resumed.strategy.history] == [[], []]


def test_fedkd_resumes_if_every_client_lost_its_state(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fedkd.schedule-rounds": 4, "on_disk": True}
    federation(tmp_path, "fedkd", num_server_rounds=2, **keys).run()
    shutil.rmtree(tmp_path / "run" / "clients")
    resumed = federation(tmp_path, "fedkd", num_server_rounds=4, resume=True, **keys).run()
    assert [line.failures for line in resumed.strategy.history] == [[]] * 4


def test_error_file_says_why_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "run" / ERROR
    twins: dict[str, Any] = {"on_disk": True, "partitions": [0, 1, 1, 3, 4], "join_timeout": 1.0}
    with pytest.raises(PbflError, match="is used by two nodes"):
        federation(tmp_path, **twins).run()
    assert "client-id 1 is used by two nodes" in told.read_text()
    broken = {(client, 1): silent for client in range(5)}
    with pytest.raises(RunEnded):
        federation(tmp_path, on_disk=True, faults=broken).run()
    assert told.read_text().startswith("round 1: 0 valid replies")
    with pytest.raises(PbflError, match="is used by two nodes"):
        federation(tmp_path, resume=True, **twins).run()
    assert "client-id 1 is used by two nodes" in told.read_text()

    def breaks(*arguments: Any) -> None:
        raise ValueError("an own aggregate\nthat fails")

    run = federation(tmp_path, on_disk=True, resume=True)
    monkeypatch.setattr(run.strategy, "aggregate_fit", breaks)
    with pytest.raises(ValueError, match="an own aggregate"):
        run.run()
    reason = told.read_text()
    assert reason.startswith("ValueError: an own aggregate that fails (test_recorder.py:")
    monkeypatch.setattr(history, "HANDOVER_SECONDS", 0.1)
    with run.directory.locked(), pytest.raises(RunRefused, match="is being written by another run"):
        federation(tmp_path, on_disk=True, resume=True).run()
    assert told.read_text() == reason
    assert federation(tmp_path, on_disk=True, resume=True).run().strategy.done == 2
    assert not told.exists()


def moving_average(strategy: MethodStrategy, state: Any) -> Any:
    """Return a state with prototypes of another type, as NumPy computes them."""
    old, new = strategy.state.broadcast.values.double(), state.broadcast.values.double()
    return replace(state, broadcast=replace(state.broadcast, values=0.7 * old + 0.3 * new))


def divides_by_zero(strategy: MethodStrategy, state: Any) -> Any:
    values = state.broadcast.values / (0 if strategy.done == 1 else 1)
    return replace(state, broadcast=replace(state.broadcast, values=values))


def with_rule(rule: Callable[[MethodStrategy, Any], Any]) -> type[MethodStrategy]:
    """Return a user's strategy that changes what the method has aggregated."""

    class Own(MethodStrategy):
        def aggregate_fit(self, server_round: int, uploads: Any) -> Any:
            return rule(self, super().aggregate_fit(server_round, uploads))

    return Own


def test_a_resumed_run_goes_on_with_the_numbers_of_an_own_rule(tmp_path: Path) -> None:
    """Also if they have a type that the method's state does not have when it is read."""
    own = with_rule(moving_average)
    whole = federation(tmp_path / "a", strategy=own, on_disk=True, num_server_rounds=4).run()
    federation(tmp_path / "b", strategy=own, on_disk=True, num_server_rounds=2).run()
    resumed = federation(tmp_path / "b", strategy=own, on_disk=True, num_server_rounds=4, resume=True).run()
    assert resumed.directory.result() == whole.directory.result()


def test_an_own_rule_whose_state_cannot_be_read_ends_the_run_before_the_round_counts(tmp_path: Path) -> None:
    run = federation(tmp_path, strategy=with_rule(divides_by_zero), on_disk=True, num_server_rounds=3)
    says = r"^round 2: after aggregation the server's state could not be read again: 'rows' holds NaN or infinity\."
    with pytest.raises(RunEnded, match=says):
        run.run()
    assert federation(tmp_path, on_disk=True, num_server_rounds=3, resume=True).run().strategy.done == 3


@pytest.mark.parametrize("error", ["", "an own error"])
@pytest.mark.parametrize("what", ["moved", "removed", "replaced"])
def test_a_run_whose_directory_goes_away_ends_and_writes_into_no_other(
    tmp_path: Path, what: str, error: str
) -> None:
    run = federation(tmp_path / "run", on_disk=True, num_server_rounds=3)
    aggregate, place = run.strategy.aggregate_fit, run.directory.path

    def afterwards(*arguments: Any) -> Any:
        if run.strategy.done == 1:
            shutil.move(place, tmp_path / "moved")
            if what != "moved":
                shutil.rmtree(tmp_path / "moved")
            if what == "replaced":
                federation(tmp_path / "run", on_disk=True, num_server_rounds=1, seed=7).run()
                (place / ".round-2").mkdir()  # which the other run is about to write
            if error:
                raise ValueError(error)
        return aggregate(*arguments)

    says = r"was moved or removed .*; the run ended before round 2 counted$"
    with (
        patch.object(run.strategy, "aggregate_fit", afterwards),
        pytest.raises(ValueError if error else RunRefused, match=error or says),
    ):
        run.run()
    assert (place / ".round-2").exists() == (what == "replaced")
    assert (place / "rounds.jsonl").exists() == (what == "replaced")
    assert not (place / ERROR).exists()
    if what == "moved":
        assert len(RunDirectory(tmp_path / "moved").round_records()) == 1
    if what == "replaced":
        other = federation(tmp_path / "run", on_disk=True, num_server_rounds=2, seed=7, resume=True).run()
        assert other.strategy.done == 2


def test_a_run_goes_on_without_its_lock_file(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True)
    aggregate = run.strategy.aggregate_fit

    def afterwards(*arguments: Any) -> Any:
        (run.directory.path / history.SERVER_LOCK).unlink(missing_ok=True)
        return aggregate(*arguments)

    with patch.object(run.strategy, "aggregate_fit", afterwards):
        assert run.run().strategy.done == 2


@pytest.mark.parametrize("fails", [False, True])
def test_waiting_line_is_published_only_while_waiting(tmp_path: Path, fails: bool) -> None:
    before: list[str] = []

    def wait(message: Message, answer: Answer) -> Message:
        before.append(run.directory.waiting())
        run.directory.set_waiting("waiting")  # as a grid of Flower's would have it
        assert run.directory.waiting() == "waiting"
        if fails and len(before) == 3:
            raise RunEnded("there is an end to waiting")
        return answer()

    rounds = range(3)  # the first one is the handshake
    run = federation(tmp_path, on_disk=True, num_clients=3, faults={(0, number): wait for number in rounds})
    run.directory.path.mkdir(parents=True)
    run.directory.set_waiting("what a killed server has left")
    with pytest.raises(RunEnded) if fails else nullcontext():
        run.run()
    assert before == ["", "", ""]
    assert run.directory.waiting() == ""


def test_partition_is_recorded_for_configured_data(tmp_path: Path) -> None:
    run = federation(
        tmp_path / "a", "fedproto", on_disk=True, num_clients=3, num_server_rounds=1, min_samples=4
    )
    run.grid = InProcessGrid(make_client_app(), run.config, 3)
    run.run()
    written = run.directory.partition().counts
    assert written is not None
    assert written == check_data(run.strategy.settings.data, 3).counts.tolist()
    assert sum(sum(counts) for counts in written) == 1797
    # FedProto's paper: client i sends K_i rows and gets K, of d numbers each.
    rows = sum(sum(count > 0 for count in counts) + 10 for counts in written)
    assert run.directory.partition().paper_scalars == rows * run.strategy.settings.models.feature_dim
    right = tested = 0
    for number in range(3):
        data = client_data(run.strategy.settings.data, 3, number)
        right += int((data.test.labels == data.train.labels.mode().values).sum())
        tested += len(data.test)
    assert run.directory.partition().majority == pytest.approx(right / tested)
    # An app's own data is not the configured partition, and nothing is claimed about it.
    own_data = federation(tmp_path / "b", "local", on_disk=True, num_server_rounds=1).run()
    assert own_data.directory.partition().counts is None
    assert own_data.directory.partition().majority is None
    assert own_data.directory.partition().paper_scalars is None


def test_resume_refuses_changed_samples(tmp_path: Path) -> None:
    def run(**keys: Any) -> Federation:
        base: dict[str, Any] = {"num_clients": 2, "models": "cnn2", "max_samples": 60, "partition": "iid"}
        return federation(tmp_path, on_disk=True, data=None, **base, **keys)

    file = run(num_server_rounds=1).run().directory.path / "partition.json"
    message = file.read_text()
    recorded = json.loads(message)["data"]
    assert recorded == load_pool(DataSettings(dataset="digits", max_samples=60)).fingerprint
    file.write_text(message.replace(recorded, recorded[::-1]))
    with pytest.raises(RunRefused, match="the samples of dataset = 'digits' are not those"):
        run(resume=True).run()
    file.write_text(message)
    assert run(resume=True).run().strategy.done == 2


def test_run_killed_while_starting_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.json is the seal: what stands there without it is no run, and what stands beside it is complete."""
    keys: dict[str, Any] = {"num_clients": 2, "models": "cnn2", "max_samples": 60, "num_server_rounds": 1}
    written: list[str] = []
    original = RunDirectory._write

    def killed(self: RunDirectory, name: str, content: Any) -> None:
        original(self, name, content)
        written.append(name)
        if written == ["partition.json"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, on_disk=True, data=None, **keys).run()
    run = federation(tmp_path, on_disk=True, data=None, **keys).run()
    assert written[:3] == ["partition.json", "partition.json", "run.json"]
    assert run.directory.partition().majority is not None


def test_run_directory_holds_strict_json(finished: Federation) -> None:
    run = finished.directory.path

    def strict(text: str) -> Any:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    about = strict((run / "run.json").read_text())
    assert about["configuration"]["method"] == about["method"]["name"] == "local"
    assert [member["client"] for member in about["clients"]] == [0, 1, 2, 3, 4]
    for name in ("rounds.jsonl", "clients.jsonl"):
        assert [strict(line)["round"] for line in (run / name).read_text().splitlines()] == [1, 2]
    assert len(list((run / "clients" / about["experiment"]).glob("client-*.safetensors"))) == NUM_CLIENTS
    assert not list(run.rglob("*.tmp"))


def test_server_app_writes_error_file_only_into_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"

    def refused(reason: str, **keys: Scalar) -> None:
        with pytest.raises(PbflError, match=reason):
            server_app.main(InProcessGrid(make_client_app(), keys), Context(1, 1, {}, RecordDict(), {**keys}))

    refused("run-dir = 'run-2': must be an absolute path", **{"aggregation": "average", "run-dir": "run-2"})
    assert not (tmp_path / "run-2").exists()
    refused("aggregation = 'average': must be ", **{"aggregation": "average", "run-dir": str(run)})
    assert (run / ERROR).read_text().startswith("aggregation = 'average': must be one of auto, ")
    keys: dict[str, Scalar] = {"method": "fedavg", "dp-clip": 1.0, "run-dir": str(run)}
    refused("sends Weights, which", **keys)
    assert "sends Weights, which" in (run / ERROR).read_text()
    with pytest.raises(
        PbflError, match=r"it has no run.json; a run that was started there failed: .* sends Weights"
    ):
        RunDirectory(run).record()
    (run / ERROR).unlink()
    (run / "run.json").write_text("{}")
    refused("sends Weights, which", **keys)
    assert not (run / ERROR).exists()


# Full disks and killed servers -------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["after", "before"])
def test_best_state_is_the_scored_one(tmp_path: Path, moment: str) -> None:
    run = federation(tmp_path, on_disk=True, num_server_rounds=5, learning_rate=0.3, evaluate_moment=moment)
    sent: dict[int, Any] = {}
    build = MethodStrategy._messages

    def watching(self: MethodStrategy, plan: Any, state: Any) -> Any:
        last = set(plan.kinds.values()) == {"evaluate"}
        sent[plan.number + last] = state.to_tensors()
        return build(self, plan, state)

    with patch.object(MethodStrategy, "_messages", watching):
        run.run()
    figures = {}
    for line in run.strategy.history:
        entries: list[tuple[Accuracies | None, int]] = [(line, line.round), (line.final, line.round + 1)]
        for scored, number in entries:
            if scored is not None and "global" in scored.accuracy:
                figures[number] = scored.accuracy["global"].weighted
    best = max(figures, key=lambda number: (figures[number], -number))
    tensors, about = load_tensors(tmp_path / "run" / "best.safetensors")
    assert float(about["accuracy"]) == pytest.approx(figures[best], abs=1e-6)
    assert about["predictor"] == "global"
    assert same_tensors(tensors, sent[best])


def on_a_full_disk(message: Message, answer: Answer) -> Message:
    with patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")):
        return answer()


def with_full_log(message: Message, answer: Answer) -> Message:
    """The client's code prints, to a file on a full disk, as does whoever prints the traceback."""
    full = OSError(28, "No space left on device")
    with patch.object(calls, "local_update", side_effect=full), patch.object(sys, "stderr") as stderr:
        stderr.write.side_effect = full
        return answer()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (on_a_full_disk, r"\S*client-00002.safetensors cannot be written \(No space"),
        (with_full_log, "OSError: "),
    ],
)
def test_full_disk_of_a_simulation_ends_the_run_which_can_be_resumed(
    tmp_path: Path, fault: Fault, reason: str
) -> None:
    whole = federation(tmp_path / "b", on_disk=True).run()
    run = federation(tmp_path / "a", on_disk=True, faults={(2, 2): fault})
    with pytest.raises(RunEnded, match=rf"^round 2: {reason}.*\. Rounds up to 1 are kept"):
        run.run()
    resumed = federation(tmp_path / "a", on_disk=True, resume=True).run()
    assert resumed.fingerprint == whole.fingerprint


def test_full_disk_of_a_device_fails_its_round_only(tmp_path: Path) -> None:
    """Client 2's disk is full in round 2: an error, the state of round 1; then it has room again and goes on."""

    def devices(place: Path) -> list[dict[str, Scalar]]:
        return [{"client-id": n, "state-dir": str(place / "run" / "clients")} for n in range(5)]

    run = federation(
        tmp_path / "a",
        num_server_rounds=3,
        faults={(2, 2): on_a_full_disk},
        node_configs=devices(tmp_path / "a"),
    )
    after: list[Any] = []
    with after_round(2, lambda: after.append(stored_rounds(run)[2])):
        run.run()
    (failure,) = run.strategy.history[1].failures
    assert failure.client == 2
    assert failure.reason.endswith(
        "client-00002.safetensors cannot be written (No space left on device); its previous content is kept"
    )
    assert "\n" not in failure.reason
    assert after == [(1, 1)]
    # From then on all is as if it had not been reached in round 2.
    without = federation(
        tmp_path / "b", num_server_rounds=3, faults={(2, 2): silent}, node_configs=devices(tmp_path / "b")
    ).run()
    assert same_tensors(run.strategy.state.to_tensors(), without.strategy.state.to_tensors())
    assert stored_rounds(run) == stored_rounds(without)
    assert not list((tmp_path / "a").rglob("*.tmp"))


@pytest.mark.parametrize("name", ["rounds.jsonl", "checkpoint.safetensors", "best.safetensors"])
def test_full_disk_of_the_server_ends_the_run_which_can_be_resumed(tmp_path: Path, name: str) -> None:
    whole = federation(tmp_path / "b", on_disk=True).run()
    run = federation(tmp_path / "a", on_disk=True)
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
        run.run()
    assert (snapshot(run.directory.path).state, run.directory.result()) == ("failed", "")
    assert not list(run.directory.path.glob(".round-*"))
    resumed = federation(tmp_path / "a", on_disk=True, resume=True).run()
    assert resumed.fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (MethodStrategy, "_read", 2),  # the clients have trained round 2, the server knows nothing of it
        (MethodStrategy, "_commit", 2),
        (checkpoint, "save_tensors", 2),  # the files of the round are not complete
        (RunDirectory, "add_round", 2),
        (RunDirectory, "settle", 4),  # round 2 counts, its files are not in place
        (MethodStrategy, "_plan", 3),
        (MethodStrategy, "_final_scoring", 1),
    ],
)
def test_killed_server_resumes_with_the_same_bits(tmp_path: Path, owner: Any, name: str, at: int) -> None:
    keys: dict[str, Any] = {"num_server_rounds": 3, "momentum": 0.5, "optimizer_state": "kept"}
    if name == "_final_scoring":
        keys["evaluate_moment"] = "before"
    whole = federation(tmp_path / "a", on_disk=True, **keys).run()
    calls, trained = {"seen": 0}, []
    real, update = getattr(owner, name), Pipeline.local_update

    def killed(*args: Any, **keywords: Any) -> Any:
        calls["seen"] += 1
        if calls["seen"] == at:
            raise Killed
        return real(*args, **keywords)

    def counting(self: Pipeline, client: Any, down: Any) -> Any:
        trained.append((client.id, client.round))
        return update(self, client, down)

    with patch.object(Pipeline, "local_update", counting), patch.object(handshake, "try_step"):
        with patch.object(owner, name, killed), pytest.raises(Killed):
            federation(tmp_path / "b", on_disk=True, **keys).run()
        resumed = federation(tmp_path / "b", on_disk=True, resume=True, **keys).run()

    assert len(trained) == len(set(trained)) == 3 * NUM_CLIENTS, "nobody trains for a round twice"
    assert resumed.fingerprint == whole.fingerprint
    for file in ("checkpoint.safetensors", "prototypes.safetensors", "best.safetensors"):
        ours, theirs = (load_tensors(tmp_path / run / "run" / file)[0] for run in "ab")
        assert same_tensors(ours, theirs), file
    assert stored_rounds(resumed) == stored_rounds(whole)
    assert lines(resumed) == lines(whole)


def test_best_state_of_a_round_that_did_not_count_is_forgotten(tmp_path: Path) -> None:
    """Killed before the third round counts, the best so far; then four clients are gone, and it is worse."""
    data = {"data": None, "dataset": "digits", "partition": "dirichlet", "dirichlet_alpha": 0.3}
    keys: dict[str, Any] = {
        **data,
        "max_samples": 600,
        "models": "mlp",
        "learning_rate": 0.1,
        "on_disk": True,
        "num_server_rounds": 3,
        "evaluate_moment": "after",
    }
    add = RunDirectory.add_round

    def killed(self: RunDirectory, record: RoundRecord, clients: ClientsRecord) -> None:
        if record.round == 3:
            raise Killed
        add(self, record, clients)

    with (
        patch.object(RunDirectory, "add_round", killed),
        patch.object(RunRecorder, "close"),
        pytest.raises(Killed),
    ):
        federation(tmp_path, "fedavg", **keys).run()
    _, tried = load_tensors(tmp_path / "run" / ".round-3" / "best.safetensors")
    gone = {(client, 3): flower_error("its node is unavailable") for client in range(1, 5)}
    run = federation(tmp_path, "fedavg", resume=True, faults=gone, **keys).run()
    _, about = load_tensors(run.directory.path / "best.safetensors")
    scores = {line.round - 1: line.accuracy["head"].weighted for line in run.directory.round_records()}
    assert float(tried["accuracy"]) > max(scores.values())
    assert float(about["accuracy"]) == pytest.approx(max(scores.values()), abs=1e-6)
    assert float(about["accuracy"]) == pytest.approx(scores[int(about["round"])], abs=1e-6)


@pytest.mark.parametrize("at", [1, 2])
def test_interruption_between_a_round_and_its_files_is_mended(tmp_path: Path, at: int) -> None:
    whole = federation(tmp_path / "b", on_disk=True).run()
    run = federation(tmp_path / "a", on_disk=True)
    files = run.directory.path
    add = RunDirectory.add_round

    def adding(self: RunDirectory, record: RoundRecord, clients: ClientsRecord) -> None:
        add(self, record, clients)
        if record.round == at:
            raise Killed

    with (
        patch.object(RunDirectory, "add_round", adding),
        patch.object(RunRecorder, "close"),
        pytest.raises(Killed),
    ):
        run.run()
    # Who reads the run now finds the files of its last round.
    for name in ("checkpoint.safetensors", "prototypes.safetensors"):
        assert load_tensors(RunDirectory(files).state_file(name))[1]["round"] == str(at)
    with pytest.raises(
        RunRefused, match=rf"has {at} rounds, this strategy {at - 1}; make another one with resume = true$"
    ):
        run.run()
    resumed = federation(tmp_path / "a", on_disk=True, resume=True).run()
    assert resumed.fingerprint == whole.fingerprint
    assert lines(resumed) == lines(whole)
    assert resumed.directory.result() == whole.directory.result()
    assert not list(files.glob(".round-*"))


def test_files_that_cannot_be_put_in_place_cost_no_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = federation(tmp_path / "b", on_disk=True, num_server_rounds=3).run()
    run = federation(tmp_path / "a", on_disk=True, num_server_rounds=3)
    replace = Path.replace
    failed: list[Path] = []

    def failing(self: Path, target: Path) -> Path:
        if (self.parent.name, self.name) == (".round-2", "checkpoint.safetensors") and not failed:
            failed.append(self)
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, target)

    with patch.object(Path, "replace", failing):
        run.run()
    assert "the files of round 2 are still in" in caplog.text
    assert (run.fingerprint, run.directory.result()) == (whole.fingerprint, whole.directory.result())
    assert lines(run) == lines(whole)


def test_a_history_whose_size_is_unknown_is_not_cut(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True).run()
    before = [(run.directory.path / name).read_bytes() for name in ("rounds.jsonl", "clients.jsonl")]
    stat = Path.stat

    def failing(self: Path, **more: Any) -> os.stat_result:
        if self.name == "rounds.jsonl":
            raise OSError(errno.EIO, "Input/output error")
        return stat(self, **more)

    record, clients = run.strategy.history[-1], run.directory.client_records()[-1]
    with (
        patch.object(Path, "stat", failing),
        pytest.raises(UnsavedState, match=r"rounds.jsonl cannot be writ"),
    ):
        RunDirectory(run.directory.path).add_round(record, clients)
    assert [(run.directory.path / name).read_bytes() for name in ("rounds.jsonl", "clients.jsonl")] == before


def test_a_loop_of_ones_own_cannot_write_a_round_twice(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True)
    finished: list[Any] = []
    commit = MethodStrategy._commit

    def keeping(self: MethodStrategy, round_: Any) -> RoundRecord:
        finished.append(round_)
        return commit(self, round_)

    with patch.object(MethodStrategy, "_commit", keeping):
        run.run()
    with pytest.raises(RunRefused, match=r"has round 2 already; resume the run$"):
        run.strategy._commit(finished[1])
    assert [line.round for line in run.directory.client_records()] == [1, 2]


def test_a_link_among_the_files_of_a_round_is_not_followed(tmp_path: Path) -> None:
    other = federation(tmp_path / "b", on_disk=True).run().directory.path
    run = federation(tmp_path / "a", on_disk=True).run()
    (run.directory.path / ".round-2").symlink_to(other)
    before = (run.directory.path / "checkpoint.safetensors").read_bytes()
    assert RunDirectory(run.directory.path).state_file("checkpoint.safetensors").parent == run.directory.path
    federation(tmp_path / "a", on_disk=True, resume=True, num_server_rounds=2).run()
    assert (run.directory.path / "checkpoint.safetensors").read_bytes() == before
    assert (other / "checkpoint.safetensors").exists()
    assert not (run.directory.path / ".round-2").is_symlink()


def test_rejects_a_checkpoint_that_is_ahead_of_the_history(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True).run()
    file = run.directory.path / "rounds.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with pytest.raises(DamagedState, match=r"is of round 2, but the history holds 1 rounds$"):
        federation(tmp_path, on_disk=True, resume=True).run()


def test_a_run_whose_hash_cannot_be_written_fails_and_is_resumed(tmp_path: Path) -> None:
    whole = federation(tmp_path / "a", on_disk=True).run()
    write = RunDirectory.write_line

    def full(self: RunDirectory, name: str, line: str) -> None:
        if name == "result.txt":
            raise UnsavedState("result.txt cannot be written (No space left on device)")
        write(self, name, line)

    run = federation(tmp_path / "b", on_disk=True)
    with patch.object(RunDirectory, "write_line", full), pytest.raises(UnsavedState, match="No space left"):
        run.run()
    assert "No space left" in run.directory.error()
    resumed = federation(tmp_path / "b", on_disk=True, resume=True).run()
    assert resumed.directory.result() == whole.directory.result()


def make_round(run: Federation, number: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Make a round as a loop of one's own does."""
    messages = run.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), run.grid)
    meanwhile()
    run.strategy.aggregate_train(number, run.grid.send_and_receive(messages))


def test_a_loop_of_ones_own_finishes_the_run_with_its_last_round(tmp_path: Path) -> None:
    whole = federation(tmp_path / "a", on_disk=True, num_server_rounds=2).run()
    run = federation(tmp_path / "b", on_disk=True, num_server_rounds=2)
    results = []
    for number in (1, 2, 3):
        make_round(run, number)
        results.append(run.directory.result())
    assert results == [
        "",
        *[whole.directory.result()] * 2,
    ]  # if it goes on, that of the configured rounds stays
    assert snapshot(run.directory.path).state == "finished"


def test_a_loop_of_ones_own_writes_no_round_of_a_run_that_another_server_has_continued(
    tmp_path: Path,
) -> None:
    run, other = (
        federation(tmp_path, "fedavg", on_disk=True, models="mlp", resume=again) for again in (False, True)
    )
    make_round(run, 1)
    with pytest.raises(
        RunRefused, match="has 2 rounds, this strategy 1; make another one with resume = true"
    ):
        make_round(run, 2, other.run)
    assert [record.round for record in run.directory.round_records()] == [1, 2]


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_loop_of_ones_own_writes_no_history_without_its_run(tmp_path: Path, rounds: int) -> None:
    run = federation(tmp_path, on_disk=True)
    for number in range(1, 1 + rounds):
        make_round(run, number)
    with pytest.raises(PbflError, match=r"is not a run directory: it has no run\.json$"):
        make_round(run, rounds + 1, lambda: shutil.rmtree(run.directory.path))
    assert not (run.directory.path / "rounds.jsonl").exists()


def test_a_loop_of_ones_own_that_fails_leaves_its_error_and_can_be_resumed(tmp_path: Path) -> None:
    run = federation(tmp_path, strategy=with_rule(divides_by_zero), on_disk=True)
    make_round(run, 1)
    with pytest.raises(RunEnded, match="'rows' holds NaN"):
        make_round(run, 2)
    assert "'rows' holds NaN" in run.directory.error()
    assert federation(tmp_path, on_disk=True, resume=True).run().strategy.done == 2


def test_a_loop_of_ones_own_repeats_a_round_that_failed(tmp_path: Path) -> None:
    """And leaves none out; once it has succeeded, its error is gone."""
    whole = federation(tmp_path / "whole", on_disk=True, min_replies=5).run()
    run = federation(tmp_path / "run", on_disk=True, min_replies=5, faults={(1, 2): raises})
    make_round(run, 1)
    with pytest.raises(RunEnded):
        make_round(run, 2)
    with pytest.raises(RunRefused, match=r"^server_round = 3: 1 rounds have counted; must be 2$"):
        make_round(run, 3)
    run.grid.faults.clear()
    make_round(run, 2)
    with pytest.raises(RunRefused, match=r"^server_round = 2: 2 rounds have counted; must be 3$"):
        run.strategy.aggregate_train(2, [])
    with pytest.raises(RuntimeError, match=r"^configure_train comes first, of round 3$"):
        run.strategy.aggregate_train(3, [])
    assert [record.round for record in run.directory.round_records()] == [1, 2]
    assert (run.directory.error(), run.directory.result()) == ("", whole.directory.result())


def test_a_loop_of_ones_own_may_bring_the_replies_of_a_round_again(tmp_path: Path) -> None:
    """First some of them, then all, though the server was interrupted between both histories; no error stays."""
    whole = federation(tmp_path / "whole", on_disk=True, min_replies=5).run()
    run = federation(tmp_path / "run", on_disk=True, min_replies=5)
    make_round(run, 1)
    messages = run.strategy.configure_train(2, ArrayRecord(), ConfigRecord(), run.grid)
    replies = run.grid.send_and_receive(messages)
    with pytest.raises(RunEnded):
        run.strategy.aggregate_train(2, replies[:3])
    with killed_between_histories(), pytest.raises(Killed):
        run.strategy.aggregate_train(2, replies)
    run.strategy.aggregate_train(2, replies)
    assert [record.round for record in run.directory.client_records()] == [1, 2]
    assert (run.directory.error(), run.directory.result()) == ("", whole.directory.result())


def test_a_loop_of_ones_own_goes_on_after_a_start_that_was_interrupted(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True)
    with killed_between_histories(), pytest.raises(Killed):
        run.run()
    with (
        patch.object(MethodStrategy, "_plan", side_effect=ConnectionError("gone")),
        pytest.raises(ConnectionError),
    ):
        make_round(run, 1)
    for number in (1, 2):
        make_round(run, number)
    assert [record.round for record in run.directory.client_records()] == [1, 2]
    assert not run.directory.error()


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_loop_of_ones_own_goes_on_behind_another_server_that_has_ended(how: str, tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True, min_replies=5)
    make_round(run, 1)
    other = federation(tmp_path, on_disk=True, min_replies=5, resume=True, faults={(1, 2): raises})
    if how == "killed":
        other.grid.faults.clear()
        with killed_between_histories(), pytest.raises(Killed):
            other.run()
    else:
        with pytest.raises(RunEnded):
            other.run()
    make_round(run, 2)
    assert [record.round for record in run.directory.client_records()] == [1, 2]
    assert (run.directory.error(), bool(run.directory.result())) == ("", True)


def test_a_client_whose_reply_comes_in_the_second_try_of_a_round_is_not_busy(tmp_path: Path) -> None:
    run = federation(tmp_path, num_server_rounds=3, min_replies=2, faults={(0, 2): raises})
    make_round(run, 1)
    replies = run.grid.send_and_receive(
        run.strategy.configure_train(2, ArrayRecord(), ConfigRecord(), run.grid)
    )
    with pytest.raises(RunEnded):
        run.strategy.aggregate_train(2, [reply for reply in replies if not reply.has_error()][:1])
    run.strategy.aggregate_train(2, replies)
    make_round(run, 3)
    assert [record.trained for record in run.strategy.history[1:]] == [[1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_a_second_start_does_not_make_the_run_shorter(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True).run()
    before = {file.name: file.read_bytes() for file in run.directory.path.glob("*.*") if file.is_file()}
    with pytest.raises(
        RunRefused, match=r"^num-server-rounds = 1: the run has 2 rounds already; must be 2 or more$"
    ):
        run.strategy.start(run.grid, num_rounds=1)
    assert {name: (run.directory.path / name).read_bytes() for name in before} == before


def test_a_loop_of_ones_own_that_begins_with_another_round_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True).run()
    before = {file.name: file.read_bytes() for file in run.directory.path.glob("*.*") if file.is_file()}
    with pytest.raises(RunRefused, match=r"^server_round = 1: 2 rounds have counted; must be 3$"):
        make_round(federation(tmp_path, on_disk=True, resume=True), 1)
    assert {name: (run.directory.path / name).read_bytes() for name in before} == before
    with pytest.raises(RunRefused, match=r"^server_round = 2: 0 rounds have counted; must be 1$"):
        make_round(federation(tmp_path / "new", on_disk=True), 2)
    assert not (tmp_path / "new" / "run" / "run.json").exists()


@pytest.mark.parametrize("whole", [False, True])
def test_a_strategy_goes_on_in_no_other_run(whole: bool, tmp_path: Path) -> None:
    run = federation(tmp_path, "local", on_disk=True)
    run.run() if whole else make_round(run, 1)
    shutil.rmtree(run.directory.path)
    other = federation(tmp_path, "local", on_disk=True, seed=7)
    other.run() if whole else make_round(other, 1)
    before = {file.name: file.read_bytes() for file in run.directory.path.glob("*.*") if file.is_file()}
    with pytest.raises(RunRefused, match=r"holds another run now, in the place of this strategy's$"):
        run.strategy.start(run.grid, num_rounds=3) if whole else make_round(run, 2)
    assert {name: (run.directory.path / name).read_bytes() for name in before} == before


def test_patience_ends_no_loop_of_ones_own(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"patience": 1, "patience_on": "test", "learning_rate": 1e-6}
    run = federation(tmp_path, "fedavg", num_server_rounds=4, **keys)
    for number in (1, 2, 3, 4):
        make_round(run, number)
    assert not [line for record in run.strategy.history for line in record.warnings if "ends early" in line]


def killed_between_histories() -> AbstractContextManager[object]:
    """Within the context the line of a round is written for the clients only."""
    append = RunDirectory._append

    def killed(self: RunDirectory, name: str, *more: Any) -> None:
        if name == "rounds.jsonl":
            raise Killed
        append(self, name, *more)

    return patch.object(RunDirectory, "_append", killed)


def test_a_run_killed_between_both_histories_of_its_first_round_resumes(tmp_path: Path) -> None:
    with killed_between_histories(), pytest.raises(Killed):
        federation(tmp_path, on_disk=True).run()
    run = federation(tmp_path, on_disk=True, resume=True).run()
    assert [record.round for record in run.directory.client_records()] == [1, 2]


def test_what_an_earlier_try_of_a_round_has_staged_does_not_stay(tmp_path: Path) -> None:
    run = federation(tmp_path, "local", on_disk=True, learning_rate=1e-9)
    best = run.directory.path / "best.safetensors"

    def left() -> None:
        folder = run.directory.staged(2)
        folder.mkdir()
        (folder / best.name).write_bytes(b"of a try whose disk was full")

    with after_round(1, left):
        run.run()
    assert best.read_bytes() != b"of a try whose disk was full"


@pytest.mark.parametrize("kept", [0, 1])
def test_rejects_a_history_of_the_clients_that_lacks_rounds(tmp_path: Path, kept: int) -> None:
    run = federation(tmp_path, on_disk=True).run()
    files = run.directory.path
    lines = (files / "clients.jsonl").read_text().splitlines(keepends=True)
    (files / "clients.jsonl").write_text("".join(lines[:kept]))
    before = {file.name: file.read_bytes() for file in files.glob("*.json*")}
    with pytest.raises(DamagedState, match=rf"clients.jsonl holds {kept} of the 2 finished rounds$"):
        federation(tmp_path, on_disk=True, resume=True, num_server_rounds=3).run()
    assert {file.name: file.read_bytes() for file in files.glob("*.json*")} == before


@pytest.mark.parametrize(
    ("moment", "made", "fewer"),
    [
        ("before", {}, {"num_server_rounds": 2}),
        ("before", {}, {"num_server_rounds": 4, "patience": 1, "patience_on": "test"}),
        ("after", {"evaluate_every": 3}, {"num_server_rounds": 4}),
    ],
)
def test_a_run_does_not_end_without_the_scores_of_its_final_state(
    tmp_path: Path, moment: str, made: dict[str, Any], fewer: dict[str, Any]
) -> None:
    keys: dict[str, Any] = {
        "on_disk": True,
        "evaluate_moment": moment,
        "learning_rate": 1e-9,
        "models": "cnn4",
    }
    total = 3 if moment == "before" else 5
    real = MethodStrategy._read

    def killed(self: MethodStrategy, phase: Any, *more: Any) -> Any:
        if phase.plan.number == total:
            raise Killed
        return real(self, phase, *more)

    run = federation(tmp_path, "fedavg", num_server_rounds=total, **made, **keys)
    with patch.object(MethodStrategy, "_read", killed), pytest.raises(Killed):
        run.run()
    before = (tmp_path / "run" / "run.json").read_bytes()
    refusal = rf"the run would end with its {total - 1} rounds, .*; must allow another round$"
    with pytest.raises(RunRefused, match=refusal):
        federation(tmp_path, "fedavg", resume=True, **made, **fewer, **keys).run()
    if "patience" not in fewer:
        with pytest.raises(RunRefused, match=refusal):
            run.strategy.start(run.grid, num_rounds=total - 1)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    resumed = federation(tmp_path, "fedavg", resume=True, num_server_rounds=total, **made, **keys).run()
    assert resumed.strategy.history[-1].latest.accuracy


@pytest.mark.parametrize(("clients", "said"), [(2, "(head)"), (1, "(head, over 1 of 2)")])
def test_the_streamed_line_says_over_how_many_clients_it_is(
    clients: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (record,) = rounds_of(over(clients, entry(3, 0.5, 0.25), "head"))
    with caplog.at_level(logging.INFO, "flwr"):
        log_record(record, "head", 4, 2)
    assert caplog.messages[0].startswith(f"round 3/4: accuracy 50.0 % {said}, 2 clients trained")
