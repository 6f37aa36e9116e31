"""What SuperLink and SuperNodes are started with. No processes."""

import re
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.config.toml import toml
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.execute.deployment import plan
from pbfl_flwr.flower.deploy import local_federation as deployment
from pbfl_flwr.flower.deploy.certificates import readable_by_others
from pbfl_flwr.flower.deploy.superlink import connection
from pbfl_flwr.methods import SECTIONS


@pytest.mark.parametrize(
    "text",
    [
        "client-id=0 model='resnet8' data-path='/data/a b.npz'",
        'batch-size=8  device="cpu"',
        "  a=true b=0.5 c='x=y' ",
        "",
    ],
)
def test_node_config_is_parsed_like_flower(text: str) -> None:
    assert deployment.node_config(text) == parse_config_args([text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=resnet8", "model=resnet8: every key must"),
        ("client-id = 0", "at 'client-id = 0'"),
        ("client-id=0 and more", "at 'and more'"),
        ("batch-size=[1]", "one number"),
        ("data-path='/a b", "data-path='/a"),
        ("model='cnn4' model='cnn2'", "given once"),
    ],
)
def test_rejects_node_config_that_flower_would_ignore(text: str, message: str) -> None:
    with pytest.raises(PbflError, match="node configuration") as error:
        deployment.node_config(text)
    assert message in str(error.value)


def test_node_config_survives_its_toml_file(tmp_path: Path) -> None:
    node: dict[str, Scalar] = {"client-id": 1, "data-path": "/dä ta/'a'\"b\"\n\x7f.npz", "batch-size": 8}
    (tmp_path / "node.toml").write_text(toml(node), encoding="utf-8")
    assert parse_config_args([str(tmp_path / "node.toml")]) == node


def test_nodes_get_ids_directories_and_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("names.txt").touch()
    result = deployment.complete(
        [
            {"data-path": "a.npz", "labels": "a,b"},
            {"client-id": 5, "state-dir": "s", "labels": "names.txt"},
        ],
        3,
        tmp_path / "run",
    )
    assert result == [
        {
            "client-id": 0,
            "state-dir": str(tmp_path / "run" / "node-0"),
            "data-path": str(tmp_path / "a.npz"),
            "labels": "a,b",
        },
        {"client-id": 5, "state-dir": str(tmp_path / "s"), "labels": str(tmp_path / "names.txt")},
        {"client-id": 2, "state-dir": str(tmp_path / "run" / "node-2")},
    ]
    with pytest.raises(PbflError, match="given 2 times"):
        deployment.complete([{}, {}], 1, tmp_path)


def test_state_directories_follow_state_dir(tmp_path: Path) -> None:
    """Export looks for them there."""
    planned = plan(None, [f"state-dir={tmp_path / 'states'}"], [], 2, tmp_path / "run")
    assert [node["state-dir"] for node in planned.nodes] == [
        str(tmp_path / "states" / f"node-{n}") for n in (0, 1)
    ]
    default = plan(None, [], [], 1, tmp_path / "run")
    assert default.nodes[0]["state-dir"] == str(tmp_path / "run" / "clients" / "node-0")


def test_devices_may_have_a_gpu_of_their_own(tmp_path: Path) -> None:
    """Nobody here can say that they have none: shares of this machine's are for simulations."""
    assert plan(None, ["device=cuda"], [], 2, tmp_path / "run").settings.training.device == "cuda"


def test_invalid_nodes_are_refused_before_they_start(tmp_path: Path) -> None:
    settings = parse({"num-clients": 2}, SECTIONS)
    with pytest.raises(PbflError, match="--node 1: --node-config: unknown key 'modle'"):
        deployment.check(settings, deployment.complete([{}, {"modle": "cnn4"}], 2, tmp_path))
    with pytest.raises(PbflError, match="--node 0 and --node 1: both are client-id 1"):
        deployment.check(settings, deployment.complete([{"client-id": 1}], 2, tmp_path))
    for refused, text in (
        ({"client-id": 1.5}, "client-id = 1.5 in --node-config: must be a whole number"),
        ({"client-id": "a b"}, "client-id = 'a b' in --node-config: must be a whole number"),
        ({"data-client": "x"}, "data-client = 'x' in --node-config: must be a whole number"),
        ({"state-dir": "/s\udcfc"}, "state-dir = '/s\\udcfc': must be text in UTF-8"),
    ):
        with pytest.raises(PbflError, match=re.escape(f"--node 0: {text}")):
            deployment.check(settings, deployment.complete([refused], 2, tmp_path))
    first, _ = deployment.check(settings, deployment.complete([{"model": "cnn4"}], 2, tmp_path))
    assert first.models.models == "cnn4"


def test_command_lines(tmp_path: Path) -> None:
    secure = deployment.superlink_options("0.0.0.0:9092", tmp_path)
    for option, file in (("ca-certfile", "ca.pem"), ("certfile", "server.pem"), ("keyfile", "server.key")):
        assert secure[secure.index(f"--ssl-{option}") + 1] == str(tmp_path / file)
    assert secure[-3:] == ["--enable-supernode-auth", "--fleet-api-address", "0.0.0.0:9092"]
    assert deployment.superlink_options("x:1", None) == ["--insecure", "--fleet-api-address", "x:1"]
    node, ca, key = tmp_path / "node.toml", tmp_path / "ca.pem", tmp_path / "a"
    words = " ".join(deployment.supernode_options("x:1", 9094, node, ca, key))
    assert words.startswith(f"--root-certificates {ca} --auth-supernode-private-key {key} ")
    assert words.endswith(f"--superlink x:1 --port 9094 --node-config {node}")
    assert deployment.supernode_options("x:1", 9094, node, None, None)[0] == "--insecure"
    own = tomllib.loads(connection("own", "x:1", ca))["superlink"]
    assert own == {"default": "own", "own": {"address": "x:1", "root-certificates": str(ca)}}
    assert tomllib.loads(connection("own", "x:1", None))["superlink"]["own"]["insecure"] is True


def test_keys_of_a_federation_stay_in_its_run_directory(tmp_path: Path) -> None:
    """A resumed run knows its clients by them; a pair whose writing was interrupted is made anew."""
    contents: list[list[bytes]] = []
    for _ in range(2):
        federation = deployment.Deployment(tmp_path / "run", [{"client-id": n} for n in range(2)])
        federation._scratch = tmp_path / f"scratch-{len(contents)}"
        federation._prepare()
        keys = [key for n in range(2) if (key := federation.key(n))]
        contents.append([key.read_bytes() for key in keys])
        assert not any(readable_by_others(path) for path in [*keys, tmp_path / "run" / "keys"])
        (tmp_path / "run" / "keys" / "node-1.pub").unlink()
    assert contents[0][0] == contents[1][0]
    assert contents[0][1] != contents[1][1]
