"""Real runs: `pbfl run` as a person starts it, on every engine, with the result of a run in one process."""

import signal
import sys
from pathlib import Path

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.engines.flower_simulation import FlowerSimulation
from tests.real_runs import PBFL, left_behind, result_of, rounds_of, sets, start, wait_for_rounds
from tests.small_runs import pbfl

SMALL = sets("num-clients=3", "models=cnn4", "feature-dim=16", "max-samples=300")
ENDLESS = sets("num-server-rounds=10000")
FLOWER = ("--engine", "flower", "--workers")
PROCESSES = ("--engine", "processes", "--workers")


def result_in_one_process(run_dir: Path, rounds: int) -> str:
    words = (*SMALL, *sets(f"num-server-rounds={rounds}"))
    assert pbfl("run", *PROCESSES, "1", "--run-dir", run_dir, *words).exit_code == 0
    return result_of(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's parent-death signal")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_ended_run_with_flower_engine_leaves_no_process_and_resumes(
    tmp_path: Path, number: signal.Signals
) -> None:
    """With one worker and then with two, to the result of a whole run."""
    run_dir = tmp_path / "run"
    process = start(run_dir, "run", *FLOWER, "1", "--run-dir", run_dir, *SMALL, *ENDLESS)
    wait_for_rounds(process, run_dir, 1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert left_behind(run_dir, 60) == []
    if number != signal.SIGKILL:
        assert process.returncode == 130, output
    done = len(rounds_of(run_dir))
    words = ("--resume", run_dir, *sets(f"num-server-rounds={done + 1}"))
    process = start(run_dir, "run", *FLOWER, "2", *words)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert left_behind(run_dir) == []
    assert "Starting Flower Simulation" in (run_dir / "flower.log").read_text()
    assert f"round {done + 1}/{done + 1}  accuracy" in output
    assert "best (on test data)" in output
    assert [line["round"] for line in rounds_of(run_dir)] == list(range(1, done + 2))
    assert [line["trained"] for line in rounds_of(run_dir)] == [[0, 1, 2]] * (done + 1)
    assert result_of(run_dir) == result_in_one_process(tmp_path / "one", done + 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_and_killed_run_of_processes_leaves_none_and_resumes(tmp_path: Path) -> None:
    """With two workers, by Ctrl-C and a lost terminal, then killed without standard streams; at last in one process."""
    run_dir, resume = tmp_path / "run", ("run", *PROCESSES, "2", "--resume", tmp_path / "run")
    done = 0
    for number in (signal.SIGINT, signal.SIGHUP):
        first = ("run", *PROCESSES, "2", "--run-dir", run_dir, *SMALL, *ENDLESS)
        process = start(run_dir, *(resume if done else first))
        wait_for_rounds(process, run_dir, done + 1)
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)  # as a cluster and timeout send two
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 130, output
        assert f"resume with: pbfl run --resume {run_dir}\n" in output
        assert left_behind(run_dir) == []
        done = len(rounds_of(run_dir))
    process = start(run_dir, *resume, program=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PBFL])
    wait_for_rounds(process, run_dir, done + 1)
    process.kill()
    process.communicate(timeout=60)
    assert left_behind(run_dir, 60) == []
    rounds = len(rounds_of(run_dir)) + 1
    output = pbfl(*resume, "--workers", 1, *sets(f"num-server-rounds={rounds}")).output
    assert f"result hash {result_of(run_dir)}" in output
    assert [line["round"] for line in rounds_of(run_dir)] == list(range(1, rounds + 1))
    assert [line["trained"] for line in rounds_of(run_dir)] == [[0, 1, 2]] * rounds
    assert result_of(run_dir) == result_in_one_process(tmp_path / "one", rounds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_on_ray_has_the_result_of_one_process(tmp_path: Path) -> None:
    run_dir, words = tmp_path / "run", (*SMALL, *sets("num-server-rounds=2"))
    process = start(run_dir, "run", "--engine", "ray", "--workers", "2", "--run-dir", run_dir, *words)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert "round 2/2  accuracy" in output
    assert "3 clients trained" in (run_dir / "flower.log").read_text()
    assert left_behind(run_dir) == []
    assert result_of(run_dir) == result_in_one_process(tmp_path / "one", 2)


def test_failed_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    broken = sets(f"state-dir={tmp_path / 'a-file'}")  # only the clients find out
    result = pbfl("run", *PROCESSES, "1", "--run-dir", tmp_path / "run", *SMALL, *broken)
    assert result.exit_code == 1, result.output
    text = " ".join(result.output.split())
    assert "the run failed: round 1: state-dir " in text
    assert "a-file" in text
    assert "cannot be written (Not a directory)" in text


def test_run_directory_is_used_once(tmp_path: Path) -> None:
    with FlowerSimulation(tmp_path), pytest.raises(PbflError, match="in use"), FlowerSimulation(tmp_path):
        pass


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_engines_give_the_same_bits_on_one_card(tmp_path: Path) -> None:
    """With CUDA graphs and without, one worker or two."""
    words = (*SMALL, *sets("num-server-rounds=2", "device=cuda"), "--gpus-per-client", "0.5", "--run-dir")
    results = {}
    for engine, workers in (("processes", 1), ("processes", 2), ("ray", 2), ("flower", 2)):
        for graphs in ("false", "true"):
            run_dir = tmp_path / f"{engine}-{workers}-{graphs}"
            process = start(
                run_dir,
                "run",
                *("--engine", engine, "--workers", workers, *sets(f"cuda-graphs={graphs}")),
                *words,
                run_dir,
            )
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, output
            results[run_dir.name] = result_of(run_dir)
    assert len(set(results.values())) == 1, results
