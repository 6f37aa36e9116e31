"""Imports point down, also through other modules: read from the source, so that nothing has to be loaded."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from pbfl_flwr.methods import METHODS, SECTIONS
from tests.small_runs import entry, write_run

ROOT = Path(__file__).resolve().parents[1]
APPS = ("client_app", "server_app")
# A package or module may import what stands before its own line, and its own line.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "seeds", "util"),
    ("task", "config", "payloads"),
    ("runs", "sinks"),
    ("models", "data"),
    ("method",),
    ("calls",),
    ("training",),
    ("prototypes",),
    ("methods",),
    ("flower",),
    ("strategies", "serving"),
    ("testing",),
    ("experiments",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Below flower/: what clients and server share is in messages/, and devices get no engines.
APART = {
    "messages": {"client", "server", "engines", "deploy"},
    "client": {"server", "engines", "deploy"},
    "server": {"client", "engines", "deploy"},
    "deploy": {"engines"},
}

# Below experiments/: results, then tables, then plans of runs, then what executes them.
EXPERIMENTS: tuple[tuple[str, ...], ...] = (
    ("console", "statistics"),
    ("results", "tables"),
    ("notes",),
    ("summary", "pairs", "run_tables", "status", "run_export", "artefacts"),
    ("show", "pictures", "new_clients"),
    ("report",),
    ("plan",),
    ("execute", "catalogue"),
)

Graph = Mapping[str, set[str]]


def import_graph(root: Path, packages: Iterable[str]) -> dict[str, set[str]]:
    """Return module -> the names that it imports, also within functions: modules of the packages, else as written."""
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for package in packages
        for file in (root / package).rglob("*.py")
    }

    def module_of(name: str) -> str:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in files), name)

    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        names: list[str] = []
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: a relative import"
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        graph[module] = {module_of(name) for name in names} - {module}
    return graph


def chains(graph: Graph, start: str) -> dict[str, str]:
    """Return every module that importing ``start`` loads -> the chain of imports that leads to it."""
    found = {start: start}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        for target in sorted(graph[module]):
            if target in graph and target not in found:
                found[target] = f"{found[module]} -> {target}"
                waiting.append(target)
    return found


GRAPH = import_graph(ROOT, ("pbfl_flwr", *APPS))
EDGES = [(module, target) for module, targets in GRAPH.items() for target in sorted(targets)]


def part(module: str, depth: int = 1) -> str:
    """Return the package or module below pbfl_flwr that a module belongs to; "" for pbfl_flwr itself and others."""
    parts = module.split(".")
    return parts[depth] if parts[0] == "pbfl_flwr" and len(parts) > depth else ""


def test_every_module_has_a_layer() -> None:
    assert {part(module) for module in GRAPH} - {""} == set(RANK)


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, target in EDGES
        if part(module) and part(target) and RANK[part(target)] > RANK[part(module)]
    ]
    assert wrong == []
    assert [target for target in GRAPH["pbfl_flwr"] if target.startswith("pbfl_flwr")] == []


def test_imports_within_experiments_run_one_way() -> None:
    ranks = {name: rank for rank, names in enumerate(EXPERIMENTS) for name in names}
    inside = [(m, t) for m, t in EDGES if part(m) == part(t) == "experiments" and part(m, 2) and part(t, 2)]
    wrong = [f"{m} imports {t}" for m, t in inside if ranks[part(t, 2)] > ranks[part(m, 2)]]
    assert wrong == []
    modules = {part(m, 2) for m in GRAPH if part(m) == "experiments"} - {""}
    assert modules == set(ranks)


def test_only_flower_and_the_apps_import_flwr() -> None:
    importers = {module for module, target in EDGES if target.split(".")[0] == "flwr"}
    assert {m for m in importers if part(m) != "flower" and m.split(".")[0] not in APPS} == set()
    assert importers


def test_nobody_imports_the_apps_and_they_import_no_commands() -> None:
    tops = [(module, target) for module, target in EDGES if target.split(".")[0] in APPS]
    assert [edge for edge in tops if edge[0].split(".")[0] != edge[1].split(".")[0]] == []
    loaded = {part(name) for app in APPS for name in chains(GRAPH, f"{app}.app")}
    assert loaded & {"experiments", "cli", "serving"} == set()


def test_clients_and_server_do_not_reach_each_other_nor_what_starts_runs() -> None:
    wrong = [
        chain
        for module in GRAPH
        if part(module) == "flower"
        for target, chain in chains(GRAPH, module).items()
        if part(target) == "flower" and part(target, 2) in APART.get(part(module, 2), set())
    ]
    assert wrong == []


def test_an_import_through_another_module_is_seen(tmp_path: Path) -> None:
    for name, text in {
        "p/__init__.py": "",
        "p/a.py": "def f():\n    from p.b import g\nimport flwr.app",
        "p/b.py": "from p import c",
        "p/c.py": "g = 1",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    graph = import_graph(tmp_path, ["p"])
    assert graph["p.a"] == {"p.b", "flwr.app"}
    assert chains(graph, "p.a")["p.c"] == "p.a -> p.b -> p.c"


def test_the_package_has_at_most_8_modules_at_its_root() -> None:
    assert len(list((ROOT / "pbfl_flwr").glob("*.py"))) <= 8


def test_commands_that_only_read_do_not_load_slow_libraries(tmp_path: Path) -> None:
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
        ["run", "--set", "nonsense=1", "--set", "method=fedprot", "--set", "dataset=digit"],
        *([name, "--set", "nonsense=1"] for name in ("sweep",)),
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
    codes = [0] * (len(commands) - 5) + [2] * 5
    expected = [f"{code} [] {command}" for code, command in zip(codes, commands, strict=True)]
    assert done.stdout.splitlines() == expected


def test_methods_with_keys_of_their_own_are_marked_in_the_table() -> None:
    for name, method in METHODS.items():
        module = import_module(method.build.__module__)
        assert method.section is getattr(module, "Config", None)
        assert (name in SECTIONS) == hasattr(module, "Config")
