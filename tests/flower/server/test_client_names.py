"""Devices with names: numbers, seeds, state and books, in a federation of real messages."""

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.show import failure_lines
from pbfl_flwr.runs.tensor_files import load_tensors
from tests.flower.inprocess import federation, flower_error, plain, shown, tiny_data
from tests.flower.sites import run, sites, write_site


def test_refused_device_is_named_by_its_id_or_its_node(tmp_path: Path) -> None:
    a, b, c = sites(tmp_path, "a", "b", "c")
    b["client-id"] = 1.5
    with pytest.raises(
        PbflError, match=r"^1 of 3 clients: client-id = 1\.5 in --node-config: must be a whole"
    ):
        run(tmp_path, [a, b, c]).run()
    del b["client-id"]
    refused = r"^1 of 3 clients: client-id is missing in --node-config; .* \(on node 70000000\d\d\)$"
    with pytest.raises(PbflError, match=refused):
        run(tmp_path, [a, b, c]).run()


def test_records_and_tables_hold_names(tmp_path: Path) -> None:
    fed = run(
        tmp_path,
        sites(tmp_path, "zoe", "Ada", "bob.3"),
        num_server_rounds=2,
        faults={(0, 2): flower_error("x")},
    )
    fed.run()
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert {m["name"]: m["client"] for m in about["clients"]} == {"Ada": 0, "bob.3": 1, "zoe": 2}
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert lines[1]["failures"] == [{"client": 2, "name": "zoe", "reason": "x"}]
    assert list(failure_lines(fed.directory.round_records())) == ["client zoe failed in round 2: x"]
    output = shown(tmp_path / "run")
    rows = [line.split() for line in output.splitlines() if line.split()[2:3] == ["cnn4"]]
    assert [row[:2] + row[4:5] for row in rows] == [
        ["0", "Ada", "18"],
        ["1", "bob.3", "18"],
        ["2", "zoe", "18"],
    ]
    columns = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert columns[0]["client"] == [0, 1, 2]
    assert (columns[1]["client"], columns[1]["participations"]) == ([0, 1], [2, 2])
    assert sorted(path.name for path in (tmp_path / "state").rglob("*.safetensors")) == [
        "named-Ada.safetensors",
        "named-bob.3.safetensors",
        "named-zoe.safetensors",
    ]


def test_name_needs_own_data(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b")
    del nodes[1]["data-path"]
    with pytest.raises(
        PbflError, match=r"client-id = 'b': a name is for devices that bring their own data; .* data-path"
    ):
        run(tmp_path, nodes).run()
    fed = federation(
        tmp_path, data=tiny_data, node_configs=nodes, partitions=[0, 1], num_clients=2, models="cnn4"
    )
    with pytest.raises(
        PbflError, match=r"client-id = 'a': the data function of this app is called with a number"
    ):
        fed.run()


def state_of(tmp_path: Path, name: str, folder: str = "state") -> Mapping[str, torch.Tensor]:
    (file,) = (tmp_path / folder).rglob(f"named-{name}.safetensors")
    return load_tensors(file)[0]


def test_random_draws_depend_on_the_name_alone(tmp_path: Path) -> None:
    """The same data under one name, as number 0 and as number 1, and under another name."""
    results = []
    for place, names in (("one", ("bob", "zoe")), ("two", ("Ada", "bob")), ("three", ("eve", "zoe"))):
        nodes = sites(tmp_path / place, *names)
        for node in nodes:
            if node["client-id"] in ("bob", "eve"):
                node["data-path"] = str(write_site(tmp_path / place / "same", 5))
        run(tmp_path / place, nodes, num_server_rounds=1).run()
        results.append(state_of(tmp_path / place, "eve" if place == "three" else "bob"))
    one, two, three = ({k: v for k, v in r.items() if k.startswith("model.")} for r in results)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], three[name]) for name in one)


def test_resumed_run_continues_without_missing_clients(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "c", "d")
    run(tmp_path, nodes, num_server_rounds=1).run()
    came = [nodes[0], *sites(tmp_path, "b"), nodes[2]]
    fed = run(tmp_path, came, num_server_rounds=2, num_clients=3, resume=True, join_timeout=1.0)
    stranger = [*fed.grid.get_node_ids()][1]
    line = fed.run().strategy.history[1]
    assert line.trained == [0, 2]
    assert plain(line.failures) == [{"client": 1, "name": "c", "reason": "its node is not connected"}]
    assert f"a new node is not used: client-id b on node {stranger} is not part of this run" in line.warnings
    back = run(tmp_path, nodes, num_server_rounds=3, resume=True).run().strategy.history
    assert back[2].trained == [0, 1, 2]


def test_unknown_node_does_not_shorten_the_waiting(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "c", "d")
    run(tmp_path, nodes, num_server_rounds=1).run()
    came = [nodes[0], *sites(tmp_path, "b"), nodes[2], nodes[1]]
    fed = run(tmp_path, came, num_server_rounds=2, num_clients=3, resume=True)
    online, poll = fed.grid.nodes, count()
    fed.grid.online = lambda: online if next(poll) > 1 else online[:3]
    line = fed.run().strategy.history[1]
    assert (line.trained, line.failures) == ([0, 1, 2], [])
    assert f"a new node is not used: client-id b on node {online[1]} is not part of this run" in line.warnings


@pytest.mark.parametrize("keys", [{"min_replies": 3}, {"failure_policy": "stop"}])
def test_run_that_needs_all_clients_does_not_resume_without_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    nodes = sites(tmp_path, "a", "c", "d")
    run(tmp_path, nodes, num_server_rounds=1, **keys).run()
    came = [nodes[0], *sites(tmp_path, "b"), nodes[2]]
    with pytest.raises(
        PbflError, match=r"at least 3 of its 3 clients; missing: c; other clients connected: b$"
    ):
        run(tmp_path, came, num_server_rounds=2, num_clients=3, resume=True, join_timeout=1.0, **keys).run()


def test_run_of_devices_resumes_only_with_the_same_devices(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "c")
    run(tmp_path, nodes, num_server_rounds=1).run()
    again: dict[str, Any] = {
        "num_server_rounds": 2,
        "resume": True,
        "models": "cnn4",
        "num_clients": 2,
        "join_timeout": 1.0,
    }
    virtual = federation(tmp_path, data=None, on_disk=True, **again)
    with pytest.raises(
        PbflError, match=r"at least 1 of its 2 clients; missing: a, c; other clients connected: 0, 1$"
    ):
        virtual.run()
    with pytest.raises(PbflError, match=r"missing: a, c; other clients connected: 0, 1$"):
        run(tmp_path, sites(tmp_path, 0, 1), **again).run()
    other = [nodes[0], {**nodes[1], "model": "cnn2"}]
    with pytest.raises(PbflError, match=r"client c: .* has architecture = cnn2, it had cnn4"):
        run(tmp_path, other, failure_policy="stop", **again).run()
    assert run(tmp_path, nodes, **again).run().strategy.done == 2
