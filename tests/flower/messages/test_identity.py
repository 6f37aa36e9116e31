"""A device that is started again under its key is not greeted again: what it said is held against what it brings."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages.identity import IDENTITY, check_identity, check_network, declared_identity
from pbfl_flwr.flower.server.agreement import UNCHANGED
from tests.flower.server.test_membership import member
from tests.flower.sites import run

NAMES = np.array(["ant", "bee", "cat"])


def images(file: Path, names: Any = NAMES, side: int = 16, samples: int = 24) -> str:
    """Write grey squares, brighter from class to class."""
    which = np.arange(samples) % len(names)
    noise = np.random.default_rng(0).integers(0, 60, (samples, side, side))
    np.savez(file, x=(noise + 60 * which[:, None, None]).astype(np.uint8), y=names[which])
    return str(file)


def table(file: Path, columns: list[str]) -> str:
    rows = [",".join([*(f"{(i + j) % 5}.0" for j in range(256)), str(NAMES[i % 3])]) for i in range(24)]
    file.write_text("\n".join([",".join([*columns, "label"]), *rows]))
    return str(file)


def test_changed_identity_or_data_fails_the_device_only(tmp_path: Path) -> None:
    columns = [f"p{i}" for i in range(256)]
    nodes: list[dict[str, Scalar]] = [
        {"client-id": name, "data-path": images(tmp_path / f"{name}.npz")} for name in "abcdefghi"
    ]
    nodes[4] |= {"data-path": table(tmp_path / "e.csv", columns), "input-shape": "1,16,16"}
    nodes[5]["client-id"] = 5
    for node in nodes:
        node["state-dir"] = str(tmp_path / "state")
    fed = run(tmp_path, nodes, models="cnn2", num_server_rounds=2, local_epochs=1)

    def changed(asked: Any, replies: Any) -> None:
        if asked[0].metadata.group_id == "1":  # round 1 is over
            nodes[0]["data-path"] = images(tmp_path / "more.npz", samples=30)  # more of the same is fine
            nodes[1]["data-path"] = images(tmp_path / "renamed.npz", np.array(["ant", "bee", "dog"]))
            nodes[2]["data-path"] = images(tmp_path / "larger.npz", side=17)
            nodes[3]["client-id"] = "z"
            nodes[4]["data-path"] = table(tmp_path / "turned.csv", columns[::-1])
            nodes[5]["client-id"] = 0
            nodes[6]["data-path"] = str(tmp_path / "gone.npz")
            nodes[7]["data-path"] = str(tmp_path / "nan.npz")
            nodes[8] |= {"model": "mlp", "state-dir": str(tmp_path / "empty")}
            np.savez(
                tmp_path / "nan.npz", x=np.full((24, 1, 16, 16), np.nan, np.float32), y=NAMES[[0, 1, 2] * 8]
            )

    fed.grid.watchers.append(changed)
    first, second = fed.run().strategy.history
    assert (first.trained, first.failures) == ([*range(9)], [])
    assert second.trained == [0]
    reasons = {failure.client: failure.reason for failure in second.failures}
    assert reasons[1].startswith(
        "the classes of its data have other names, or another order, than when it joined"
    )
    assert reasons[2].startswith(
        "its data are 3 classes of inputs 1x17x17, but were 3 classes of inputs 1x16x16"
    )
    assert reasons[3].startswith("client-id = 'z' in --node-config: in this run the node is client d;")
    assert reasons[4].startswith("the columns of its data have other names, or another order")
    assert reasons[5].startswith("client-id = 0 in --node-config: in this run the node is client 5;")
    assert reasons[8].startswith("its network is mlp with d = ")
    assert [*(tmp_path / "empty").rglob("*.safetensors")] == []
    for client, name in ((6, "gone.npz"), (7, "nan.npz")):
        assert reasons[client] == f"the data at {tmp_path / name} cannot be used; see the device's log"


OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    # what a device keeps: what it declared otherwise in the handshake, reason
    "name": ({"client": "b"}, "client-id = 'a' in --node-config: in this run the node is client b;"),
    "configured_data": (
        {"configured-data": True},
        "its data are 3 classes of inputs 2, but were its share of a common dataset with 3 classes of inputs 2 when",
    ),
    "task": ({"feature-dim": 5}, "its network is cnn4 with d = 4, but was cnn4 with d = 5 when it joined"),
    "labels": ({"labels": ["x", "y", "z"]}, "the classes of its data have other names, or another order"),
    "columns": ({"columns": "0123"}, "the columns of its data have other names, or another order"),
    "architecture": ({"architecture": "mlp"}, "its network is cnn4 with d = 4, but was mlp with d = 4 when"),
    "weights": (
        {"weights": "0123"},
        "the pretrained weights of cnn4 are others than when it joined this run;",
    ),
    "parameters": (
        {"parameters": [7, 9]},
        "its network has 100 + 10 parameters, but had 7 + 9 parameters when",
    ),
}


@pytest.mark.parametrize("key", [key for key in UNCHANGED if key != "simulated"])
def test_device_is_held_to_all_that_a_resumed_run_compares(key: str) -> None:
    change, reason = OTHERWISE[key]
    now, declared = member("a"), member(**{"client": "a", **change})
    data: Any = SimpleNamespace(label_names=now.labels, columns=())

    def check(config: ConfigRecord) -> None:
        check_identity(config, now.label, now.configured_data, data, now.task, now.architecture)
        check_network(config, now.architecture, now.parameters)

    check(ConfigRecord())
    check(ConfigRecord({IDENTITY: declared_identity(now)}))
    with pytest.raises(PbflError, match="^" + re.escape(reason)):
        check(ConfigRecord({IDENTITY: declared_identity(declared)}))
