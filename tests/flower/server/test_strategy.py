"""The strategy: aggregation, sampling, failures and what ends a run. Some rounds here have no training in them."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from pbfl_flwr.config import parse
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan.configuration import RequestedKeys, check, preflight
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.engines.local import federate_app
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.stopping import RunEnded, as_saved, need_usable
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Payload, Prototypes, Weights
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs import checkpoint
from pbfl_flwr.runs.directory import RunRefused
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.task import Task
from pbfl_flwr.util.atomic_files import UnsavedState
from tests.flower.inprocess import (
    NUM_CLIENTS,
    Answer,
    Fault,
    Federation,
    InProcessGrid,
    federation,
    flower_error,
    plain,
    raises,
    same_tensors,
    scripted,
    silent,
)
from tests.flower.server.uploads import TASK, prototypes, strategy_of


@pytest.mark.parametrize("rule", ["mean", "weighted"])
def test_prototype_averages_agree_with_numpy(rule: str) -> None:
    present = {0: [0, 1], 1: [1, 2], 2: [1, 3]}
    n = {0: [5, 1], 1: [9, 4], 2: [2, 7]}  # class 1 is held by three clients with 1, 9 and 2 samples
    weighted = rule == "weighted"
    uploads = {i: prototypes(i, present[i], n[i] if weighted else None) for i in present}
    strategy = strategy_of(method="fedproto", aggregation=rule)
    strategy.begin(TASK)

    state = strategy.aggregate_fit(1, uploads)

    for j in range(4):
        holders = [i for i in present if j in present[i]]
        rows = np.array([uploads[i].values[j].numpy() for i in holders], dtype=np.float64)
        w = np.array([n[i][present[i].index(j)] if weighted else 1.0 for i in holders])
        expected = (w[:, None] * rows).sum(0) / w.sum()
        np.testing.assert_allclose(state.broadcast.values[j].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weight_averages_agree_with_numpy(weighting: str) -> None:
    strategy = strategy_of(method="fedavg", models="cnn2", weighting=weighting)
    strategy.begin(TASK)
    n = {0: 1, 1: 30, 2: 3}
    uploads = {}
    for i in n:
        g = torch.Generator().manual_seed(i)
        named = {name: torch.randn(t.shape, generator=g) for name, t in strategy.state.tensors.items()}
        uploads[i] = Weights(named, n[i])
    share = {i: (n[i] if weighting == "samples" else 1.0) for i in n}

    state = strategy.aggregate_fit(1, uploads)

    for name in state.tensors:
        stacked = np.stack([share[i] * uploads[i].tensors[name].double().numpy() for i in n])
        np.testing.assert_allclose(state.tensors[name], stacked.sum(0) / sum(share.values()), atol=1e-6)


class Forgetful(MethodStrategy):
    """A user's strategy that saves something and forgets to return the state."""

    def aggregate_fit(self, server_round: int, uploads: Mapping[int, Payload]) -> Any:
        super().aggregate_fit(server_round, uploads)


def test_an_aggregate_fit_that_returns_nothing_is_named_with_its_place() -> None:
    settings = parse({"num-clients": 3, "models": "mlp5", "feature-dim": 8, "max-samples": 120}, SECTIONS)
    line = Forgetful.aggregate_fit.__code__.co_firstlineno
    place = (
        rf"^Forgetful.aggregate_fit \(test_strategy.py:{line}\) returned None; must return a PipelineState$"
    )
    with pytest.raises(PbflError, match=place):
        federate_app(Forgetful(settings), make_client_app(None, settings))


@pytest.mark.parametrize(
    ("value", "found"), [(float("nan"), "NaN or infinity"), (2e8, "2e+08, must be at most")]
)
def test_an_aggregate_that_clients_would_reject_ends_the_run_and_keeps_the_state(
    value: float, found: str
) -> None:
    strategy = strategy_of(method="fedproto")
    strategy.begin(TASK)
    before = strategy.state
    bad = replace(prototypes(0, [1]), values=torch.full((4, 6), value))
    says = f"round 1: after aggregation the broadcast would be rejected: 'rows' holds {found}"
    with pytest.raises(RunEnded, match=re.escape(says) + ".*; lower the learning rates. Rounds"):
        strategy.aggregate_fit(1, {0: bad})
    assert strategy.state is before


@dataclass(frozen=True)
class Latest:
    """The last numbers of each client."""

    rows: Mapping[str, Tensor]

    def to_tensors(self) -> dict[str, Tensor]:
        return dict(self.rows)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> "Latest":
        return cls(tensors)


def test_a_state_has_the_order_of_its_checkpoint() -> None:
    """A sum over it would be another one in a run that is resumed."""
    state = Latest({name: torch.ones(2) for name in ("c9", "c10", "c1")})
    saved = as_saved(state, Latest, TASK, 1)
    assert isinstance(saved, Latest)
    assert list(saved.rows) == ["c1", "c10", "c9"]


def test_numbers_of_another_type_are_not_blamed_on_the_learning_rates() -> None:
    whole = replace(prototypes(0, [1]), values=torch.ones(4, 6).long())
    says = "'rows' is torch.int64, expected floating point of 16 to 64 bits. Rounds up to 0 are kept"
    with pytest.raises(RunEnded, match=re.escape(says)):
        need_usable(whole, Prototypes, TASK, 1)


def test_failing_clients_are_named_and_do_not_affect_others(tmp_path: Path) -> None:
    """In round 2 client 4 raises after its training, client 2's file is damaged, client 3 never answers.

    What the server and the others have after round 3 has the same bits as in a run in which these clients were
    simply not reached in the same rounds.
    """
    rounds: dict[str, Any] = {"num_server_rounds": 3, "min_replies": 2}
    faulty = federation(tmp_path / "a", **rounds)
    directory = tmp_path / "a" / "run" / "clients" / faulty.strategy.experiment
    file = directory / "client-00002.safetensors"
    half: list[bytes] = []

    def damaged(message: Message, answer: Answer) -> Message:
        half.append(file.read_bytes()[: file.stat().st_size // 2])
        file.write_bytes(half[0])
        return answer()

    faulty.grid.faults = {(4, 2): raises, (2, 2): damaged, (3, 2): silent}
    faulty.run()
    quiet = {(4, 2): silent, (2, 2): silent, (2, 3): silent, (3, 2): silent}
    reference = federation(tmp_path / "b", faults=quiet, **rounds).run()

    second, third = faulty.strategy.history[1:]
    reasons = {failure.client: failure.reason for failure in second.failures}
    assert set(reasons) == {2, 3, 4}
    assert reasons[4].startswith("ZeroDivisionError: boom in the middle of the round (")
    assert "client-00002.safetensors cannot be read" in reasons[2]
    assert "move it away to start afresh" in reasons[2]
    assert reasons[3].startswith("no answer within ")
    assert second.trained == [0, 1]
    assert third.trained == [0, 1, 3, 4]
    assert [failure.client for failure in third.failures] == [2]
    assert same_tensors(faulty.strategy.state.to_tensors(), reference.strategy.state.to_tensors())
    for line, expected in zip(faulty.strategy.history, reference.strategy.history, strict=True):
        assert line.accuracy == expected.accuracy
        assert line.client_metrics == expected.client_metrics
    assert file.read_bytes() == half[0], "a damaged file is not overwritten"


def test_too_few_replies_end_the_run_with_reasons(tmp_path: Path) -> None:
    faults = {(0, 2): raises, (1, 2): flower_error("the node was switched off")}
    run = federation(tmp_path, faults=faults, min_replies=4, on_disk=True)
    reasons = "client 0: ZeroDivisionError: boom .*; client 1: the node was switched off$"
    with pytest.raises(RunEnded, match=f"^round 2: 3 valid replies, min-replies is 4: {reasons}"):
        run.run()
    assert [line.round for line in run.directory.round_records()] == [1]


def test_ends_after_round_1_if_no_client_can_make_a_step(tmp_path: Path) -> None:
    run = federation(tmp_path, batch_size=64, drop_last="always", on_disk=True)
    reason = (
        r"^round 1: no client made a training step, .* \(batch-size = 64, drop-last = 'always'; BatchNorm"
    )
    with pytest.raises(RunEnded, match=reason):
        run.run()
    assert run.directory.round_records() == []
    some = federation(tmp_path / "b", batch_size=20, drop_last="always", num_server_rounds=1).run()
    assert "made no training step" in " ".join(some.strategy.history[0].warnings)


DIED = flower_error("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.")


def test_dead_worker_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    broken = federation(tmp_path / "a", faults={(3, 2): DIED}, on_disk=True)
    with pytest.raises(RunEnded, match=r"round 2: a simulation worker died \(client 3\).*up to 1 are kept"):
        broken.run()
    resumed = federation(tmp_path / "a", on_disk=True, resume=True).run()
    assert resumed.strategy.done == 2
    assert resumed.fingerprint == federation(tmp_path / "b").run().fingerprint


@pytest.mark.parametrize("error", [DIED, flower_error("the disk is full", wire.UNSAVED)])
def test_device_reporting_a_fault_of_a_simulation_only_fails_itself(tmp_path: Path, error: Fault) -> None:
    nodes = [{"client-id": client} for client in range(5)]
    run = federation(tmp_path, faults={(3, 1): error}, node_configs=nodes).run()
    assert run.strategy.done == 2
    assert [failure.client for failure in run.strategy.history[0].failures] == [3]


def kinds(run: Federation, server_round: int) -> dict[int, str]:
    return {client: kind for client, number, kind in run.grid.asked if number == server_round}


def test_fraction_trains_and_the_others_are_scored(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fraction_train": 0.4, "num_server_rounds": 4}
    one = federation(tmp_path / "a", "local", **keys).run()
    # Other node ids in another order, replies in another order: the same clients, the same bits.
    other = federation(
        tmp_path / "b", "local", nodes=[900, 5, 77, 31, 8], order=3, partitions=[3, 1, 4, 0, 2], **keys
    ).run()
    trained = []
    for line, twin in zip(one.strategy.history, other.strategy.history, strict=True):
        asked = kinds(one, line.round)
        assert sorted(asked.values()) == ["evaluate"] * 3 + ["train"] * 2
        assert line.trained == sorted(c for c, kind in asked.items() if kind == "train") == twin.trained
        assert line.accuracy["head"].clients == NUM_CLIENTS
        trained.append(tuple(line.trained))
    assert len(set(trained)) > 1
    assert one.fingerprint == other.fingerprint
    reseeded = federation(tmp_path / "c", "local", seed=1, **keys).run()
    assert [tuple(line.trained) for line in reseeded.strategy.history] != trained


def test_scored_clients_are_sampled_in_every_round(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fraction_train": 0.4, "num_server_rounds": 6}
    drawn = []
    for name, fraction in (("a", 0.34), ("b", 0.34), ("none", 0.0)):
        run = federation(tmp_path / name, "local", fraction_evaluate=fraction, **keys).run()
        drawn.append([{c for c, kind in kinds(run, n).items() if kind == "evaluate"} for n in range(1, 7)])
    assert {len(scored) for scored in drawn[0]} == {1}  # 0.34 of the three others
    assert len(set().union(*drawn[0])) > 2
    assert drawn[0] == drawn[1]
    assert not any(drawn[2])


def test_scoring_before_training_ends_with_a_last_scoring(tmp_path: Path) -> None:
    run = federation(tmp_path, "fedproto", evaluate_moment="before", on_disk=True).run()
    after = federation(tmp_path / "after", "fedproto").run()
    history = run.strategy.history
    assert [line.accuracy_of_round for line in history] == [0, 1]
    assert history[0].final is None
    final = history[1].final
    assert final is not None
    assert final.failures == []
    assert final.accuracy["head"].clients == NUM_CLIENTS
    # Before round 1 nobody has a prototype, so only the head can be asked.
    assert set(history[0].accuracy) == {"head"}
    # The head's scores before round 2 are those after round 1, as are those of the end.
    head = [line.accuracy["head"] for line in after.strategy.history]
    assert [history[1].accuracy["head"], final.accuracy["head"]] == head
    assert [kind for _, number, kind in run.grid.asked if number == 2] == ["train"] * 5 + ["evaluate"] * 5
    assert run.directory.round_records()[1].final == final


def test_each_client_gets_its_own_broadcast() -> None:
    """Of a table that is made when it is sent, so that one may take the place of another in memory."""
    strategy = MethodStrategy(parse({"num-clients": 40, "feature-dim": 6}, SECTIONS))
    grid = InProcessGrid(scripted(TASK, lambda client, server_round: RecordDict()), {}, 40)
    with patch.object(Pipeline, "broadcast", lambda self, state, client: prototypes(client, [0])):
        messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    assert len(messages) == 40
    for message in messages:
        client = grid.nodes.index(message.metadata.dst_node_id)
        result = wire.decode(message.content.array_records["p"], Prototypes, TASK)
        assert torch.equal(result.values, prototypes(client, [0]).values)


def test_the_log_names_the_networks_of_hand_written_clients(caplog: pytest.LogCaptureFixture) -> None:
    """If they are not the configured ones."""
    for architecture in ("linear", "cnn4"):
        strategy = MethodStrategy(parse({"num-clients": 2, "feature-dim": 6, "models": "cnn4"}, SECTIONS))
        app = scripted(TASK, lambda client, server_round: RecordDict(), architecture)
        strategy.prepare(InProcessGrid(app, {}, 2))
    assert [m for m in caplog.messages if m.startswith("clients declare")] == ["clients declare linear x2"]


def test_counts_bytes_of_messages(tmp_path: Path) -> None:
    run = federation(tmp_path, num_server_rounds=1)
    assert isinstance(run.strategy, Strategy)
    seen: list[tuple[str, int]] = []

    def weighing(sent: Sequence[Message], replies: Sequence[Message]) -> None:
        if sent[0].metadata.message_type == "train":
            seen.extend(("down", len(m.content.array_records["p"]["s"].data)) for m in sent)
            seen.extend(("up", len(m.content.array_records["p"]["s"].data)) for m in replies)

    run.grid.watchers.append(weighing)
    run.run()
    line = run.strategy.history[0]
    for way in ("up", "down"):
        size = getattr(line, f"bytes_{way}")
        assert size.payload == sum(bytes_ for name, bytes_ in seen if name == way)
        assert size.payload < size.application < size.total
    present = [3, 0, 4, 1, 4]  # classes of the clients' training samples; client 1 has one sample, held back
    assert plain(line.scalars) == {"up": sum(present) * 64, "down": 0}


def test_diverging_client_reports_what_helps(tmp_path: Path) -> None:
    failure, *_ = federation(tmp_path, learning_rate=1e18).run().strategy.history[0].failures
    reason = r"loss term 'ce' is not finite after \d+ steps; lower learning-rate, .*"
    assert re.fullmatch(reason, failure.reason)


def test_rejects_unsupported_precision_before_round_1(tmp_path: Path) -> None:
    run = federation(tmp_path, models="tests.methods.tiny_nets:Plain", precision="bfloat16", num_clients=2)
    with pytest.raises(
        PbflError, match=r"2 of 2 clients: precision = 'bfloat16': Plain is not a .*SplitModel"
    ):
        run.run()
    assert run.strategy.history == []


def test_finished_strategy_can_make_more_rounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = federation(tmp_path, num_server_rounds=1).run()
    assert "nothing to do" not in caplog.text
    run.strategy.start(run.grid)
    assert "nothing to do: 1 of 1 rounds are finished" in caplog.text
    run.strategy.start(run.grid, num_rounds=2)
    assert [line.round for line in run.strategy.history] == [1, 2]


def test_rounds_that_start_asks_for_are_recorded_like_the_key(tmp_path: Path) -> None:
    run = federation(tmp_path, num_server_rounds=3, on_disk=True)
    run.strategy.start(run.grid, num_rounds=1, timeout=50)
    one = run.directory.result()
    recorded = run.directory.record().configuration
    assert (recorded["num-server-rounds"], recorded["round-timeout"]) == (1, 50)
    run.strategy.start(run.grid, num_rounds=2)
    assert [line.round for line in run.directory.round_records()] == [1, 2]
    assert run.directory.record().configuration["num-server-rounds"] == 2
    assert one != run.directory.result() != ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_rounds": 0}, "num-server-rounds = 0: must be greater than or equal to 1"),
        ({"num_rounds": -1}, "num-server-rounds = -1: must be greater than or equal to 1"),
        ({"num_rounds": 1.5}, "num-server-rounds = 1.5: must be a whole number"),
        ({"num_rounds": True}, "num-server-rounds = True: must be a whole number"),
        ({"num_rounds": "2"}, "num-server-rounds = '2': must be a whole number"),
        ({"timeout": 0}, "round-timeout = 0: must be greater than 0"),
        ({"timeout": float("nan")}, "round-timeout = nan: "),
    ],
)
def test_arguments_of_start_are_checked_like_keys(
    tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    run = federation(tmp_path, on_disk=True)
    with pytest.raises(PbflError) as error:
        run.strategy.start(run.grid, **arguments)
    assert str(error.value).startswith(says)
    assert not run.directory.path.exists()


def test_what_evaluate_fn_returns_is_checked(tmp_path: Path) -> None:
    run = federation(tmp_path, num_server_rounds=2)
    scored: list[int] = []

    def score(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        scored.append(number)
        return MetricRecord({"loss": 0.5}) if number == 1 else None

    result = run.strategy.start(run.grid, evaluate_fn=score)
    assert scored == [1, 2]
    assert result.evaluate_metrics_serverapp == {1: MetricRecord({"loss": 0.5})}
    wrong: Any = lambda number, arrays: 0.5  # noqa: E731
    says = r"^evaluate_fn returned '0.5' of type float; must be a MetricRecord or None$"
    with pytest.raises(PbflError, match=says):
        run.strategy.start(run.grid, num_rounds=3, evaluate_fn=wrong)


def test_loop_of_flower_over_the_hooks_gives_the_same_bits(tmp_path: Path) -> None:
    ours = federation(tmp_path / "ours", on_disk=True).run()
    hooks = federation(tmp_path / "hooks", on_disk=True)
    Strategy.start(hooks.strategy, hooks.grid, ArrayRecord(), num_rounds=2)
    assert hooks.fingerprint == ours.fingerprint
    assert hooks.directory.round_records() == hooks.strategy.history


def test_failure_policy_stop_ends_the_run_at_the_first_failure(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"on_disk": True, "num_server_rounds": 3}
    run = federation(tmp_path / "a", faults={(3, 2): raises}, failure_policy="stop", **keys)
    reason = (
        "client 3 failed: ZeroDivisionError: boom in the middle of the round .*; failure-policy is 'stop'. "
    )
    with pytest.raises(RunEnded, match=f"^round 2: {reason}Rounds up to 1 are kept and can be resumed$"):
        run.run()
    assert [line.round for line in run.directory.round_records()] == [1]
    # The policy may change when the run goes on; what is repeated gives the same bits.
    resumed = federation(tmp_path / "a", resume=True, **keys).run()
    assert resumed.fingerprint == federation(tmp_path / "b", **keys).run().fingerprint


@pytest.mark.parametrize(("at", "moment"), [(2, "after"), (-1, "before")])
def test_round_that_ended_the_run_counts_once_after_restart(tmp_path: Path, at: int, moment: str) -> None:
    """FedTGP's server trains on from its state, so a round that was aggregated twice would show."""
    keys: dict[str, Any] = {"failure_policy": "stop", "evaluate_moment": moment}
    fault = flower_error("its node is unavailable")
    run = federation(tmp_path / "a", "fedtgp", faults={(3, at): fault}, on_disk=True, **keys)
    with pytest.raises(RunEnded, match="Rounds up to 1 are kept"):
        run.run()
    tensors, _ = load_tensors(run.directory.path / "checkpoint.safetensors")
    assert same_tensors(run.strategy.state.to_tensors(), tensors), "the state of the last finished round"
    run.grid.faults = {}
    run.run()
    whole = federation(tmp_path / "b", "fedtgp", **keys).run()
    assert run.fingerprint == whole.fingerprint
    assert [line.round for line in run.directory.round_records()] == [1, 2]


def test_round_that_could_not_be_written_counts_once_after_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = checkpoint.stage, itertools.count(1)

    def full(*arguments: Any) -> None:
        if next(saved) == 2:
            with (run.directory.path / "rounds.jsonl").open("a") as file:
                file.write('{"round": ')  # as a full disk leaves it
            raise UnsavedState("no space left")
        save(*arguments)

    monkeypatch.setattr(checkpoint, "stage", full)
    run = federation(tmp_path / "a", num_server_rounds=3, on_disk=True)
    with pytest.raises(UnsavedState):
        run.run()
    assert run.directory.error() == "no space left"
    run.run()
    whole = federation(tmp_path / "b", num_server_rounds=3, on_disk=True).run()
    for records in (run.directory.round_records(), run.directory.client_records()):
        assert [record.round for record in records] == [1, 2, 3]
    assert (run.directory.error(), run.directory.result()) == ("", whole.directory.result())


@pytest.mark.parametrize(("key", "value"), [("num_server_rounds", 1), ("learning_rate", 0.5)])
def test_a_refused_resume_leaves_the_run_as_it_is_however_often_it_is_started(
    tmp_path: Path, key: str, value: float
) -> None:
    keys: dict[str, Any] = {"num_server_rounds": 2, "on_disk": True}
    run = federation(tmp_path, "fedavg", models="cnn4", **keys).run()
    before = {file.name: file.read_bytes() for file in run.directory.path.glob("r*.json*")}
    other = federation(tmp_path, "fedavg", models="cnn4", resume=True, **{**keys, key: value})
    for timeout in (None, 50.0):
        with pytest.raises(RunRefused):
            other.strategy.start(other.grid, timeout=timeout)
    assert {file.name: file.read_bytes() for file in run.directory.path.glob("r*.json*")} == before
    if key == "num_server_rounds":
        other.strategy.start(other.grid, num_rounds=3)
        assert [record.round for record in run.directory.round_records()] == [1, 2, 3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the line is for a server without a CUDA device")
def test_a_server_without_the_device_that_it_needs_says_so_before_round_1(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fedtgp.server-device": "cuda"}
    run = federation(tmp_path, "fedtgp", **keys)
    says = r"^server-device = 'cuda': the server sees no CUDA device; .* a simulation needs --gpus-per-client"
    with pytest.raises(PbflError, match=says):
        run.run()
    assert not run.strategy.history
    requested = RequestedKeys({"method": "fedtgp", "models": "mlp5", **keys})
    with pytest.raises(PbflError, match=says):  # in a dry run too
        preflight(check(requested), Resources(workers=1), LoadedData())
