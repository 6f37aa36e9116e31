"""What the documentation tells people to type is accepted, and what it links to is there."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.main import get_command

from pbfl_flwr.cli import app
from pbfl_flwr.config import Settings, parse
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan import configuration, reproduction
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.deploy.local_federation import node_config
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.strategies import TinyProto
from tests.flower.inprocess import InProcessGrid
from tests.small_runs import pbfl

ROOT = Path(__file__).parents[1]
EXAMPLES = "PYTHONPATH=docs/examples"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def commands(name: str) -> list[tuple[str, str]]:
    """(page, command line) of every line that calls ``pbfl <name>``, continued lines joined."""
    calls: list[tuple[str, str]] = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        lines = re.findall(rf"^\s*(?:{EXAMPLES} )?(pbfl {name} [^\n]*)", text, re.MULTILINE)
        calls.extend((str(page.relative_to(ROOT)), line.split("   #")[0].strip()) for line in lines)
    return calls


@pytest.mark.parametrize(
    ("page", "line"),
    [call for name in ("run", "compare", "sweep", "reproduce") for call in commands(name)],
)
def test_documented_runs_are_accepted(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the check of data and networks, which a machine may not have."""

    def ready(settings: Settings, resources: Resources, loaded: LoadedData) -> None:
        raise PbflError("ready")

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    comparison = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    Path("mine.toml").write_text(comparison[0] if " compare " in line else "")
    monkeypatch.setattr(configuration, "preflight", ready)
    monkeypatch.setattr(reproduction, "absent", lambda planned: {})
    words = shlex.split(line.replace("<", "").replace(">", ""))
    assert pbfl(*words[1:]).stderr == "error: ready\n"


@pytest.mark.parametrize(
    ("page", "line"),
    [call for name in ("certs", "keys", "doctor", "deploy", "check-data") for call in commands(name)],
)
def test_documented_commands_have_valid_arguments(page: str, line: str) -> None:
    command: Any = get_command(app)
    words, context = shlex.split(line)[1:], None
    while hasattr(command, "resolve_command"):
        context = command.make_context("pbfl", words, parent=context, resilient_parsing=True)
        _, command, words = command.resolve_command(context, words)
    command.make_context("pbfl", words, parent=context)
    local = words if " deploy local" in line else []
    keys = [words[i + 1] for i, word in enumerate(local) if word == "--set"]
    configuration.check(configuration.gather(None, keys))
    for node in (words[i + 1] for i, word in enumerate(local) if word == "--node"):
        assert node_config(node)


def test_the_quick_starts_flwr_run_has_valid_keys() -> None:
    text = (ROOT / "docs" / "quick-start.md").read_text()
    configs = re.findall(r'--run-config "([^"]*)"', text)
    assert len(configs) == 2
    for config in configs:
        build_method(parse(configuration.gather(None, shlex.split(config)).values, SECTIONS))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_anchors_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if not (linked := page.parent / target if target else page).exists()
        or (anchor and anchor not in anchors(linked))
    ]
    named = re.findall(r"\b(?:tests|benchmarks|docs|pbfl_flwr)/[\w./-]*\.\w+", text)
    assert missing + [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_page_and_says_how_it_differs(name: str) -> None:
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    module = METHODS[name].build.__module__
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
    for word in ("Round:", "Travels:", "Predicts:", "Differs from"):
        assert word in source, f"{module} does not say '{word}'"
    assert re.search(rf"^\s*pbfl (run .*(method=)?{name}|compare {name})", page, re.MULTILINE), (
        "it has no command"
    )
    section = METHODS[name].section
    keys = [] if section is None else section.key_names()
    assert [key for key in keys if key not in page] == []


def test_pages_of_methods_give_the_defaults_of_their_keys() -> None:
    found = 0
    for name, section in SECTIONS.items():
        page = (ROOT / "docs" / "methods" / f"{name}.md").read_text().partition("\n| key | default |")[2]
        for key, stated in re.findall(rf"^\| `{name}\.([a-z-]+)` \| `?([^`| ]+)", page, re.MULTILINE):
            default = section().model_dump(by_alias=True)[key]
            assert (stated if isinstance(default, str) else json.loads(stated)) == default, f"{name}.{key}"
            found += 1
    assert found > 70


def test_the_page_of_privacy_says_what_every_method_sends() -> None:
    text = (ROOT / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\| ([^|]*) \|", text[: text.index("## Settings")], re.MULTILINE)
    assert [name for name in METHODS if not any(f"`{name}`" in row for row in rows)] == []


def test_the_readme_links_only_methods_that_exist() -> None:
    linked = re.findall(r"\(docs/methods/(.+?)\.md\)", (ROOT / "README.md").read_text())
    assert len(linked) > 20
    assert {*linked} - {*METHODS} == {"cps-ppa-cpkd"}  # settings of FedProto and FedTGP


def test_the_reference_names_what_exists() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"auto(module|class|function):: (\S+)\n(?:   :members:(.*)\n)?", text)
    assert len(blocks) > 20
    for kind, name, members in blocks:
        documented = import_module(name) if kind == "module" else resolve_name(name)
        for member in filter(None, members.replace(" ", "").split(",")):
            assert hasattr(documented, member), f"{name} has no {member}"


def generator(name: str) -> Callable[[], str]:
    """Return a function of docs/keys.py."""
    function: Callable[[], str] = run_path(str(ROOT / "docs" / "keys.py"))[name]
    return function


def test_the_rules_on_the_page_of_privacy_are_those_there_are() -> None:
    assert generator("rules_table")() in (ROOT / "docs" / "privacy.md").read_text(), "make keys"


def test_every_key_has_a_description() -> None:
    rows = [line for line in generator("keys_page")().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [line for line in rows if re.search(r"\| (\[[^|]*\] )?\|$", line)] == []  # its kind alone


def test_the_library_page_is_a_script_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL)
    page = ModuleType("library_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # as __main__ is in a notebook
    names: dict[str, Any] = vars(page)
    exec(compile(blocks[0], "docs/library.md", "exec"), dict(names))  # the script may run again
    for number, block in enumerate(blocks):  # each is a cell
        exec(compile(block, f"docs/library.md, block {number}", "exec"), names)
    assert len([*tmp_path.glob("runs/*/run.json")]) == 3
    assert len([*tmp_path.glob("runs/*-compared/*/run.json")]) == 9
    assert [group.label for group in names["groups"]] == ["fedproto", "local", "tinyproto"]
    assert names["comparison"].n == 3
    assert names["points"].shape == (sum(len(labels) for labels in names["digits"]) + 10, 64)
    assert names["by_hand_strategy"].history[-1].failures == []
    assert set(names["by_hand_strategy"].history[-1].accuracy) == {"head", "global"}
    assert torch.allclose(names["combined"].values, names["means"])
    assert names["drawn"].shape == (5 * 16, 16)
    assert "did you mean 'batch-size'?" in capsys.readouterr().out
    assert [line.round for line in names["run"].round_records()] == [1, 2]
    assert (names["restored"] != 0).sum() == 5 * 4
    assert names["baseline"].method.name == "fedgh"
    strategy = TinyProto(base="fedtgp", cps_dim=8, state_dir=str(tmp_path / "state"), **names["common"])
    strategy.start(InProcessGrid(make_client_app(names["my_data"], strategy.settings), {}, 3))
    assert strategy.history[-1].trained == [0, 1, 2]
