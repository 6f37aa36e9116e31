"""SIGKILL over gRPC: a SuperNode in mid-round, the server, the SuperLink; a damaged file. Nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.deploy.local_federation import Deployment, complete
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.client_store import load_tensors
from tests.flower.inprocess import Fault, InProcessGrid, lost, same_tensors, silent
from tests.test_deploy import ROOT, devices, finish
from tests.test_engine import MARK, left_behind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

CONFIG: dict[str, Scalar] = {
    "num-clients": 3,
    "num-server-rounds": 4,
    "feature-dim": 32,
    "threads": 1,
    "batch-size": 16,
    "local-epochs": 2,
    "momentum": 0.5,
    "optimizer-state": "kept",
    "join-timeout": 600.0,
}
DEADLINE = 180.0
RESTART_SECONDS = 15.0  # RestartSec of the unit in docs/deploy.md


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MARK, str(tmp_path / "run"))
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    return tmp_path


def reference(
    place: Path, brought: list[dict[str, Scalar]], faults: dict[tuple[int, int], Fault], rounds: int
) -> MethodStrategy:
    """The same federation without network and without a killer, in which the same answers did not come."""
    config = {**CONFIG, "num-server-rounds": rounds}
    nodes = complete(brought, 3, place / "clients")
    grid = InProcessGrid(make_client_app(), config, 3, node_configs=nodes, faults=faults)
    strategy = MethodStrategy(parse(config, SECTIONS))
    strategy.start(grid)
    return strategy


def rounds_of(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def state_of(run_dir: Path, client: int) -> tuple[int, int]:
    """Return (round, participations) of a client's file; (0, 0) if there is none."""
    files = list((run_dir / "clients" / f"node-{client}").rglob(f"client-{client:05d}.safetensors"))
    if not files:
        return 0, 0
    about = load_tensors(files[0])[1]
    return int(about["round"]), int(about["participations"])


def wait(condition: Callable[[], Any], what: str, seconds: float = 400.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.2)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process with all that it started, as a power cut would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def server_process(superexec: subprocess.Popen[bytes]) -> int | None:
    """Return the process id of the ServerApp, which the SuperExec has started."""
    for result in Path("/proc").glob("[0-9]*"):
        try:
            words = (result / "cmdline").read_bytes().split(b"\0")
            if os.getpgid(int(result.name)) == superexec.pid and any(
                w.endswith(b"flwr-serverapp") for w in words
            ):
                return int(result.name)
        except OSError:
            continue  # it ended meanwhile
    return None


def same_results(run_dir: Path, expected: MethodStrategy) -> None:
    """Whether prototypes, accuracies, losses and participations have the same bits."""
    tensors, _ = load_tensors(run_dir / "checkpoint.safetensors")
    assert same_tensors(tensors, expected.state.to_tensors())
    for line, twin in zip(rounds_of(run_dir), expected.history, strict=True):
        for key in ("round", "trained", "accuracy", "test_loss", "client_metrics", "ages"):
            assert line[key] == twin.to_json().get(key), (line["round"], key)


@pytest.mark.parametrize(
    "secure",
    [
        pytest.param(False, id="another-node-id"),
        pytest.param(True, id="registered-key", marks=pytest.mark.long),
    ],
)
def test_killed_supernode_returns_with_its_state(place: Path, secure: bool) -> None:
    """Killed in round 2 and started again; then the file of another client is damaged."""
    rounds = 8 if secure else 4  # Flower refuses a known key until it has noticed the death, a minute later
    run_dir, brought = place / "run", devices(place)
    nodes = complete(brought, 3, run_dir / "clients")
    with Deployment(run_dir, nodes, secure=secure) as deployment:
        # A node that is back before the grid is asked again is not reported: then the deadline ends the round.
        config = {**CONFIG, "num-server-rounds": rounds, "run-dir": str(run_dir), "round-timeout": DEADLINE}
        run_id = deployment.submit(ROOT, config)
        wait(lambda: len(rounds_of(run_dir)) >= 1, "round 1")
        # Not before it has taken the question: one that nobody has taken waits for the next SuperNode with this key.
        wait(lambda: "ROUND 2]" in deployment.log_of(2).read_text(), "the question of round 2")
        kill_group(deployment._supernodes.pop(2))
        before = state_of(run_dir, 2)
        assert before in ((1, 1), (2, 2)), "a state file is of a finished round or of the one before"

        def start() -> subprocess.Popen[bytes]:
            return deployment.start_node(2, nodes[2], deployment.key(2), deployment.ca)

        again, tried = start(), time.monotonic()

        def back() -> bool:
            """What systemd does: a node with a key is refused until Flower has noticed its death."""
            nonlocal again, tried
            if again.poll() is not None and time.monotonic() > tried + RESTART_SECONDS:
                again, tried = start(), time.monotonic()
            return any(2 in line["trained"] for line in rounds_of(run_dir)[1:])

        wait(back, "a round with the killed client", 900)
        returned = next(line["round"] for line in rounds_of(run_dir)[1:] if 2 in line["trained"])
        assert state_of(run_dir, 2)[1] >= before[1] + 1, "its participation count goes on"
        damaged = next((run_dir / "clients" / "node-0").rglob("client-00000.safetensors"))
        damaged.write_bytes(half := damaged.read_bytes()[: damaged.stat().st_size // 2])
        assert finish(deployment, run_id) == "finished:completed", deployment.tail()
    assert left_behind(run_dir) == []

    lines = rounds_of(run_dir)
    absent = [line["round"] for line in lines if 2 not in line["trained"]]
    assert returned > 2
    assert absent == list(range(2, returned)), "it missed the round in which it was killed, and came back"
    for line in lines[1 : returned - 1]:
        assert [failure["client"] for failure in line["failures"]] == [2]
        assert "\n" not in line["failures"][0]["reason"]
    last = lines[-1]
    (failure,) = last["failures"]
    assert failure["client"] == 0
    assert f"state file {damaged} cannot be read" in failure["reason"]
    assert "move it away to start afresh" in failure["reason"]
    assert last["trained"] == [1, 2]
    assert damaged.read_bytes() == half, "a damaged file is not overwritten"
    # Bit for bit as if the answers of those rounds had simply not come: model, momentum and generator are its own.
    faults: dict[tuple[int, int], Fault] = {(2, number): silent for number in absent}
    if before == (2, 2):
        faults[2, 2] = lost  # it had trained and written when it was killed
    first = next(line["round"] for line in lines if 0 not in line["trained"])
    faults |= {(0, number): silent for number in range(first, rounds + 1)}
    same_results(run_dir, reference(place / "again", brought, faults, rounds))


@pytest.mark.parametrize("victim", ["serverapp", pytest.param("superlink", marks=pytest.mark.long)])
def test_killed_server_resumes(place: Path, victim: str) -> None:
    run_dir, brought = place / "run", devices(place)
    nodes = complete(brought, 3, run_dir / "clients")
    config = {**CONFIG, "num-server-rounds": 3, "run-dir": str(run_dir)}
    with Deployment(run_dir, nodes, secure=False) as deployment:
        first = deployment.submit(ROOT, config)
        wait(lambda: len(rounds_of(run_dir)) >= 1, "round 1")
        wait(lambda: state_of(run_dir, 1)[0] >= 2, "a client's round 2")  # ahead of the server
        if victim == "serverapp":
            assert deployment._superexec is not None
            process = server_process(deployment._superexec)
            assert process is not None
            os.kill(process, signal.SIGKILL)
            done = len(rounds_of(run_dir))
            deployment.stop(first)
            second = deployment.submit(ROOT, {**config, "resume": True})
            assert finish(deployment, second) == "finished:completed", deployment.tail()
        else:
            assert deployment._superlink is not None
            kill_group(deployment._superlink)
            done = len(rounds_of(run_dir))
    if victim == "superlink":  # its SuperNodes end, and are started again by whoever watches them
        with Deployment(run_dir, nodes, secure=False) as deployment:
            second = deployment.submit(ROOT, {**config, "resume": True})
            assert finish(deployment, second) == "finished:completed", deployment.tail()
    assert left_behind(run_dir) == []
    assert 1 <= done < 3
    assert [state_of(run_dir, client) for client in range(3)] == [(3, 3)] * 3, "nobody trained a round twice"
    same_results(run_dir, reference(place / "again", brought, {}, 3))
