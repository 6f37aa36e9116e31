"""What a client is opened with: network, initial weights, layout, precision, its share of the cores."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import Settings, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import app as client
from pbfl_flwr.flower.client import session
from pbfl_flwr.flower.client.worker import Built, Worker
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.checkpoints import as_file
from pbfl_flwr.models.contract import HEAD_PREFIX, SplitModel
from pbfl_flwr.runs.directory import RunRefused
from pbfl_flwr.task import Task
from pbfl_flwr.util.paths import weights_file
from tests.flower.inprocess import federation


def test_layout_and_precision_reach_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, str]] = set()
    original = Worker.network

    def network(worker: Worker, name: str, task: Task, settings: Settings, device: torch.device) -> Built:
        seen.add((settings.training.layout, settings.training.precision))
        return original(worker, name, task, settings, device)

    monkeypatch.setattr(Worker, "network", network)
    run = federation(tmp_path, num_server_rounds=1, layout="contiguous", precision="bfloat16").run()
    assert run.strategy.history[0].failures == []
    assert seen == {("contiguous", "bfloat16")}


@pytest.fixture
def initial_weights(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The weights of every client that is opened for the first time."""
    weights: list[dict[str, Tensor]] = []
    original = session.open_client

    def opened(message: Any, context: Any, source: Any) -> Any:
        opened_session = original(message, context, source)
        if opened_session.stored is None:
            state = opened_session.client.model.state_dict()
            weights.append({name: tensor.detach().clone() for name, tensor in state.items()})
        return opened_session

    monkeypatch.setattr(client, "open_client", opened)
    return weights


def test_initial_weights_are_common_or_own(tmp_path: Path, initial_weights: list[dict[str, Tensor]]) -> None:
    heads: dict[str, list[Tensor]] = {}
    starts: dict[str, dict[str, Any]] = {
        "alike": {},
        "own": {"initial-weights": "own"},
        "again": {"initial-weights": "own"},
        "fedproto": {"protocol": "fedproto"},
    }
    for name, keys in starts.items():
        initial_weights.clear()
        run = federation(
            tmp_path / name, num_clients=3, models="cnn4", batch_size=1, num_server_rounds=1, **keys
        ).run()
        assert run.strategy.history[0].failures == []
        heads[name] = [weights["head.weight"] for weights in initial_weights]
    assert torch.equal(heads["alike"][0], heads["alike"][2])
    own_weights = heads["own"]
    assert not any(torch.equal(own_weights[i], own_weights[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert all(torch.equal(*pair) for pair in zip(own_weights, heads["again"], strict=True))
    assert not torch.equal(*heads["fedproto"][:2])


@pytest.mark.parametrize(("keys", "threads"), [({"threads": "auto"}, 3), ({"threads": 2}, 2)])
def test_sets_number_of_threads(
    keys: dict[str, Any], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    run = federation(tmp_path, num_server_rounds=1, **keys)
    run.grid.cores = 3
    run.run()
    assert set(asked) == {threads}


# Pretrained weights ------------------------------------------------------------------------------------------


TASK = Task(10, 64, (1, 8, 8))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SplitModel:
    """A ResNet-4 with statistics of its own, kept as resnet4@mine."""
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    model = build_model("resnet4", TASK, 77)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(0.25)
    file = weights_file("resnet4", "mine")
    file.parent.mkdir(parents=True)
    file.write_bytes(body_file(model))
    return model


def body_file(model: SplitModel) -> bytes:
    return as_file({name: t for name, t in model.state_dict().items() if not name.startswith(HEAD_PREFIX)})


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedgh", "lg-fedavg", "fedgen"])
def test_server_needs_pretrained_weights_only_of_bodies_that_it_shares(
    method: str, trained: SplitModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build_method(parse({"method": method, "models": "resnet4@mine", "feature-dim": 64}, SECTIONS))
    if method == "fedavg":
        sent, pretrained = made.init(TASK, 0).tensors, dict(trained.named_parameters())
        same = {name for name in sent if torch.equal(sent[name], pretrained[name])}
        assert same == {name for name in sent if not name.startswith("head.")}
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "empty"))
    with pytest.raises(PbflError, match="no weights of resnet4") if method == "fedavg" else nullcontext():
        made.init(TASK, 0)
    if method != "fedavg":
        made.check(TASK, ["resnet4@mine", "resnet4@other"])


@pytest.mark.parametrize(
    ("method", "own_weights"), [("fedavg", False), ("fedper", False), ("fedproto", True)]
)
def test_clients_start_with_pretrained_body(
    method: str,
    own_weights: bool,
    trained: SplitModel,
    tmp_path: Path,
    initial_weights: list[dict[str, Tensor]],
) -> None:
    keys: dict[str, Any] = {"initial-weights": "own"} if own_weights else {}
    run = federation(tmp_path, method, models="resnet4@mine", num_server_rounds=1, on_disk=True, **keys).run()
    assert run.strategy.history[0].failures == []
    assert not any("same weights" in note for note in run.strategy.history[0].warnings)
    assert len(initial_weights) == 5
    for state in initial_weights:
        for name, tensor in trained.state_dict().items():
            if not name.startswith("head."):
                assert torch.equal(state[name], tensor), name
    assert (
        torch.equal(initial_weights[0]["head.weight"], initial_weights[1]["head.weight"]) is not own_weights
    )
    digests = {client.weights for client in run.directory.record().clients}
    assert len(digests) == 1
    assert digests != {""}


def test_auxiliary_network_may_be_pretrained(trained: SplitModel, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"models": "cnn2", "fml.auxiliary": "resnet4@mine", "learning-rate": 1e-30}
    run = federation(tmp_path, "fml", num_server_rounds=1, **keys).run()
    assert run.strategy.history[0].failures == []
    sent = run.strategy.state.tensors
    pretrained = dict(trained.named_parameters())
    assert all(torch.allclose(sent[name], pretrained[name]) for name in sent if not name.startswith("head."))


def test_client_reports_missing_auxiliary_weights_before_round_1(
    trained: SplitModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"models": "cnn2", "fml.auxiliary": "resnet4@mine"}
    run = federation(tmp_path, "fml", num_server_rounds=1, **keys)
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "another machine"))
    with pytest.raises(
        PbflError, match="clients: model 'resnet4@mine': there are no weights of resnet4 under the"
    ):
        run.run()
    assert run.strategy.history == []


def test_resumed_run_refuses_other_pretrained_weights(trained: SplitModel, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"models": "resnet4@mine", "on_disk": True}
    federation(tmp_path, num_server_rounds=1, **keys).run()
    federation(tmp_path, num_server_rounds=2, resume=True, **keys).run()
    other = build_model("resnet4", TASK, 78)
    weights_file("resnet4", "mine").write_bytes(body_file(other))
    with pytest.raises(RunRefused, match=r"client 0: a run keeps its clients, .* weights = "):
        federation(tmp_path, num_server_rounds=3, resume=True, **keys).run()
