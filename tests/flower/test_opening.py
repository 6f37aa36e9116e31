"""What a client is opened with: the network and the settings of its own architecture, its share of the cores."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower import opening
from tests.flower.inprocess import federation


def test_every_architecture_has_its_own_layout_and_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, tuple[str, str]] = {}
    original = opening._network

    def network(architecture: str, *others: Any) -> Any:
        seen[architecture] = (others[-1].layout, others[-1].precision)
        return original(architecture, *others)

    monkeypatch.setattr(opening, "_network", network)
    keys: dict[str, Any] = {"layout": "resnet4=contiguous", "precision": "cnn4=bfloat16"}
    run = federation(tmp_path, num_server_rounds=1, **keys).run()
    assert run.strategy.history[0]["failures"] == []
    assert seen == {"cnn4": ("channels-last", "bfloat16"), "resnet4": ("contiguous", "float32")}


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
