"""Another Flower than the one this package is made for."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pbfl_flwr.flower.flower_version import refuse_older
from tests.small_runs import pbfl

REQUIRED = next(
    r for r in map(Requirement, importlib.metadata.requires("pbfl-flwr") or ()) if r.name == "flwr"
)
ALLOWED = f"must be {REQUIRED.specifier}: pip install 'flwr{REQUIRED.specifier}'"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A directory with a Flower that has none of the modules of today's."""
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr/__init__.py").touch()
    (tmp_path / "flwr-1.30.0.dist-info").mkdir()
    (tmp_path / "flwr-1.30.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.4\nName: flwr\nVersion: 1.30.0\n"
    )
    return tmp_path


@pytest.fixture
def of_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives today's Flower another version."""
    original = importlib.metadata.version

    def be(version: str) -> None:
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: version if name == "flwr" else original(name)
        )

    return be


def test_doctor_reports_another_flower(other: Path) -> None:
    path = os.pathsep.join([str(other), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "pbfl_flwr.cli", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=other,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    failed = [finding for finding in json.loads(done.stdout) if finding["status"] == "failed"]
    assert [(finding["what"], finding["message"]) for finding in failed] == [
        ("flwr", f"1.30.0, must be {REQUIRED.specifier}")
    ]


@pytest.mark.parametrize("command", ["run", "run --engine processes", "compare pull", "deploy local"])
def test_older_flower_is_refused_before_anything_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_version: Callable[[str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    of_version("1.36.0")
    result = pbfl(*command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.replace("\n", " ").strip() == f"error: flwr 1.36.0 is too old; {ALLOWED}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", ["1.39.0", "1.39.1", "1.43.0"])
def test_pinned_and_newer_flower_are_accepted(version: str, of_version: Callable[[str], None]) -> None:
    of_version(version)
    refuse_older()
