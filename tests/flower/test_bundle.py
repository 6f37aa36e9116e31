"""What is handed to Flower makes the same bundle as the whole directory, without looking at the rest of it."""

from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from pbfl_flwr.flower.bundle import gathered

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


def test_the_bundle_is_the_same(tmp_path: Path) -> None:
    app = an_app(tmp_path, '"LICENSE", "app/**/*.py"')
    found = gathered(app, tmp_path / "copy")
    assert found == tmp_path / "copy"
    assert {
        name for name in names(found) if name.startswith((".venv", "other")) or "pycache" in name
    } == set()
    assert build_fab_from_disk(found) == build_fab_from_disk(app)


@pytest.mark.parametrize("include", ["", '"LICENSE", "**/*.py"', '"*/main.py", "LICENSE"'])
def test_an_app_that_names_no_directories_is_handed_over_whole(tmp_path: Path, include: str) -> None:
    app = an_app(tmp_path, include)
    assert gathered(app, tmp_path / "copy") == app
    assert not (tmp_path / "copy").exists()
