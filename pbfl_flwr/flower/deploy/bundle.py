"""The files of a Flower app that go into its bundle."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path

from pbfl_flwr.errors import PbflError, reading

ALWAYS = ("pyproject.toml", ".gitignore")  # these determine which files go into the bundle
PARTS = ("client_app", "server_app", "LICENSE")  # of the slim app, besides pyproject.toml
OWN_APP = "docs/examples/own_app"
FAB_INCLUDE = re.compile(r"^fab-include = \[[^]]*\]\n(fab-exclude = .*\n)?", re.MULTILINE)
PACKED = Path("pbfl_flwr/app")  # holds in a wheel the top-level files of a checkout; see pyproject.toml


def top_level(app: Path, name: str) -> Path:
    """Return the path of a top-level file or directory of an app, in a checkout or where a wheel is installed."""
    packed = app / PACKED / name
    return packed if packed.exists() else app / name


def slim(app: Path, into: Path) -> None:
    """Write an app with only the two entry points as code, for devices on which pbfl-flwr is installed.

    Raises:
        PbflError: if the directory exists, or the app's pyproject.toml has no fab-include.
    """
    if into.exists():
        raise PbflError(f"'{into}' exists already; choose another directory")
    project = top_level(app, "pyproject.toml").read_text(encoding="utf-8")
    patterns = ", ".join(f'"{part}/**/*.py"' if (app / part).is_dir() else f'"{part}"' for part in PARTS)
    project, replacements = FAB_INCLUDE.subn(f"fab-include = [{patterns}]\n", project)
    if replacements != 1:
        raise PbflError(f"'{app / 'pyproject.toml'}' has no fab-include")
    _copy(app, PARTS, into)
    (into / "pyproject.toml").write_text(project, encoding="utf-8")


def own_app(app: Path, into: Path) -> None:
    """Write an app to be changed: a ServerApp, a ClientApp with data of its own, its pyproject.toml and a test.

    Raises:
        PbflError: if the directory exists, or the app has none to start from.
    """
    if into.exists():
        raise PbflError(f"'{into}' exists already; choose another directory")
    source = top_level(app, OWN_APP)
    if not source.is_dir():
        raise PbflError(f"'{app}' has no {OWN_APP}")
    into.parent.mkdir(parents=True, exist_ok=True)
    _copy_entry(source, into, links=True)


def copy_included(app: Path, into: Path) -> Path:
    """Copy the top-level entries named in the app's fab-include, and return the directory to pass to ``flwr run``.

    ``flwr run`` lists every file below the app's directory before it filters them: a virtual environment there, with
    its 60,000 files, takes seven seconds at every run. The resulting bundle is the same.

    Returns:
        ``into``, or ``app`` itself if fab-include is missing or has a wildcard at the top level.
    """
    project = tomllib.loads(top_level(app, "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project.get("tool", {}).get("flwr", {}).get("app", {}).get("fab-include", [])
    names = {pattern.strip("/").split("/")[0] for pattern in patterns}
    if not names or any(character in name for name in names for character in "*?[!"):
        return app
    _copy(app, names.union(ALWAYS), into)
    shutil.rmtree(into / PACKED, ignore_errors=True)  # fab-exclude may only name what a checkout has
    return into


def _copy(app: Path, names: Iterable[str], into: Path) -> None:
    """Copy top-level files and directories of an app, without links, which Flower excludes."""
    into.mkdir(parents=True)
    for source in (top_level(app, name) for name in names):
        _copy_entry(source, into / source.name, links=False)


def _copy_entry(source: Path, into: Path, *, links: bool) -> None:
    """Copy a file, or a directory without Python's caches; ``links`` are followed or left out.

    Only contents: with the modes of a read-only installation nobody could change or remove the copy. The first error
    ends it, where shutil.copytree would collect one for every file.
    """
    if source.name == "__pycache__" or (source.is_symlink() and not links):
        return
    if source.is_dir():
        with reading(str(source)):
            entries = sorted(source.iterdir())
        into.mkdir()
        for entry in entries:
            _copy_entry(entry, into / entry.name, links=links)
    elif source.is_file():
        with reading(str(source)):
            content = source.read_bytes()
        into.write_bytes(content)
