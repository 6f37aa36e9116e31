"""What a client is opened with: the network and the settings of its own architecture, its share of the cores."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import app as client
from pbfl_flwr.flower.client import session
from tests.flower.inprocess import federation


def test_every_architecture_has_its_own_layout_and_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, tuple[str, str]] = {}
    original = session._network

    def network(architecture: str, *others: Any) -> Any:
        seen[architecture] = (others[-1].layout, others[-1].precision)
        return original(architecture, *others)

    monkeypatch.setattr(session, "_network", network)
    keys: dict[str, Any] = {"layout": "resnet4=contiguous", "precision": "cnn4=bfloat16"}
    run = federation(tmp_path, num_server_rounds=1, **keys).run()
    assert run.strategy.history[0].failures == []
    assert seen == {"cnn4": ("channels-last", "bfloat16"), "resnet4": ("contiguous", "float32")}


def test_clients_begin_alike_or_each_with_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, list[torch.Tensor]] = {}
    original = session.open_client

    def opened(message: Any, context: Any, source: Any) -> Any:
        found: Any = original(message, context, source)
        if found.stored is None:
            begun[name].append(found.client.model.head.weight.detach().clone())
        return found

    monkeypatch.setattr(client, "open_client", opened)
    starts: dict[str, dict[str, Any]] = {
        "alike": {},
        "own": {"initial-weights": "own"},
        "again": {"initial-weights": "own"},
        "fedproto": {"protocol": "fedproto"},
    }
    for name, keys in starts.items():
        begun[name] = []
        run = federation(
            tmp_path / name, num_clients=3, models="cnn4", batch_size=1, num_server_rounds=1, **keys
        ).run()
        assert run.strategy.history[0].failures == []
    assert torch.equal(begun["alike"][0], begun["alike"][2])
    own = begun["own"]
    assert not any(torch.equal(own[i], own[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert all(torch.equal(*pair) for pair in zip(own, begun["again"], strict=True))
    assert not torch.equal(*begun["fedproto"][:2])


def test_a_name_that_is_no_architecture_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="precision = 'resnet5=bfloat16': unknown model 'resnet5'"):
        federation(tmp_path, precision="resnet5=bfloat16").run()


@pytest.mark.parametrize(("keys", "threads"), [({"threads": "auto"}, 3), ({"threads": 2}, 2)])
def test_threads(keys: dict[str, Any], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    found = federation(tmp_path, num_server_rounds=1, **keys)
    found.grid.cores = 3
    found.run()
    assert set(asked) == {threads}
