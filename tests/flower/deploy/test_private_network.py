"""Flower's Control API of a run that this package starts: other accounts of the machine cannot reach it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pbfl_flwr.config import parse
from pbfl_flwr.flower.deploy import private_network

POSSIBLE = sys.platform == "linux" and not private_network.refusal()
NOBODY = 65534
SERVER = """
import socket
from pbfl_flwr.flower.deploy import private_network
private_network.bring_up()
private_network.bring_up()  # a command within a command
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()  # its own processes reach it
print(server.getsockname()[1], flush=True)
input()
"""


@pytest.mark.skipif(not POSSIBLE, reason="this system gives a command no network of its own")
@pytest.mark.parametrize("user", [None, NOBODY])
def test_nobody_else_reaches_the_ports_of_a_private_network(user: int | None) -> None:
    """For root, and for a user, who needs a namespace of users as well."""
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    prefix = private_network._unshare()
    if user is not None:
        prefix = ["unshare", "--user", "--map-current-user", "--keep-caps", "--net", "--"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "HOME": "/tmp"}
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        user=user,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if user is not None and "Permission denied" in (errors := process.stderr.read() if not line else ""):
            pytest.skip(f"user {user} cannot run this Python: {errors.splitlines()[-1]}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(line)), timeout=5)
        process.communicate("\n")


@pytest.mark.parametrize(
    ("keys", "need"),
    [
        ({}, ""),
        ({"sinks": "prometheus"}, "sinks = 'prometheus'"),
        ({"download": True}, "download = true"),
        ({"dataset": "flwr-datasets", "data-dir": "hf://mnist"}, "data-dir = 'hf://mnist'"),
    ],
)
def test_a_run_that_needs_other_machines_has_no_network_of_its_own(
    keys: dict[str, str | bool], need: str
) -> None:
    assert private_network.needs_network(parse(keys)) == need


def test_says_who_can_reach_a_run_that_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = private_network.refusal()
    assert reason == "the system has no command unshare"
    line = private_network.warning(reason)
    assert line.startswith("other accounts of this machine can reach Flower's Control API of this run")
    assert line.endswith("on a shared machine use --engine processes or ray, which open no such port")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!/bin/sh\nexec sleep 60", "unshare did not answer within 0.5 s"),
        ("#!/bin/sh\nexit 3", "unshare ended with exit code 3"),
    ],
)
def test_a_command_without_a_usable_unshare_has_no_network_of_its_own(
    script: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unshare = tmp_path / "unshare"
    unshare.write_text(f"{script}\n")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(private_network, "PROBE_SECONDS", 0.5)
    assert private_network.refusal() == expected
