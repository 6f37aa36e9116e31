"""Clients and server begin with the weights that were kept under a label."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import app as client
from pbfl_flwr.flower.client import handshake as client_hello
from pbfl_flwr.flower.client import session
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.checkpoints import as_file, body_of
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.runs.directory import RunRefused
from pbfl_flwr.task import Task
from pbfl_flwr.util.paths import weights_file
from tests.flower.inprocess import federation

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
    file.write_bytes(as_file(body_of("resnet4", model.state_dict(), "the test's")))
    return model


@pytest.mark.parametrize(("method", "own"), [("fedavg", False), ("fedper", False), ("fedproto", True)])
def test_every_client_begins_with_the_kept_body(
    method: str, own: bool, trained: SplitModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Tensor]] = []
    original = session.open_client

    def opened(message: Any, context: Any, source: Any) -> Any:
        found = original(message, context, source)
        if found.stored is None:
            begun.append({name: t.detach().clone() for name, t in found.client.model.state_dict().items()})
        return found

    monkeypatch.setattr(client, "open_client", opened)
    keys: dict[str, Any] = {"initial-weights": "own"} if own else {}
    run = federation(tmp_path, method, models="resnet4@mine", num_server_rounds=1, on_disk=True, **keys).run()
    assert run.strategy.history[0].failures == []
    assert not any("same weights" in note for note in run.strategy.history[0].warnings)
    assert len(begun) == 5
    for state in begun:
        for name, tensor in trained.state_dict().items():
            if not name.startswith("head."):
                assert torch.equal(state[name], tensor), name
    assert torch.equal(begun[0]["head.weight"], begun[1]["head.weight"]) is not own
    digests = {client.weights for client in run.directory.record().clients}
    assert len(digests) == 1
    assert digests != {""}


def test_a_server_that_sends_bodies_begins_with_the_kept_one(trained: SplitModel) -> None:
    settings = parse({"method": "fedavg", "models": "resnet4@mine", "feature-dim": 64}, SECTIONS)
    sent = build_method(settings).init(TASK, 0).tensors
    kept = dict(trained.named_parameters())
    assert all(torch.equal(sent[name], kept[name]) for name in sent if not name.startswith("head."))
    assert not torch.equal(sent["head.weight"], kept["head.weight"])


@pytest.mark.parametrize("method", ["fedproto", "fedgh", "lg-fedavg", "fedgen"])
def test_a_server_that_sends_no_bodies_needs_no_file(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path))
    made = build_method(parse({"method": method, "models": "resnet4@mine", "feature-dim": 64}, SECTIONS))
    made.init(TASK, 0)
    made.check(TASK, ["resnet4@mine", "resnet4@other"])


def test_one_that_does_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path))
    settings = parse({"method": "fedavg", "models": "resnet4@mine", "feature-dim": 64}, SECTIONS)
    with pytest.raises(PbflError, match="no weights of resnet4 under the label 'mine' on this machine"):
        build_method(settings).init(TASK, 0)


def test_an_auxiliary_network_may_be_pretrained(trained: SplitModel, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"models": "cnn2", "fml.auxiliary": "resnet4@mine", "learning-rate": 1e-30}
    run = federation(tmp_path, "fml", num_server_rounds=1, **keys).run()
    assert run.strategy.history[0].failures == []
    sent = run.strategy.state.tensors
    kept = dict(trained.named_parameters())
    assert all(torch.allclose(sent[name], kept[name]) for name in sent if not name.startswith("head."))


def test_a_client_without_the_auxiliary_networks_weights_says_so_before_round_1(
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


def test_clients_whose_kept_weights_differ_are_named_once(trained: SplitModel, tmp_path: Path) -> None:
    said = iter(["aaaa", "bbbb", "aaaa", "aaaa", "bbbb"])
    with patch.object(client_hello, "digest_of_weights", lambda name: next(said)):
        run = federation(tmp_path, models="resnet4@mine").run()
    line = "'resnet4@mine' does not begin with the same weights everywhere: aaaa on client 0, 2, 3; bbbb on client 1, 4"
    assert [found.warnings.count(line) for found in run.strategy.history] == [1, 0]


def test_a_run_that_goes_on_does_so_with_the_weights_that_it_began_with(
    trained: SplitModel, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"models": "resnet4@mine", "on_disk": True}
    federation(tmp_path, num_server_rounds=1, **keys).run()
    federation(tmp_path, num_server_rounds=2, resume=True, **keys).run()
    other = build_model("resnet4", TASK, 78)
    weights_file("resnet4", "mine").write_bytes(as_file(body_of("resnet4", other.state_dict(), "the test's")))
    with pytest.raises(RunRefused, match=r"client 0: a resumed run keeps its clients, .* weights = "):
        federation(tmp_path, num_server_rounds=3, resume=True, **keys).run()
