"""Every method trains on token ids: nothing between the data and the networks takes inputs for numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.config import Settings
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import METHODS
from tests.flower.inprocess import federation
from tests.methods.test_on_a_card import alike

WORDS = tuple(f"word {j}" for j in range(40))
MORE: dict[str, dict[str, Any]] = {
    "fml": {"fml.auxiliary": "textcnn"},
    "fedkd": {"fedkd.auxiliary": "textcnn"},
    "tinyproto": {"cps-dim": 4},
    "gfpl": {"gfpl.start": 1, "gfpl.interval": 1},
}


def texts(settings: Settings, client: int) -> ClientData:
    """Twelve training and four test texts of 30 tokens, three classes of four."""
    generator = torch.Generator().manual_seed(client)

    def shard(size: int) -> Shard:
        ids = torch.randint(0, len(WORDS), (size, 30), dtype=torch.int32, generator=generator)
        return Shard(ids, (torch.arange(size) % 3 + client) % 4)

    return ClientData(
        shard(12), shard(4), 4, tuple("abcd"), torch.ones(30), torch.zeros(30), vocabulary=WORDS
    )


# Their states are no maps with places.
WITHOUT_MAPS = {"bilstm", "gru", "lstm", "transformer-2-1"}


@pytest.mark.parametrize(
    "model",
    [
        *("fasttext", "lstm", "transformer-2-1"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("text-logistic", "bilstm", "gru")),
    ],
)
@pytest.mark.parametrize("name", METHODS)
def test_two_rounds_on_texts(name: str, model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "num-clients": 2,
        "num-server-rounds": 2,
        "models": model,
        "feature-dim": 8,
    }
    if name == "fedcpd" and model in WITHOUT_MAPS:
        with pytest.raises(PbflError, match=f"distils feature maps, which model '{model}' does not have"):
            federation(tmp_path / "refused", name, data=texts, **keys).run()
        keys["fedcpd.distill-weight"] = 0.0
    run = federation(tmp_path, name, data=texts, **keys, **MORE.get(name, {})).run()
    assert [line.failures for line in run.strategy.history] == [[], []]
    assert [line.trained for line in run.strategy.history] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("model", ["text-logistic", *sorted(WITHOUT_MAPS)])
def test_texts_on_a_card(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In evaluation torch takes another kernel of the transformer, but not of tensors that are no plain ones.
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    alike(tmp_path, "fedproto", {"models": model, "feature-dim": 8}, data=texts)
