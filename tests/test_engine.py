"""Real runs: `pbfl run` as a person starts it, on every engine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.deploy.superlink import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = ["num-clients=4", "num-server-rounds=2", "models=cnn4", "feature-dim=16"]
MARK = "PBFL_TEST_RUN"
PROCESSES = ("--workers",)
FLOWER = ("--engine", "flower", "--workers")


def start(run_dir: Path, home: Path, *settings: str, workers: str = "2") -> subprocess.Popen[str]:
    return pbfl(run_dir, home, *FLOWER, workers, "--run-dir", str(run_dir), *sets(*SMALL, *settings))


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def hear() -> None:
    """A shell without job control has background jobs ignore SIGINT, nohup SIGHUP; children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def pbfl(run_dir: Path, home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pbfl_flwr.cli", "run", *arguments],
        env={**os.environ, MARK: str(run_dir), "PBFL_HOME": str(home), "COLUMNS": "160"},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear,
    )


def left_behind(run_dir: Path) -> list[str]:
    """Return the command lines of living processes that inherited the run's mark."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    mark = f"{MARK}={run_dir}".encode()
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                result.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended, or it is somebody else's
    return result


def wait_for_rounds(run_dir: Path, wanted: int) -> None:
    file = run_dir / "rounds.jsonl"
    end = time.monotonic() + 300
    while not file.exists() or len(file.read_text().splitlines()) < wanted:
        assert time.monotonic() < end, "no rounds came"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory of a run with two workers, and what it printed."""
    place = tmp_path_factory.mktemp("engine")
    process = start(place / "run", place / "home")
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return place / "run", output


@pytest.mark.xdist_group("finished")
def test_run_with_flower_engine(finished: tuple[Path, str]) -> None:
    run_dir, output = finished
    rounds = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds] == [1, 2]
    assert [line["trained"] for line in rounds] == [[0, 1, 2, 3]] * 2
    assert "round 2/2  accuracy" in output
    assert "best (on test data)" in output
    assert left_behind(run_dir) == []
    assert "Starting Flower Simulation" in (run_dir / "flower.log").read_text()


def bits(run_dir: Path) -> tuple[dict[str, torch.Tensor], list[object]]:
    """Return a run's prototypes, and what its clients were scored."""
    clients = [json.loads(line) for line in (run_dir / "clients.jsonl").read_text().splitlines()]
    scores: list[object] = [(line["correct"], line["test_loss"], line["metrics"]) for line in clients]
    return load_file(run_dir / "prototypes.safetensors"), scores


def result_of(run_dir: Path) -> str:
    return (run_dir / "result.txt").read_text().strip()


@pytest.mark.xdist_group("finished")
def test_all_engines_give_the_same_results(finished: tuple[Path, str], tmp_path: Path) -> None:
    """In one process, in two beside the server, and on Ray."""
    for name, options in (
        ("one", ("--workers", "1")),
        ("two", ("--workers", "2")),
        ("ray", ("--engine", "ray", "--workers", "2")),
    ):
        run_dir = tmp_path / name
        process = pbfl(run_dir, tmp_path / "home", *options, "--run-dir", str(run_dir), *sets(*SMALL))
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output
        (result, scores), (expected, scores_of_engine) = bits(run_dir), bits(finished[0])
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected)
        assert scores == scores_of_engine
        assert result_of(run_dir) == result_of(finished[0])
        assert f"result hash {result_of(run_dir)}" in output
        assert "round 2/2  accuracy" in output
        assert "4 clients trained" in (run_dir / "flower.log").read_text()
        assert left_behind(run_dir) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_processes_end_with_their_command_and_resume(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    more = sets(*SMALL, "num-server-rounds=10000")
    process = pbfl(run_dir, tmp_path / "home", *PROCESSES, "2", "--run-dir", str(run_dir), *more)
    wait_for_rounds(run_dir, 1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert nothing_is_left(run_dir)
    if number != signal.SIGKILL:
        assert process.returncode == 130, output
        assert f"resume with: pbfl run --resume {run_dir}\n" in output
    done = len((run_dir / "rounds.jsonl").read_text().splitlines())
    rest = sets(f"num-server-rounds={done + 1}")
    process = pbfl(run_dir, tmp_path / "home", *PROCESSES, "1", "--resume", str(run_dir), *rest)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    rounds = [json.loads(line)["round"] for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, done + 2))


def test_failed_run_says_why(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "a-file").touch()
    broken = f"state-dir={tmp_path / 'a-file'}"  # only the clients find out
    process = start(run_dir, tmp_path / "home", broken, workers="1")
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 1, output
    assert "the run failed: round 1: 0 valid replies, min-replies is 1" in output
    assert "client 0:" in output
    assert "a-file" in output
    assert left_behind(run_dir) == []


def nothing_is_left(run_dir: Path, seconds: float = 60) -> bool:
    """Whether all processes of a run end; a killed command cannot wait for them."""
    end = time.monotonic() + seconds
    while left_behind(run_dir) and time.monotonic() < end:
        time.sleep(0.2)
    return not left_behind(run_dir)


def rounds_done(run_dir: Path) -> int:
    rounds = [json.loads(line)["round"] for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, len(rounds) + 1))
    return len(rounds)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's parent-death signal")
def test_stopped_killed_and_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    """On Flower's engine with one worker and with two, beside a run without it; two of the four clients lie."""
    run_dir, other = tmp_path / "run", tmp_path / "other"
    lies = (
        "attack.kind=noise",
        "attack.share=0.5",
        "norm-bound=1.0",
        "aggregation=trimmed-mean",
        "min-class-count=1",
    )
    process = start(run_dir, tmp_path / "home", *lies, "num-server-rounds=10000", workers="1")
    wait_for_rounds(run_dir, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "attack noise: clients" in output
    assert left_behind(run_dir) == []
    done = rounds_done(run_dir)
    process = pbfl(run_dir, tmp_path / "home", *FLOWER, "2", "--resume", str(run_dir))
    wait_for_rounds(run_dir, done + 1)
    process.kill()
    process.communicate(timeout=60)
    assert nothing_is_left(run_dir)
    done = rounds_done(run_dir)
    rest = sets(f"num-server-rounds={done + 1}")
    process = pbfl(run_dir, tmp_path / "home", *FLOWER, "2", "--resume", str(run_dir), *rest)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert left_behind(run_dir) == []
    assert rounds_done(run_dir) == done + 1
    whole = sets(*SMALL, *lies, f"num-server-rounds={done + 1}")
    process = pbfl(other, tmp_path / "home", *PROCESSES, "2", "--run-dir", str(other), *whole)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    (tensors, scores), (expected, expected_scores) = bits(run_dir), bits(other)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert scores == expected_scores
    liars, others_liars = (
        json.loads((place / "run.json").read_text())["malicious"] for place in (run_dir, other)
    )
    assert liars == others_liars
    assert len(liars) == 2


def test_run_directory_is_used_once(tmp_path: Path) -> None:
    with Engine(tmp_path), pytest.raises(PbflError, match="in use"), Engine(tmp_path):
        pass
