"""Real deployments on the loopback interface: SuperLink and SuperNodes as processes, over gRPC, with TLS and keys."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from pbfl_flwr.config import DataSettings, Scalar, parse
from pbfl_flwr.data import load_pool
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy.doctor import CheckTargets, Status, check_connection
from pbfl_flwr.flower.deploy.local_federation import Deployment, complete, why_ended
from pbfl_flwr.flower.deploy.superlink import ENDED
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.prototypes import secure_sums as sums
from pbfl_flwr.runs.client_store import load_tensors
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import RoundRecord
from tests.flower.inprocess import InProcessGrid
from tests.test_engine import MARK, left_behind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
MODELS = ("cnn2", "cnn4", "resnet4")
CONFIG: dict[str, Scalar] = {
    "num-clients": 3,
    "num-server-rounds": 2,
    "feature-dim": 32,
    "threads": 1,
    "batch-size": 16,
    "local-epochs": 4,
    "learning-rate": 0.1,
    "join-timeout": 600.0,
}


def devices(directory: Path) -> list[dict[str, Scalar]]:
    """Write three devices' own images, each lacking other digits, and return what their operators say."""
    pool = load_pool(DataSettings(dataset="digits"))
    result: list[dict[str, Scalar]] = []
    for index, model in enumerate(MODELS):
        # Every device tests all ten digits: 12 of each, of three that it hardly knows only 4.
        few = {3 * index, 3 * index + 1, 3 * index + 2}
        rows = [
            np.flatnonzero(pool.labels == j)[40 * index : 40 * index + (4 if j in few else 12)]
            for j in range(10)
        ]
        chosen = np.concatenate(rows)
        place = directory / f"device-{index}"
        place.mkdir(parents=True)
        np.savez(place / "digits.npz", x=pool.inputs[chosen], y=pool.labels[chosen])
        result.append({"model": model, "data-path": str(place / "digits.npz")})
    return result


def in_process(
    directory: Path, brought: list[dict[str, Scalar]], config: dict[str, Scalar] = CONFIG
) -> MethodStrategy:
    """The same federation without the network, after its last round."""
    nodes = complete(brought, len(brought), directory / "clients")
    grid = InProcessGrid(make_client_app(), config, len(nodes), node_configs=nodes)
    strategy = MethodStrategy(parse(config, SECTIONS), None)
    strategy.start(grid)
    return strategy


def finish(deployment: Deployment, run_id: str) -> str:
    while (status := deployment.outcome(run_id)[0]) not in ENDED:
        while not deployment.ended():
            time.sleep(0.5)
    return status


def results(rounds: Sequence[RoundRecord]) -> list[tuple[object, ...]]:
    """What must not depend on the way in which messages travel; of the bytes, those that are ours."""
    return [
        (
            *(record.round, record.trained, record.accuracy, record.test_loss, record.client_metrics),
            *(record.scalars, record.bytes_up.payload, record.bytes_up.application),
            *(record.bytes_down.payload, record.bytes_down.application),
        )
        for record in rounds
    ]


def test_devices_give_the_results_of_one_process_and_strangers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in clear, then one of a round under SecAgg+ on the same devices, over gRPC with TLS and keys."""
    run_dir, masked = tmp_path / "run", tmp_path / "masked"
    monkeypatch.setenv(MARK, str(run_dir))
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    brought = devices(tmp_path)
    security.make_keys(tmp_path, ["stranger"])
    security.make_certificates(tmp_path / "elsewhere", ["127.0.0.1"], 30)
    foreign = tmp_path / "elsewhere" / "ca.pem"
    nodes = complete(brought, 3, run_dir / "clients")
    one_round: dict[str, Scalar] = {**CONFIG, "num-server-rounds": 1, "local-epochs": 1}
    with Deployment(run_dir, nodes) as deployment:
        run_id = deployment.submit(ROOT, {**CONFIG, "run-dir": str(run_dir)})
        ca, known = deployment.ca, deployment.key(0)
        # The doctor reports beforehand what a SuperNode would meet.
        findings = check_connection(CheckTargets(deployment.fleet_address, ca, known))
        assert [finding.what for finding in findings if finding.status is Status.FAILED] == []
        findings = check_connection(CheckTargets(deployment.fleet_address, foreign, known))
        (failed,) = [finding for finding in findings if finding.status is Status.FAILED]
        assert failed.what == "tls"
        assert "a foreign CA" in failed.message
        knocking = {
            "the SuperLink does not know its key": deployment.start_node(
                90, {"client-id": 3}, tmp_path / "stranger", ca
            ),
            "a foreign CA": deployment.start_node(91, {"client-id": 4}, known, foreign),
        }
        for index, (text, process) in enumerate(knocking.items(), start=90):
            assert process.wait(300) == 1
            reason = why_ended(deployment.log_of(index).read_text())
            assert reason is not None
            assert reason.startswith(text)
        assert finish(deployment, run_id) == "finished:completed", deployment.tail()
        run_id = deployment.submit(ROOT, {**one_round, "secure-aggregation": True, "run-dir": str(masked)})
        assert finish(deployment, run_id) == "finished:completed", deployment.tail()
    assert left_behind(run_dir) == []
    about = json.loads((run_dir / "run.json").read_text())
    assert [(member["architecture"], member["simulated"]) for member in about["clients"]] == [
        (model, False) for model in MODELS
    ]
    rounds = RunDirectory(run_dir).round_records()
    assert [record.trained for record in rounds] == [[0, 1, 2]] * 2
    # Ten float32 rows of d = 32 each.
    assert all(record.bytes_up.payload > 3 * 4 * 10 * 32 for record in rounds)
    assert results(rounds) == results(in_process(tmp_path / "again", brought).history)
    same_sum(masked, in_process(tmp_path / "in-clear", brought, one_round))


def same_sum(run_dir: Path, plain: MethodStrategy) -> None:
    """Whether a round under masks comes to what the same round in clear comes to, but for the sum's steps."""
    result, _ = load_tensors(run_dir / "checkpoint.safetensors")
    (line,) = RunDirectory(run_dir).round_records()
    expected = plain.state.to_tensors()
    assert set(result) == set(expected)
    step = sums.step(sums.RANGES["mean"], 3)
    for name, tensor in expected.items():
        if name.endswith(".rows"):
            # A sum of three is wrong by less than three steps, their mean by less than one.
            assert float((result[name] - tensor).abs().max()) < step + 1e-6
            assert float(tensor.abs().max()) > 0.1
        else:
            assert torch.equal(result[name], tensor)
    assert line.failures == []
    assert line.trained == [0, 1, 2]
    assert (line.accuracy, line.client_metrics) == (
        plain.history[0].accuracy,
        plain.history[0].client_metrics,
    )
    # Every client sent one masked vector: 8 bytes for each of K rows of d, K presences and one count.
    vectors = 3 * 8 * (10 * 32 + 10 + 1)
    assert vectors <= line.bytes_up.payload < 1.2 * vectors


def start(run_dir: Path, home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pbfl_flwr.cli", "deploy", "local", "--run-dir", str(run_dir), *arguments],
        env={**os.environ, MARK: str(run_dir), "PBFL_HOME": str(home), "COLUMNS": "160"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


SMALL = ["--set", "models=cnn2", "--set", "feature-dim=16", "--set", "partition=iid"]


def test_command_reports_the_result_of_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        run_dir, tmp_path / "home", "-n", "1", "--insecure", "--set", "num-server-rounds=1", *SMALL
    )
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    assert "(insecure), 1 SuperNodes" in output
    assert "round 1/1  accuracy" in output
    assert "best (on test data)" in output
    assert left_behind(run_dir) == []


def test_command_fails_if_a_device_fails(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    node = f"state-dir='{tmp_path / 'a-file'}'"  # only the SuperNode finds out
    process = start(tmp_path / "run", tmp_path / "home", "--node", node, "--insecure", *SMALL)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 1, output
    assert "the run failed: round 1: 0 valid replies, min-replies is 1" in output
    assert "a-file" in output
    assert left_behind(tmp_path / "run") == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_no_process_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, tmp_path / "home", "-n", "2", "--set", "num-server-rounds=1000", *SMALL)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("SuperLink "):
            break
    assert len(left_behind(run_dir)) > 4  # the command, SuperLink, SuperExec, two SuperNodes, ...
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    if number is signal.SIGKILL:
        end = time.monotonic() + 120
        while left_behind(run_dir) and time.monotonic() < end:
            time.sleep(0.5)
    else:
        assert process.returncode == 130, output
    assert left_behind(run_dir) == []
