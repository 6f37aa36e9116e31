"""``pbfl app --own``: an app to start from, with keys of its own that --run-config changes on server and clients."""

import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.strategies import configure
from tests.real_runs import ROOT
from tests.small_runs import pbfl, refused


@pytest.fixture
def app(tmp_path: Path) -> Path:
    result = pbfl("app", "--own", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    return tmp_path / "mine"


def test_its_own_test_passes(app: Path) -> None:
    """In a process of its own, which knows nothing of this checkout but the package."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(app)]
    done = subprocess.run(
        command, cwd=app, env={"PYTHONPATH": str(ROOT), "HOME": str(app)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_flower_bundles_it(app: Path) -> None:
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(app))) as files:
        assert {"own_app/__init__.py", "own_app/client.py", "own_app/server.py"} <= {*files.namelist()}


def test_an_existing_directory_is_left_alone(app: Path) -> None:
    assert refused("app", "--own", app).endswith("exists already; choose another directory")


def test_keys_of_an_app_are_handed_on() -> None:
    """And belong to the configuration: recorded, compared when a run is resumed, read again on devices."""
    settings = parse({"app.noise_level": 0.1, "app.name": "a", "num-clients": 3}, SECTIONS)
    assert settings.app == {"noise_level": 0.1, "name": "a"}
    assert parse(settings.as_dict(), SECTIONS) == settings
    assert settings.as_dict()["app.name"] == "a"
    assert settings.fingerprint() != parse({"num-clients": 3}, SECTIONS).fingerprint()
    assert configure("fedproto", **{"app.noise_level": 0.1}).app == {"noise_level": 0.1}
    with pytest.raises(PbflError, match=r"unknown section 'ap\.'"):
        parse({"ap.noise": 1}, SECTIONS)
