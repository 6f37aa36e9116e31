"""Imports point down, Flower lives in one folder: read from the source, so that nothing has to be loaded."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from pbfl_flwr.methods import METHODS, SECTIONS
from tests.runs import entry, write_run

ROOT = Path(__file__).resolve().parents[1]
APPS = ("client_app", "server_app")
# A module may import what stands before its own line, and its own line.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "seeds", "util"),
    ("task", "config", "payloads"),
    ("runs", "sinks"),
    ("models", "data"),
    ("method",),
    ("training",),
    ("prototypes",),
    ("methods",),
    ("flower",),
    ("strategies", "serving"),
    ("experiments",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted(file for top in ("pbfl_flwr", *APPS) for file in (ROOT / top).rglob("*.py"))


def imported(file: Path) -> Iterator[str]:
    """Yield the full names of what a file imports, also within functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where they point"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name: str) -> str | None:
    """Return the layer of a module of pbfl_flwr, None for the package itself and for strangers."""
    parts = name.split(".")
    return parts[1] if parts[0] == "pbfl_flwr" and len(parts) > 1 and parts[1] != "__version__" else None


def home(file: Path) -> str | None:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return None if parts[-1] == "__init__" and len(parts) == 2 else layer(".".join(parts))


def test_there_is_something_to_read() -> None:
    assert len(FILES) > 40
    assert {home(file) for file in FILES} >= {
        "errors",
        "training",
        "method",
        "prototypes",
        "methods",
        "flower",
    }


def test_every_module_has_a_layer() -> None:
    assert {found for file in FILES if (found := home(file))} <= set(RANK)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file: Path) -> None:
    top = file.relative_to(ROOT).parts[0]
    own = home(file)
    for name in imported(file):
        first = name.split(".")[0]
        target = layer(name)
        if first in APPS:
            assert top == first, f"{file.name} imports {name}; apps are imported by nobody"
        if first == "flwr":
            assert own == "flower" or top in APPS, (
                f"{file.name} imports {name}; only flower/ and the apps may"
            )
        if target is None:
            continue
        if top in APPS:
            assert target not in ("experiments", "cli"), f"{file.name} imports {name}"
        elif own is None:
            raise AssertionError(f"the package itself imports {name}")
        else:
            assert RANK[target] <= RANK[own], f"{own} imports {name}, which lies above it"
        if target == "experiments":
            assert own in ("experiments", "cli"), f"{file.name} imports {name}; only the command line may"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "pbfl_flwr/flower").rglob("*.py")), ids=lambda file: file.stem
)
def test_clients_and_server_do_not_import_each_other_nor_what_starts_runs(file: Path) -> None:
    """What both sides use is in ``messages``, ``runs`` or beside them; the bundle for devices lacks the engines."""
    forbidden = {
        "client": {"server", "engines", "deploy"},
        "server": {"client", "engines", "deploy"},
        "messages": {"client", "server", "engines", "deploy"},
    }
    for name in imported(file):
        if name.startswith("pbfl_flwr.flower."):
            assert name.split(".")[2] not in forbidden.get(file.parent.name, set()), f"{file} imports {name}"


def test_an_upward_import_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from pbfl_flwr.methods import METHODS\nimport flwr.app\n")
    assert set(imported(file)) == {"pbfl_flwr.methods.METHODS", "flwr.app"}
    assert RANK["methods"] > RANK["training"]


def test_a_client_process_starts_without_what_it_may_not_need() -> None:
    """On a device every message has a new process, and these take it from seconds to tens of seconds."""
    heavy = ("matplotlib", "ray", "scipy", "sklearn", "torchvision")
    asked = f"import sys, client_app.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_commands_that_only_read_and_list_answer_without_what_takes_seconds(tmp_path: Path) -> None:
    heavy = ("torch", "flwr", "ray", "scipy", "matplotlib", "sklearn", "torchvision")
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    commands = [
        ["--help"],
        ["--version"],
        *(["list", topic] for topic in ("methods", "models", "datasets", "presets", "comparisons")),
        ["list", "reproductions"],
        ["show", str(run)],
        *(["show", str(run), "--format", form] for form in ("json", "csv")),
        ["list", "runs", str(tmp_path)],
        ["watch", str(run)],
        ["list", "keys", "privacy"],
        ["clean", str(run)],
        ["run", "--set", "nonsense=1", "--set", "method=fedprot", "--set", "dataset=digit"],
        *([name, "--set", "nonsense=1"] for name in ("sweep", "privacy")),
        *([name, "nowhere"] for name in ("compare", "reproduce", "report")),
    ]
    asked = f"""
import sys
from typer.testing import CliRunner
from pbfl_flwr.cli import app
for command in {commands}:
    result = CliRunner().invoke(app, command)
    print(result.exit_code, [name for name in {heavy} if name in sys.modules], command)
"""
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    codes = [0] * (len(commands) - 6) + [2] * 6
    expected = [f"{code} [] {command}" for code, command in zip(codes, commands, strict=True)]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("name", METHODS)
def test_the_table_of_methods_says_which_pages_have_keys_of_their_own(name: str) -> None:
    page = import_module(METHODS[name].build.__module__)
    assert METHODS[name].section is getattr(page, "Config", None)
    assert (name in SECTIONS) == hasattr(page, "Config")
