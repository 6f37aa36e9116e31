"""The part of a Flower app's directory that its bundle is made of."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

from pbfl_flwr.errors import PbflError

BESIDE = ("pyproject.toml", ".gitignore")  # what says which files go into the bundle
PARTS = ("client_app", "server_app", "LICENSE")
FILES = re.compile(r"^fab-include = \[[^]]*\]\n(fab-exclude = .*\n)?", re.MULTILINE)

PACKED = Path("pbfl_flwr/app")  # where a wheel has the files of a checkout's top level; see pyproject.toml


def top_level(app: Path, name: str) -> Path:
    """Return the path of a top-level file or directory of an app, in a checkout or where a wheel is installed."""
    packed = app / PACKED / name
    return packed if packed.exists() else app / name


def slim(app: Path, into: Path) -> None:
    """Write an app that brings no code but the two entry points, for devices on which pbfl-flwr is installed.

    Args:
        app: directory of the Flower app.
        into: where it goes; must not be there yet.

    Raises:
        PbflError: if there is something already, or the app's pyproject.toml does not say what goes into the bundle.
    """
    if into.exists():
        raise PbflError(f"'{into}' is there already; choose another directory")
    project = top_level(app, "pyproject.toml").read_text(encoding="utf-8")
    patterns = ", ".join(f'"{part}/**/*.py"' if (app / part).is_dir() else f'"{part}"' for part in PARTS)
    project, found = FILES.subn(f"fab-include = [{patterns}]\n", project)
    if found != 1:
        raise PbflError(f"'{app / 'pyproject.toml'}' has no fab-include")
    into.mkdir(parents=True)
    (into / "pyproject.toml").write_text(project, encoding="utf-8")
    for part in PARTS:
        source = top_level(app, part)
        if source.is_dir():
            shutil.copytree(source, into / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, into / part)


def gathered(app: Path, into: Path) -> Path:
    """Copy the top-level entries that the app's fab-include names, and return the directory to hand to Flower.

    ``flwr run`` looks at every file below the app's directory before it asks which ones are wanted: a virtual
    environment there, with its 60,000 files, costs seven seconds of every run. The bundle is the same.

    Args:
        app: directory of the Flower app.
        into: where the copy goes; must not be there yet.

    Returns:
        ``into``, or ``app`` itself where fab-include is missing or names anything by a wildcard at the top level.
    """
    project = tomllib.loads(top_level(app, "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project.get("tool", {}).get("flwr", {}).get("app", {}).get("fab-include", [])
    names = {pattern.strip("/").split("/")[0] for pattern in patterns}
    if not names or any(character in name for name in names for character in "*?[!"):
        return app
    into.mkdir()
    for entry in (top_level(app, name) for name in sorted(names.union(BESIDE))):
        if entry.is_symlink():  # Flower leaves them out
            continue
        if entry.is_dir():
            shutil.copytree(
                entry, into / entry.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif entry.is_file():
            shutil.copyfile(entry, into / entry.name)
    shutil.rmtree(into / PACKED, ignore_errors=True)  # fab-exclude may only name what a checkout has
    return into
