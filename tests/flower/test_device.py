"""A node's own configuration: what a device may say, and what the server's run configuration may not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.device import choose_device, identify, own_settings
from pbfl_flwr.methods import SECTIONS

RUN = parse(
    {"num-clients": 3, "run-dir": "/server/run", "data-dir": "/server/data", "models": "cnn4,resnet4"},
    SECTIONS,
)


def context(node: dict[str, Any]) -> Context:
    return Context(run_id=7, node_id=1, node_config=node, state=RecordDict(), run_config={})


def test_in_a_simulation_the_run_configuration_speaks() -> None:
    node = {"partition-id": 2, "num-partitions": 3}
    assert own_settings(RUN, node) == RUN
    identity = identify(context(node), RUN, "e")
    assert (identity.client, identity.simulated, identity.own_data) == (2, True, False)
    assert identity.state_dir == Path("/server/run/clients/e")


def test_on_a_device_the_servers_paths_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBFL_HOME", "/device/home")
    node = {"client-id": 1}
    own = own_settings(RUN, node)
    assert own.data.data_dir == ""
    assert own.models == RUN.models
    assert identify(context(node), own, "e").state_dir == Path("/device/home/state/e")


def test_a_device_brings_its_own(tmp_path: Path) -> None:
    node: dict[str, Any] = {
        "client-id": 0,
        "data-path": str(tmp_path / "mine.npz"),
        "model": "resnet8",
        "batch-size": 4,
        "state-dir": "/var/lib/pbfl",
    }
    own = own_settings(RUN, node)
    assert (own.data.dataset, own.data.data_dir) == ("npz", str(tmp_path / "mine.npz"))
    assert (own.models.models, own.training.batch_size) == ("resnet8", 4)
    identity = identify(context(node), own, "e")
    assert identity.own_data
    assert identity.state_dir == Path("/var/lib/pbfl/e")
    assert own_settings(RUN, {"client-id": 0, "data-path": str(tmp_path)}).data.dataset == "image-folder"


def test_all_of_its_data_is_a_devices_own(tmp_path: Path) -> None:
    from pbfl_flwr.flower.client import _configured_data, _Source

    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.integers(0, 255, (20, 16, 16), dtype=np.uint8), y=np.arange(20) % 2)
    node: dict[str, Any] = {"client-id": 2, "data-path": str(tmp_path / "mine.npz")}
    own = own_settings(RUN, node)
    data = _Source(_configured_data, None).data_of(own, identify(context(node), own, "e"))
    assert len(data.train.labels) + len(data.test.labels) == 20


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"client-id": 0, "modle": "resnet8"}, "unknown key 'modle'; allowed are client-id"),
        ({"client-id": 0, "batch-size": 0}, "batch-size = 0: allowed is"),
        ({"client-id": 0, "data-path": "relative"}, "data-dir = 'relative': allowed is an absolute path"),
    ],
)
def test_what_a_node_may_not_say(node: dict[str, Any], said: str) -> None:
    with pytest.raises(PbflError, match=said):
        own_settings(RUN, node)


@pytest.mark.parametrize("number", ["site-a", -1, True, None])
def test_a_client_id_is_a_whole_number(number: Any) -> None:
    with pytest.raises(PbflError, match=r"client-id = .* allowed is a whole number from 0"):
        identify(context({"client-id": number}), RUN, "e")


def test_the_server_cannot_make_a_device_import_code() -> None:
    run = parse({"models": "os:getcwd"}, SECTIONS)
    with pytest.raises(PbflError, match="names code to import"):
        own_settings(run, {"client-id": 0})
    assert own_settings(run, {"client-id": 0, "model": "cnn4"}).models.models == "cnn4"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a card that must not be there")
def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PbflError, match="this client sees no CUDA device"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")
