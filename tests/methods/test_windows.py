"""Every method trains on sensor windows: four networks where clients may differ, else one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.methods import METHODS
from tests.flower.inprocess import federation, needs_one_architecture

MORE: dict[str, dict[str, Scalar]] = {
    "fml": {"fml.auxiliary": "har-cnn"},
    "fedkd": {"fedkd.auxiliary": "har-gru"},
    "tinyproto": {"cps-dim": 4},
    "gfpl": {"gfpl.start": 1, "gfpl.interval": 1},
    "fedcpd": {"models": "har-resnet"},  # it distils maps
}


def windows(settings: Settings, client: int) -> ClientData:
    """Eight training and four test windows of three channels, three classes of four."""
    generator = torch.Generator().manual_seed(client)

    def shard(size: int) -> Shard:
        y = (torch.arange(size) % 3 + client) % 4
        return Shard(torch.randn(size, 3, 40, generator=generator) + y[:, None, None], y)

    return ClientData(shard(8), shard(4), 4, tuple("abcd"), torch.ones(3, 1), torch.zeros(3, 1))


@pytest.mark.parametrize("name", METHODS)
def test_two_rounds_on_windows(name: str, tmp_path: Path) -> None:
    one = needs_one_architecture(name)
    keys: dict[str, Any] = {
        "num-clients": 2 if one else 4,
        "num-server-rounds": 2,
        "models": "har-gru" if one else "sensor-4",
        "feature-dim": 8,
    }
    run = federation(tmp_path, name, data=windows, **{**keys, **MORE.get(name, {})}).run()
    assert [line.failures for line in run.strategy.history] == [[], []]
    assert [line.trained for line in run.strategy.history] == [[*range(keys["num-clients"])]] * 2
