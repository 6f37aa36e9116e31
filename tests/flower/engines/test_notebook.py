"""Runs within somebody else's process, such as a notebook's kernel: what they find there and what they leave."""

import os
import random
import subprocess
import sys
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.engines import executors
from pbfl_flwr.flower.engines.flower_simulation import FlowerSimulation
from pbfl_flwr.flower.engines.local import federate, federate_app
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.flower.server.rounds import FinishedRound
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import RoundRecord
from pbfl_flwr.strategies import FedProto
from pbfl_flwr.task import Task
from tests.flower.inprocess import SPLITS, tiny_data

KEYS: dict[str, Scalar] = {
    "num-clients": 3,
    "num-server-rounds": 1,
    "models": "mlp5",
    "feature-dim": 8,
    "partition": "iid",
    "max-samples": 120,
    "threads": 1,
}


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What a notebook's cells define, as a module."""
    module = ModuleType("a_cell")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def wide(width: int) -> object:
    def build(task: Task) -> SplitModel:
        stages = [nn.Sequential(nn.Flatten(), nn.Linear(task.input_shape[0], width), nn.ReLU())]
        return SplitModel(
            task, stages, nn.Linear(width, task.feature_dim), nn.Linear(task.feature_dim, task.num_classes)
        )

    return build


def test_models_and_data_may_change_between_runs(
    tmp_path: Path, cell: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell is changed and run again: the next run trains the new network on the new data."""
    monkeypatch.chdir(tmp_path)
    file, results = tmp_path / "own.npz", []
    for width, classes in ((4, 2), (6, 2), (6, 3)):
        rows = np.arange(120)
        np.savez(file, x=np.float32(rows[:, None] % [2, 3, 5]), y=rows % classes)
        cell.build = wide(width)  # type: ignore[attr-defined]
        keys = {**KEYS, "models": "a_cell:build", "dataset": "npz", "data-dir": str(file)}
        federate(f"runs/{width}-{classes}", keys, 3, Resources(workers=1))
        run = RunDirectory(tmp_path / "runs" / f"{width}-{classes}")
        (client, *_) = run.record().clients
        results.append((client.parameters[0], client.task.num_classes, run.partition().data))
    assert [(body, classes) for body, classes, _ in results] == [(56, 2), (80, 2), (80, 3)]
    assert results[0][2] == results[1][2] != results[2][2]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_run_leaves_the_process_state_unchanged(workers: int, tmp_path: Path) -> None:
    def state() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),
            random.getstate(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        ]

    torch.manual_seed(77)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = state()
    try:
        federate(tmp_path / "run", KEYS, 3, Resources(workers=workers))
        assert state() == before
        with pytest.raises(PbflError, match="cps-dim"):
            federate(tmp_path / "refused", {**KEYS, "cps-dim": 99}, 3, Resources(workers=workers))
        assert state() == before
    finally:
        torch.set_num_threads(threads)


def test_models_defined_in_main_need_one_worker(tmp_path: Path) -> None:
    """In a worker ``__main__`` is not the notebook's."""
    keys = {**KEYS, "models": "__main__:built_in_a_cell"}
    with pytest.raises(PbflError, match="exist only in that process: use one worker, or move the function"):
        federate(tmp_path / "run", keys, 3, Resources(workers=1))


def test_refuses_to_start_workers_from_a_script_that_a_worker_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)
    with pytest.raises(
        PbflError, match="is imported by a process that it starts, and would start the run there"
    ):
        federate(tmp_path / "run", KEYS, 3, Resources(workers=2))
    monkeypatch.setattr(current_process(), "_name", executors.WORKER)
    strategy = FedProto(num_clients=1, models="mlp5", feature_dim=8)
    for workers in (1, 2):
        with pytest.raises(SystemExit, match=str(executors.IMPORTS_A_RUN)):
            federate(tmp_path / "run", KEYS, 3, Resources(workers=workers))
    with pytest.raises(SystemExit):
        federate_app(strategy, make_client_app(tiny_data, strategy.settings))


def test_refuses_to_start_workers_where_python_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In multiprocessing.Pool, whose processes have no children, and in ``python < script.py``."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(PbflError, match=r"a script on standard input is no file: must take one worker"):
        federate(tmp_path / "run", KEYS, 3, Resources(workers=2))
    monkeypatch.setitem(current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(
        PbflError, match=r"may not start others, .*: must take one worker, Resources\(workers=1\)"
    ):
        federate(tmp_path / "run", KEYS, 3, Resources(workers=2))
    assert not (tmp_path / "run").exists()
    federate(tmp_path / "run", KEYS, 3, Resources(workers=1))


@pytest.mark.long
def test_script_without_main_guard_is_explained(tmp_path: Path) -> None:
    """A script without ``if __name__ == "__main__":`` is run by every worker that imports it."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pbfl_flwr.flower.engines.local import federate\n"
        "from pbfl_flwr.flower.engines.placement import Resources\n"
        f"federate({str(tmp_path / 'run')!r}, {KEYS!r}, 3, Resources(workers=2))\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 1
    *_, last = ended.stderr.strip().splitlines()
    assert f"'{script}' starts a run with several workers, and each worker imports it" in last
    assert "must start it under if __name__ == '__main__':, or with one worker" in last
    assert ended.stderr.count("Traceback") == 1


def test_strategy_and_client_app_run_in_this_process(tmp_path: Path) -> None:
    strategy = FedProto(
        num_clients=len(SPLITS),
        num_server_rounds=2,
        models="mlp5",
        feature_dim=8,
        state_dir=str(tmp_path / "clients"),
        directory=tmp_path,
    )
    app = make_client_app(tiny_data, strategy.settings)
    result = federate_app(strategy, app)
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert [line.failures for line in RunDirectory(tmp_path).round_records()] == [[], []]
    assert strategy.history[-1].trained == [*range(len(SPLITS))]
    with pytest.raises(PbflError, match="this strategy has made all its rounds; must be a new one"):
        federate_app(strategy, app)


def test_an_interrupted_strategy_makes_the_remaining_rounds(tmp_path: Path) -> None:
    def strategy_in(place: str) -> FedProto:
        return FedProto(
            num_clients=len(SPLITS),
            num_server_rounds=3,
            models="mlp5",
            feature_dim=8,
            state_dir=str(tmp_path / place),
        )

    interrupted, whole = strategy_in("a"), strategy_in("b")
    app = make_client_app(tiny_data, whole.settings)
    federate_app(whole, app)
    add = interrupted._commit

    def interrupting(finished: FinishedRound) -> RoundRecord:
        add(finished)
        raise KeyboardInterrupt

    with patch.object(interrupted, "_commit", interrupting), pytest.raises(KeyboardInterrupt):
        federate_app(interrupted, app)
    federate_app(interrupted, app)
    assert [line.round for line in interrupted.history] == [1, 2, 3]
    assert [line.accuracy for line in interrupted.history] == [line.accuracy for line in whole.history]


NAN = torch.tensor([[0.0] * 3, [float("nan")] * 3])
IDS = torch.tensor([[0, 1, 1], [1, 2, 0]])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"labels": torch.tensor([0, 1], dtype=torch.int32)},
            r"labels of train are torch.int32 of shape \(2,\)",
        ),
        ({"labels": torch.tensor([[0], [1]])}, r"labels of train are torch.int64 of shape \(2, 1\)"),
        ({"labels": torch.tensor([0, 1, 1])}, r"must be torch.int64 of shape \(2,\), one per input"),
        ({"labels": torch.tensor([1, 2])}, r"labels of train range from 1 to 2: must be 0 to 1"),
        ({"labels": [0, 1]}, "labels of train are of type list: must be a torch.Tensor"),
        ({"inputs": np.zeros((2, 3))}, "inputs of train are of type ndarray: must be a torch.Tensor"),
        ({"inputs": NAN}, "inputs of train hold numbers that are not finite"),
        ({"inputs": torch.zeros(2, 4)}, r"inputs of test have shape \(3,\), those of train \(4,\)"),
        (
            {"vocabulary_size": 2, "inputs": IDS},
            "range from 0 to 2: must be 0",
        ),
        ({"vocabulary_size": 2}, "token ids of train are torch.float32: must be torch.int32 or"),
        (
            {"vocabulary_size": 4, "inputs": IDS, "test": IDS, "scale": None},
            "scale is NoneType: must be a torch.Tensor of torch.float32",
        ),
        ({"inputs": torch.tensor(1.0)}, "inputs of train are a single number"),
        ({"label_names": ("a", 1)}, "label_names has 1 of type int: must be str"),
        ({"natural_id": 7}, "natural_id has 7 of type int: must be str"),
        ({"label_names": ("a",)}, "label_names has 1 names: must be one for each of 2 classes"),
        ({"scale": torch.ones(2)}, r"scale has shape \(2,\): must be \(3,\) for inputs of shape \(3,\)"),
        (
            {"scale": torch.ones(5, 1)},
            r"scale has shape \(5, 1\): must be \(3,\) for inputs of shape \(3,\)",
        ),
        ({"scale": 0.5}, "scale is float: must be a torch.Tensor of torch.float32"),
        (
            {"scale": torch.ones(3).double()},
            "scale is torch.float64: must be a torch.Tensor of torch.float32",
        ),
    ],
)
def test_rejects_invalid_data_of_the_app_before_training(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    def my_data(settings: Settings, client: int) -> ClientData:
        good = Shard(change.get("test", torch.zeros(2, 3)), torch.tensor([0, 1]))
        names = change.get("label_names", ("a", "b"))
        train = Shard(change.get("inputs", good.inputs), change.get("labels", good.labels))
        size = change.get("vocabulary_size", 0)
        scale = change.get("scale", torch.ones(1))
        name = change.get("natural_id", "")
        return ClientData(train, good, 2, names, scale, torch.zeros(1), vocabulary_size=size, natural_id=name)

    strategy = FedProto(num_clients=1, models="mlp5", feature_dim=8, state_dir=str(tmp_path))
    with pytest.raises(PbflError, match=f"1 of 1 clients: the data from the app's data function: .*{says}"):
        federate_app(strategy, make_client_app(my_data, strategy.settings))
    app = make_client_app(lambda settings, client: None, strategy.settings)  # type: ignore[arg-type, return-value]
    with pytest.raises(
        PbflError, match=r"<lambda> \(test_notebook.py:\d+\) returned None; must return a ClientData"
    ):
        federate_app(strategy, app)


def test_accepts_numbers_of_numpy() -> None:
    strategy = FedProto(num_clients=np.int64(3), learning_rate=np.float64(0.5), seed=np.arange(3)[2])  # type: ignore[arg-type]
    run = strategy.settings.run
    assert (run.num_clients, strategy.settings.training.learning_rate, run.seed) == (3, 0.5, 2)
    assert {type(run.num_clients), type(run.seed)} == {int}


def test_rejects_contradicting_numbers_of_clients(tmp_path: Path) -> None:
    with pytest.raises(
        PbflError, match="num-clients = 3, but the federation has 4 clients: must be the same number"
    ):
        federate(tmp_path / "other", KEYS, 4, Resources(workers=1))
    assert not (tmp_path / "other").exists()
    keys = {key: value for key, value in KEYS.items() if key != "num-clients"}
    federate(tmp_path / "run", keys, 3, Resources(workers=1))
    assert len(RunDirectory(tmp_path / "run").record().clients) == 3


def test_relative_parts_of_pythonpath_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beside the notebook, with PYTHONPATH=. and Flower's engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "docs/examples", "/else"]))
    result = FlowerSimulation(tmp_path / "run")._environment()["PYTHONPATH"].split(os.pathsep)
    assert result == [str(tmp_path), str(tmp_path / "docs" / "examples"), "/else"]
