"""What is handed to Flower makes the same bundle as the whole directory, without looking at the rest of it."""

import errno
import shutil
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from flwr.cli.build import build_fab_from_disk

import pbfl_flwr
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.deploy.bundle import PACKED, copy_included, own_app, slim
from pbfl_flwr.flower.deploy.local_federation import Deployment
from tests.small_runs import pbfl, refused
from tests.test_imports import APPS, GRAPH, import_graph

CHECKOUT = Path(__file__).parents[3]

PROJECT = """
[project]
name = "an-app"
version = "1.0.0"
dependencies = ["flwr>=1.39"]
license = { file = "LICENSE" }

[tool.flwr.app]
publisher = "somebody"
fab-format-version = 1
flwr-version-target = "1.39.0"
fab-include = [INCLUDE]

[tool.flwr.app.components]
serverapp = "app.main:server"
clientapp = "app.main:client"
"""


def an_app(place: Path, include: str) -> Path:
    files = {
        "pyproject.toml": PROJECT.replace("INCLUDE", include),
        ".gitignore": "ignored.py\n.venv/\n",
        "LICENSE": "words",
        "app/main.py": "server = client = None\n",
        "app/deep/inside.py": "x = 1\n",
        "app/ignored.py": "x = 2\n",
        "app/notes.txt": "not wanted",
        "app/__pycache__/main.cpython-311.pyc": "bytes",
        "other/elsewhere.py": "x = 3\n",
        ".venv/lib/package.py": "x = 4\n",
    }
    for name, text in files.items():
        file = place / "given" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (place / "given" / "app" / "link.py").symlink_to(place / "given" / "other" / "elsewhere.py")
    return place / "given"


def names(place: Path) -> set[str]:
    return {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}


def test_copied_app_makes_the_same_bundle(tmp_path: Path) -> None:
    app = an_app(tmp_path, '"LICENSE", "app/**/*.py"')
    result = copy_included(app, tmp_path / "copy")
    assert result == tmp_path / "copy"
    assert {
        name for name in names(result) if name.startswith((".venv", "other")) or "pycache" in name
    } == set()
    assert build_fab_from_disk(result) == build_fab_from_disk(app)


@pytest.mark.parametrize("include", ["", '"LICENSE", "**/*.py"', '"*/main.py", "LICENSE"'])
def test_app_without_directories_in_fab_include_is_used_whole(tmp_path: Path, include: str) -> None:
    app = an_app(tmp_path, include)
    assert copy_included(app, tmp_path / "copy") == app
    assert not (tmp_path / "copy").exists()


@pytest.fixture(scope="module")
def fab() -> bytes:
    return build_fab_from_disk(CHECKOUT)


def test_bundle_has_every_module_that_its_modules_import_and_no_command_line(
    tmp_path: Path, fab: bytes
) -> None:
    with zipfile.ZipFile(BytesIO(fab)) as bundle:
        bundle.extractall(tmp_path)
    assert not {entry.name for entry in (tmp_path / "pbfl_flwr").iterdir()} & {
        "cli",
        "experiments",
        "serving",
    }
    assert len(fab) < 1_300_000  # 160 s at 64 kbit/s
    graph = import_graph(tmp_path, ("pbfl_flwr", *APPS))
    assert {"client_app.app", "server_app.app"} <= graph.keys()
    # A module that is missing would stand for the package above it.
    assert {module: names for module, names in graph.items() if names != GRAPH[module]} == {}


def test_installed_wheel_makes_the_bundle_of_a_checkout(tmp_path: Path, fab: bytes) -> None:
    """There the files of a checkout's top level are in pbfl_flwr/app, and other packages are around."""
    site = tmp_path / "site-packages"
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in (*wheel["packages"], "docs"):
        shutil.copytree(CHECKOUT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / PACKED).mkdir()
    for source, target in wheel["force-include"].items():
        copy = shutil.copytree if (CHECKOUT / source).is_dir() else shutil.copyfile
        copy(CHECKOUT / source, site / target)
    (site / "LICENSE").write_text("of somebody else's package")
    assert build_fab_from_disk(copy_included(site, tmp_path / "copy")) == fab
    with patch.object(pbfl_flwr, "__file__", str(site / "pbfl_flwr/__init__.py")):
        assert pbfl("app", tmp_path / "slim").exit_code == 0
        assert pbfl("app", "--own", tmp_path / "own").exit_code == 0
    slim(CHECKOUT, tmp_path / "same")
    assert build_fab_from_disk(tmp_path / "slim") == build_fab_from_disk(tmp_path / "same")
    assert (tmp_path / "own" / "own_app" / "client.py").exists()


def test_command_writes_a_slim_app_of_keys_and_entry_points_and_overwrites_none(tmp_path: Path) -> None:
    done = pbfl("app", tmp_path / "slim")
    assert done.exit_code == 0
    assert "need the same pbfl-flwr" in " ".join(done.output.split())
    fab = build_fab_from_disk(tmp_path / "slim")
    with zipfile.ZipFile(BytesIO(fab)) as bundle:
        packages = {name.split("/")[0] for name in bundle.namelist()}
    assert "pbfl_flwr" not in packages
    assert {"client_app", "server_app", "LICENSE", "pyproject.toml"} <= packages
    assert len(fab) < 40_000
    whole, result = (
        tomllib.loads((where / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
        for where in (CHECKOUT, tmp_path / "slim")
    )
    assert result["config"] == whole["config"]
    again = pbfl("app", tmp_path / "slim")
    assert again.exit_code == 2
    assert "exists already; choose another directory" in " ".join(again.output.split())


@pytest.mark.parametrize("own", [[], ["--own"]])
def test_a_full_disk_is_one_line(own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=full))
    new = tmp_path / "new"
    assert refused("app", *own, new) == f"error: {new} cannot be written (No space left on device)"


def test_a_full_disk_ends_a_start_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Deployment(tmp_path, [])
    link._scratch = tmp_path / "scratch"
    (link._scratch / "home").mkdir(parents=True)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=full))
    with pytest.raises(PbflError, match=r"^\S*/scratch cannot be written \(No space left on device\)$"):
        link.submit(CHECKOUT, {})


def test_copies_of_a_read_only_installation_can_be_changed(tmp_path: Path) -> None:
    app = tmp_path / "installed"
    for part in ("client_app", "server_app", "docs/examples/own_app"):
        shutil.copytree(CHECKOUT / part, app / part)
    for part in ("pyproject.toml", "LICENSE"):
        shutil.copy(CHECKOUT / part, app)
    every = [app, *app.rglob("*")]
    for path in every:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        slim(app, tmp_path / "slim")
        own_app(app, tmp_path / "own")
        copy_included(app, tmp_path / "included")
    finally:
        for path in every:
            path.chmod(path.stat().st_mode | 0o200)
    for copy in ("slim", "own", "included"):
        made = [tmp_path / copy, *(tmp_path / copy).rglob("*")]
        assert [path for path in made if not path.stat().st_mode & 0o200] == []


def test_slim_app_needs_fab_include(tmp_path: Path) -> None:
    app = an_app(tmp_path, "")
    (app / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(PbflError, match=r"pyproject\.toml' has no fab-include"):
        slim(app, tmp_path / "slim")
    assert not (tmp_path / "slim").exists()
