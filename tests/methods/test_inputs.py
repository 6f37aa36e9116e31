"""Every method trains on texts and on sensor windows: several networks where clients may differ, else one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.config import Settings
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import METHODS
from tests.flower.inprocess import federation, needs_one_architecture
from tests.methods.test_on_a_card import alike

WORDS = 40
MORE: dict[str, dict[str, Any]] = {"tinyproto": {"cps-dim": 4}, "gfpl": {"gfpl.start": 1, "gfpl.interval": 1}}
MAPS = {"texts": "fasttext", "windows": "har-resnet"}  # what FedCPD distils; a sequence's states are no maps
ONE = {"texts": "lstm", "windows": "har-gru"}
SEVERAL = {"texts": "fasttext,lstm,transformer-2-1", "windows": "sensor-4"}
AUXILIARY = {"texts": "textcnn", "windows": "har-cnn"}


def of_labels(settings: Settings, client: int, kind: str) -> ClientData:
    """Twelve training and four test samples of three of four classes: 30 tokens, or 40 readings of 3 channels."""
    generator = torch.Generator().manual_seed(client)

    def shard(size: int) -> Shard:
        y = (torch.arange(size) % 3 + client) % 4
        if kind == "texts":
            return Shard(torch.randint(0, WORDS, (size, 30), dtype=torch.int32, generator=generator), y)
        return Shard(torch.randn(size, 3, 40, generator=generator) + y[:, None, None], y)

    scale = (30,) if kind == "texts" else (3, 1)
    words = WORDS if kind == "texts" else 0
    labels = tuple("abcd")
    return ClientData(
        shard(12), shard(4), 4, labels, torch.ones(scale), torch.zeros(scale), vocabulary_size=words
    )


def texts(settings: Settings, client: int) -> ClientData:
    return of_labels(settings, client, "texts")


def windows(settings: Settings, client: int) -> ClientData:
    return of_labels(settings, client, "windows")


def two_rounds(directory: Path, name: str, kind: str, models: str) -> None:
    clients = max(2, models.count(",") + 1, 4 * (models == "sensor-4"))
    keys: dict[str, Any] = {"num-clients": clients, "models": models, "feature-dim": 8, **MORE.get(name, {})}
    if name in ("fml", "fedkd", "fedmrl"):
        keys[f"{name}.auxiliary"] = AUXILIARY[kind]
    run = federation(directory, name, data={"texts": texts, "windows": windows}[kind], **keys).run()
    assert [line.failures for line in run.strategy.history] == [[], []]
    assert [line.trained for line in run.strategy.history] == [[*range(clients)]] * 2


@pytest.mark.parametrize("kind", ["texts", "windows"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_on_texts_and_windows(name: str, kind: str, tmp_path: Path) -> None:
    if name != "fedcpd":
        two_rounds(tmp_path, name, kind, ONE[kind] if needs_one_architecture(name) else SEVERAL[kind])
        return
    two_rounds(tmp_path, name, kind, MAPS[kind])
    with pytest.raises(PbflError, match=f"distils feature maps, which model '{ONE[kind]}' does not have"):
        two_rounds(tmp_path / "refused", name, kind, ONE[kind])


@pytest.mark.parametrize("model", ["lstm", "transformer-2-1"])
def test_texts_on_a_card(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In evaluation torch takes another kernel of the transformer, but not of tensors that are no plain ones.
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    alike(tmp_path, "fedproto", {"models": model, "feature-dim": 8}, data=texts)
