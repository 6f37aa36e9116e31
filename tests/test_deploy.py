"""Real deployments on the loopback interface: SuperLink and SuperNodes as processes, over gRPC, with TLS and keys."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings, Scalar, parse
from pbfl_flwr.data import load_pool
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy.doctor import CheckTargets, check_connection
from pbfl_flwr.flower.deploy.findings import Status
from pbfl_flwr.flower.deploy.inventory import Inventory, register
from pbfl_flwr.flower.deploy.local_federation import Deployment, complete
from pbfl_flwr.flower.deploy.superlink import ENDED
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import NOT_CONNECTED, RoundRecord
from pbfl_flwr.runs.tensor_files import load_tensors
from tests.flower.inprocess import Fault, InProcessGrid, lost, same_tensors, silent
from tests.real_runs import MARK, ROOT, left_behind, rounds_of, sets, start, wait

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

MODELS = ("cnn2", "resnet4", "cnn4")
CONFIG: dict[str, Scalar] = {
    "feature-dim": 32,
    "threads": 1,
    "batch-size": 16,
    "local-epochs": 2,
    "momentum": 0.5,
    "optimizer-state": "kept",
    "learning-rate": 0.1,
    "join-timeout": 600.0,
}
RESTART_SECONDS = 15.0  # RestartSec of the unit in docs/deploy


class Federation:
    """Devices with their own images and models, and what a run of theirs must come to.

    Args:
        place: directory for their data, states and runs.
        count: number of devices, up to three.
        rounds: T.
    """

    def __init__(self, place: Path, count: int, rounds: int, **keys: Scalar) -> None:
        self.place, self.count, self.rounds = place, count, rounds
        self.run_dir = place / "run"
        self.config = {**CONFIG, "num-clients": count, "num-server-rounds": rounds, **keys}
        self._data = [self._images(index) for index in range(count)]
        self.nodes = self._nodes(self.run_dir / "clients")

    def _images(self, index: int) -> Path:
        """Write a device's training and test images: 12 of each digit, of three that it hardly knows only 4."""
        pool = load_pool(DataSettings(dataset="digits"))
        few = {3 * index, 3 * index + 1, 3 * index + 2}
        rows = [
            np.flatnonzero(pool.labels == j)[40 * index : 40 * index + (4 if j in few else 12)]
            for j in range(10)
        ]
        chosen = np.concatenate(rows)
        file = self.place / f"device-{index}.npz"
        np.savez(file, x=pool.inputs[chosen], y=pool.labels[chosen])
        return file

    def _nodes(self, states: Path) -> list[dict[str, Scalar]]:
        own = [
            {"model": model, "data-path": str(file)} for model, file in zip(MODELS, self._data, strict=False)
        ]
        return complete(own, self.count, states)

    def in_process(self, faults: dict[tuple[int, int], Fault] | None = None) -> MethodStrategy:
        """The same federation without the network, after its last round."""
        nodes = self._nodes(self.place / "again")
        grid = InProcessGrid(make_client_app(), self.config, self.count, node_configs=nodes, faults=faults)
        strategy = MethodStrategy(parse(self.config, SECTIONS))
        strategy.start(grid)
        return strategy

    def state_of(self, client: int) -> tuple[int, int]:
        """Return (round, participations) of a client's file; (0, 0) if there is none."""
        states = self.run_dir / "clients" / f"node-{client}"
        files = list(states.rglob(f"client-{client:05d}.safetensors"))
        if not files:
            return 0, 0
        about = load_tensors(files[0])[1]
        return int(about["round"]), int(about["participations"])


def finish(deployment: Deployment, run_id: str) -> None:
    while (status := deployment.outcome(run_id)[0]) not in ENDED:
        while not deployment.ended():
            time.sleep(0.5)
    assert status == "finished:completed", deployment.tail()


def results(rounds: Sequence[RoundRecord], disconnected: Collection[int] = ()) -> list[tuple[object, ...]]:
    """What must not depend on the way in which messages travel; of the bytes, those that are ours.

    In rounds with a disconnected client fewer messages are sent than without a network, where it is only silent.
    """
    return [
        (
            *(record.round, record.trained, record.accuracy, record.test_loss, record.client_metrics),
            *(record.to_json().get("ages"), record.scalars.up, record.bytes_up.payload),
            record.bytes_up.application,
            None
            if record.round in disconnected
            else (record.scalars.down, record.bytes_down.payload, record.bytes_down.application),
        )
        for record in rounds
    ]


def refuses_strangers(deployment: Deployment, place: Path) -> None:
    """Neither a SuperNode with an unknown key is admitted, nor does one join a SuperLink of a foreign CA."""
    security.make_keys(place, ["stranger"])
    security.make_keys(place / "keys", ["visitor"])
    lines = register(place / "keys", place / "inventory.json", deployment._flwr)
    assert lines[0] == "1 keys registered"
    (device,) = Inventory.read(place / "inventory.json").devices
    assert (device.name, device.status) == ("visitor", "registered")
    security.make_certificates(place / "elsewhere", ["127.0.0.1"], 30)
    foreign = place / "elsewhere" / "ca.pem"
    ca, known = deployment.ca, deployment.key(0)
    # The doctor reports beforehand what a SuperNode would meet.
    findings = check_connection(CheckTargets(deployment.fleet_address, ca, place / "keys" / "visitor"))
    assert [finding.what for finding in findings if finding.status is Status.FAILED] == []
    assert [finding.what for finding in findings if finding.status is Status.OK] == [
        "key",
        "superlink",
        "supernode",
    ]
    findings = check_connection(CheckTargets(deployment.fleet_address, foreign, place / "keys" / "visitor"))
    (failed,) = [finding for finding in findings if finding.status is Status.FAILED]
    assert failed.what == "supernode"
    assert "unable to get local issuer certificate" in failed.message
    refused = {
        "[code: 2004]": deployment.start_node(90, {"client-id": 3}, place / "stranger", ca),
        "unable to get local issuer certificate": deployment.start_node(91, {"client-id": 4}, known, foreign),
    }
    for index, (text, process) in enumerate(refused.items(), start=90):
        assert process.wait(300) == 1
        assert text in deployment.log_of(index).read_text()


class Unnamed(Deployment):
    """One whose operator registers keys without names."""

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        return super()._flwr(*(word for word in arguments if not word.startswith("--name=")))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process with all that it started, as a power cut would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def server_process(superexec: subprocess.Popen[bytes] | None) -> int:
    """Return the process id of the ServerApp, which the SuperExec has started."""
    assert superexec is not None
    for result in Path("/proc").glob("[0-9]*"):
        try:
            words = (result / "cmdline").read_bytes().split(b"\0")
            if os.getpgid(int(result.name)) == superexec.pid and any(
                w.endswith(b"flwr-serverapp") for w in words
            ):
                return int(result.name)
        except OSError:
            continue  # it ended meanwhile
    raise AssertionError("there is no ServerApp")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MARK, str(tmp_path / "run"))
    return tmp_path


@pytest.mark.parametrize("new_key", [True, pytest.param(False, marks=pytest.mark.long)])
def test_killed_devices_give_the_results_of_one_process_and_strangers_are_refused(
    place: Path, new_key: bool
) -> None:
    """A SuperNode killed in round 2 returns with its state, then the ServerApp is killed and the run resumed.

    It returns with its key, while one with another key declares its client-id; or, if its first key has no registered
    name, with another key.
    """
    rounds = 4 if new_key else 8  # Flower refuses a known key until it has noticed the death, a minute later
    # A node that is back before the grid is asked again is not reported: then the deadline ends the round.
    federation = Federation(place, 2, rounds, **{"round-timeout": 180.0})
    run_dir, nodes = federation.run_dir, federation.nodes
    config = {**federation.config, "run-dir": str(run_dir)}
    with (Unnamed if new_key else Deployment)(run_dir, nodes) as deployment:
        refuses_strangers(deployment, place)
        first = deployment.submit(ROOT, config)
        # Not before it has taken the question: one that nobody has taken waits for the next SuperNode with this key.
        wait(lambda: "ROUND 2]" in deployment.log_of(1).read_text(), "the question of round 2")
        kill_group(deployment._supernodes.pop(1))
        before = federation.state_of(1)
        assert before in ((1, 1), (2, 2)), "a state file is of a finished round or of the one before"
        security.make_keys(place, ["another"])
        another = place / "another"
        deployment._flwr("supernode", "register", f"{another}.pub", "--name=another", "--format", "json")
        key = another if new_key else deployment.key(1)
        if not new_key:
            thief = {**nodes[1], "state-dir": str(place / "stolen")}
            deployment.start_node(92, thief, another, deployment.ca)
        again, started = deployment.start_node(1, nodes[1], key, deployment.ca), time.monotonic()

        def returned() -> bool:
            """Whether it has trained again; meanwhile a refused one is started again, as systemd does."""
            nonlocal again, started
            if again.poll() is not None and time.monotonic() > started + RESTART_SECONDS:
                again, started = deployment.start_node(1, nodes[1], key, deployment.ca), time.monotonic()
            return any(1 in line["trained"] for line in rounds_of(run_dir)[1:])

        wait(returned, "a round with the killed client", 900)
        back = next(line["round"] for line in rounds_of(run_dir)[1:] if 1 in line["trained"])
        # As soon as a client is ahead of the server.
        wait(lambda: any(federation.state_of(client)[0] > back for client in (0, 1)), "the next round")
        os.kill(server_process(deployment._superexec), signal.SIGKILL)
        assert len(rounds_of(run_dir)) < rounds
        deployment.stop(first)
        finish(deployment, deployment.submit(ROOT, {**config, "resume": True}))
    assert left_behind(run_dir) == []

    told = [note for line in rounds_of(run_dir) for note in line["warnings"] if "another key" in note]
    assert told, "of the other key"
    assert all(
        note.startswith("client 1 came back" if new_key else "a new node is not used") for note in told
    )
    about = json.loads((run_dir / "run.json").read_text())
    clients = [(client["architecture"], client["simulated"]) for client in about["clients"]]
    assert clients == [("cnn2", False), ("resnet4", False)]
    absent = [line["round"] for line in rounds_of(run_dir) if 1 not in line["trained"]]
    assert absent == list(range(2, back)), "it missed the round in which it was killed, and came back"
    for line in rounds_of(run_dir):
        assert [failure["client"] for failure in line["failures"]] == [1] * (line["round"] in absent)
        assert not any("\n" in failure["reason"] for failure in line["failures"])
    # Bit for bit as if the answers of those rounds had simply not come: model, momentum and generator are its own.
    faults: dict[tuple[int, int], Fault] = {(1, number): silent for number in absent}
    if trained := before == (2, 2):
        faults[1, 2] = lost  # it had trained and written when it was killed
    expected = federation.in_process(faults)
    tensors, _ = load_tensors(run_dir / "checkpoint.safetensors")
    assert same_tensors(tensors, expected.state.to_tensors())
    records = RunDirectory(run_dir).round_records()
    disconnected = [r.round for r in records if any(f.reason == NOT_CONNECTED for f in r.failures)]
    assert 2 not in disconnected, "its message was sent"
    assert results(records, disconnected) == results(expected.history, disconnected)
    participations = [rounds, rounds - len(absent) + trained]
    assert [federation.state_of(client) for client in (0, 1)] == [(rounds, count) for count in participations]


@pytest.mark.long
def test_run_of_a_killed_superlink_resumes(place: Path) -> None:
    """Its SuperNodes end, and are started again by whoever watches them."""
    federation = Federation(place, 2, 3)
    run_dir, config = federation.run_dir, {**federation.config, "run-dir": str(federation.run_dir)}
    with Deployment(run_dir, federation.nodes, secure=False) as deployment:
        deployment.submit(ROOT, config)
        wait(lambda: federation.state_of(1)[0] >= 2, "a client's round 2")  # ahead of the server
        assert deployment._superlink is not None
        kill_group(deployment._superlink)
        assert 1 <= len(rounds_of(run_dir)) < 3
    with Deployment(run_dir, federation.nodes, secure=False) as deployment:
        finish(deployment, deployment.submit(ROOT, {**config, "resume": True}))
    assert left_behind(run_dir) == []
    assert [federation.state_of(client) for client in (0, 1)] == [(3, 3)] * 2, "nobody trained a round twice"
    expected = federation.in_process()
    tensors, _ = load_tensors(run_dir / "checkpoint.safetensors")
    assert same_tensors(tensors, expected.state.to_tensors())
    assert results(RunDirectory(run_dir).round_records()) == results(expected.history)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_ended_command_leaves_no_process_and_resumes(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    words = sets("models=cnn2", "feature-dim=16", "partition=iid", "num-server-rounds=1000")
    process = start(run_dir, "deploy", "local", "--run-dir", run_dir, "-n", "1", *words)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("round "):
            break
    assert "(TLS, SuperNode authentication" in "".join(lines)
    assert "), 1 SuperNodes" in "".join(lines)
    assert "round    1/1000  accuracy" in lines[-1], lines
    assert len(left_behind(run_dir)) > 4  # the command, SuperLink, SuperExec, SuperNode, ServerApp, ...
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    if number is signal.SIGKILL:
        assert left_behind(run_dir, 120) == []
    else:
        assert process.returncode == 130, output
        assert f"resume with: pbfl deploy local --resume {run_dir}" in output
        assert left_behind(run_dir) == []
    if number is signal.SIGINT:
        rounds = len(rounds_of(run_dir)) + 1
        words = ["--resume", str(run_dir), *sets(f"num-server-rounds={rounds}")]
        process = start(run_dir, "deploy", "local", *words)
        output, _ = process.communicate(timeout=800)
        assert process.returncode == 0, output
        assert f"round {rounds}/{rounds}  accuracy" in output
        assert "best (on test data)" in output
        assert left_behind(run_dir) == []


def test_command_fails_if_a_device_fails(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    node = f"state-dir='{tmp_path / 'a-file'}'"  # only the SuperNode finds out
    words = sets("models=cnn2", "feature-dim=16", "partition=iid")
    run_dir = tmp_path / "run"
    process = start(run_dir, "deploy", "local", "--run-dir", run_dir, "--node", node, "--insecure", *words)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 1, output
    assert "the run failed: round 1: 0 valid replies, min-replies is 1" in output
    assert "a-file" in output
    assert left_behind(run_dir) == []
