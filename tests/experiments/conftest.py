"""Small real runs, made in this process once a session; tests must not change them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import Scalar
from pbfl_flwr.experiments import results
from pbfl_flwr.experiments.results import RunGroup
from tests.flower.inprocess import federation

KEYS: dict[str, Any] = {
    "num-clients": 4,
    "num-server-rounds": 3,
    "models": "cnn4,cnn4,resnet4,resnet4",
    "feature-dim": 64,
    "batch-size": 64,
    "learning-rate": 0.05,
    "dirichlet-alpha": 0.5,
    "validation-share": 0.2,
}


def make(place: Path, method: str, **keys: Any) -> Path:
    """Run a method on the digits, four clients of two architectures, and return the run directory."""
    federation(place, method, data=None, on_disk=True, **{**KEYS, **keys}).run()
    return place / "run"


@pytest.fixture(scope="session")
def three_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """FedProto, TinyProto with s = 8, ProtoNorm with γ = 10."""
    place = tmp_path_factory.mktemp("runs")
    return [
        make(place / "a", "fedproto"),
        make(place / "b", "tinyproto", **{"cps-dim": 8}),
        make(place / "c", "protonorm", upscale=10.0),
    ]


@pytest.fixture(scope="session")
def groups(three_runs: list[Path]) -> list[RunGroup]:
    return results.load(three_runs)


@pytest.fixture(scope="session")
def plane_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ProtoNorm on the spiral, d = 2."""
    place = tmp_path_factory.mktemp("plane")
    keys: dict[str, Scalar] = {
        "dataset": "spiral",
        "models": "mlp5",
        "feature-dim": 2,
        "num-server-rounds": 2,
    }
    return make(place, "protonorm", upscale=10.0, **{**keys, "batch-size": 512})


@pytest.fixture
def hostile_run(three_runs: list[Path], tmp_path: Path) -> Path:
    """A run whose clients say what no page should believe."""
    path = tmp_path / "hostile"
    shutil.copytree(three_runs[2], path)
    file = path / "run.json"
    text = file.read_text()
    text = text.replace('"client": 0,', '"client": 0, "name": "</td><script>window.hurt = 1</script>",', 1)
    text = text.replace('"0",', '"$\\\\frac{<img src=x onerror=window.hurt=1>",')
    file.write_text(text)
    rounds = (path / "rounds.jsonl").read_text()
    reason = '{"client": 1, "reason": "\\"><img src=x onerror=window.hurt=1>{{ 7 * 7 }}"}'
    (path / "rounds.jsonl").write_text(rounds.replace('"failures": []', f'"failures": [{reason}]'))
    return path
