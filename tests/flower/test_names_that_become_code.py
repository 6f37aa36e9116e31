"""A name becomes code only if this process's owner wrote it: nothing from a message or a file is imported."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from rich.console import Console

import pbfl_flwr
from pbfl_flwr.config import GROUPS, Group, Scalar, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.execute import deployment
from pbfl_flwr.experiments.plan.configuration import check_allowed
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.client.worker import DataSource
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import UserCode, import_function, own_code
from tests.flower.inprocess import InProcessGrid, configuration, scripted, tiny_data
from tests.small_runs import edit, entry, pbfl, refused, write_run

SPY = "spy_of_imports:build"
TASK = Task(10, 16, (1, 16, 16))
IMPORTS = (
    "import_module",
    "__import__",
    "exec",
    "eval",
    "run_path",
    "run_module",
    "exec_module",
    "load_module",
)


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that exists once the module SPY was imported, which then ends the process."""
    mark = tmp_path / "imported"
    module = tmp_path / f"{SPY.partition(':')[0]}.py"
    module.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nraise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield mark
    sys.modules.pop(module.stem, None)


def text_keys() -> Iterator[tuple[str, str]]:
    """(method, key) of every key that can hold a text: the common ones, and those of every method."""

    def texts(group: type[Group]) -> Iterator[str]:
        for name in group.key_names():
            try:
                group.model_validate({name: SPY})
            except ValueError:
                continue
            yield name

    for group in GROUPS.values():
        yield from (("fedproto", key) for key in texts(group))
    for method, section in SECTIONS.items():
        yield from ((method, f"{method}.{key}") for key in texts(section))


KEYS = list(text_keys())


def ask_device(
    config: dict[str, Scalar], node: dict[str, Scalar], data: DataSource | None = tiny_data
) -> Message:
    """The device's reply to the handshake."""
    context = Context(
        run_id=1, node_id=1, node_config=dict(node), state=RecordDict(), run_config=dict(config)
    )
    query = Message(
        wire.content(config=ConfigRecord({"experiment": "e"})),
        dst_node_id=1,
        message_type="query",
        group_id="handshake",
    )
    query.metadata.__dict__["_message_id"] = "1"
    return make_client_app(data)(query, context)


def test_the_walk_finds_the_keys_that_name_code() -> None:
    keys = {key for _, key in KEYS}
    assert {
        "method",
        "models",
        "dataset",
        "partition",
        "aggregation",
        "fml.auxiliary",
        "fedkd.auxiliary",
        "fedmrl.auxiliary",
    } <= keys


@pytest.mark.parametrize(("method", "key"), KEYS)
def test_device_imports_nothing_that_a_server_names(
    tmp_path: Path, imported: Path, method: str, key: str
) -> None:
    config = {**configuration(tmp_path, method), key: SPY}
    reply = ask_device(config, {"client-id": 0, "state-dir": str(tmp_path)})
    assert not imported.exists()
    if key in ("method", "models", "aggregation") or key.endswith(".auxiliary"):
        assert reply.has_error()
        assert f"{key} = '{SPY}' names code to import" in str(reply.error.reason)


@pytest.mark.parametrize(
    ("method", "key", "node"),
    [
        ("fedproto", "models", {"model": SPY}),
        ("fedproto", "method", {"allow-code": f"os:getcwd, {SPY}"}),
        ("fedproto", "aggregation", {"allow-code": SPY}),
        ("fml", "fml.auxiliary", {"allow-code": SPY}),
    ],
)
def test_device_imports_what_its_owner_names(
    tmp_path: Path, imported: Path, method: str, key: str, node: dict[str, Scalar]
) -> None:
    config = {**configuration(tmp_path, method), key: SPY}
    reply = ask_device(config, {"client-id": 0, "state-dir": str(tmp_path), **node})
    assert imported.exists()
    assert "raised SystemExit: 0" in str(reply.error.reason)  # and the device goes on


@pytest.mark.parametrize("key", ["dataset", "partition"])
def test_device_deals_data_by_functions_of_its_owner_alone(tmp_path: Path, imported: Path, key: str) -> None:
    config = {**configuration(tmp_path, "fedproto"), key: SPY}
    node: dict[str, Scalar] = {"client-id": 0, "state-dir": str(tmp_path)}
    refused = ask_device(config, node, None)
    assert f"{key} = '{SPY}' names code to import" in str(refused.error.reason)
    assert not imported.exists()
    allowed = ask_device(config, {**node, "allow-code": SPY}, None)
    assert imported.exists()
    assert "raised SystemExit: 0" in str(allowed.error.reason)


def test_device_reads_its_data_by_the_function_that_it_names(tmp_path: Path, imported: Path) -> None:
    node: dict[str, Scalar] = {
        "client-id": 0,
        "state-dir": str(tmp_path),
        "data-path": str(tmp_path),
        "dataset": SPY,
    }
    reply = ask_device(configuration(tmp_path, "fedproto"), node, None)
    assert imported.exists()
    assert f"dataset = '{SPY}': importing " in str(reply.error.reason)


@pytest.mark.parametrize("method", METHODS)
def test_server_imports_nothing_that_a_client_declares(tmp_path: Path, imported: Path, method: str) -> None:
    """Neither does it end: what does not fit is refused, and nobody answers the rounds of the others."""

    def fails(client: int, number: int) -> Message:
        query = Message(RecordDict(), dst_node_id=1, message_type="train")
        return Message(Error(code=2, reason="no"), reply_to=query)

    config = configuration(tmp_path, method, feature_dim=TASK.feature_dim, num_clients=2)
    grid = InProcessGrid(scripted(TASK, fails, SPY), config, 2)
    with pytest.raises(PbflError):
        MethodStrategy(parse(config, SECTIONS)).start(grid)
    assert not imported.exists()


def test_server_checks_the_heads_of_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "from pbfl_flwr.models.build import build_model\n"
        "def deep(task):\n"
        "    model = build_model('cnn4', task, 0)\n"
        "    model.head = nn.Sequential(nn.Linear(task.feature_dim, 5), nn.Linear(5, task.num_classes))\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = configuration(tmp_path, "fedgh", models="own_net:deep", feature_dim=16, num_clients=2)
    grid = InProcessGrid(scripted(TASK, lambda client, number: RecordDict(), "own_net:deep"), config, 2)
    with pytest.raises(PbflError, match="exchanges classifiers and needs the classifier head"):
        MethodStrategy(parse(config, SECTIONS)).start(grid)


def test_device_checks_the_head_of_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_server_checks_the_heads_of_its_own_code(tmp_path, monkeypatch)  # writes the module
    reply = ask_device(
        configuration(tmp_path, "fedgh"),
        {"client-id": 0, "state-dir": str(tmp_path), "model": "own_net:deep"},
    )
    assert "method 'fedgh' exchanges classifiers and needs the classifier head.weight" in str(
        reply.error.reason
    )


def test_no_message_or_file_yields_a_name_of_code() -> None:
    (name,) = architectures(SPY, [SPY])
    assert isinstance(name, UserCode)
    assert name == SPY
    settings = parse({"models": SPY}, SECTIONS)
    travelled = [
        json.loads(json.dumps({"name": name}))["name"],
        str(ConfigRecord({"name": name})["name"]),
        settings.model_validate_json(settings.model_dump_json()).models.models,
        str(name),
        architectures(SPY)[0],
        own_code(SPY, ["other:build"]),
    ]
    for text in travelled:
        assert not isinstance(text, UserCode)
        with pytest.raises(PbflError, match=f"^models = '{SPY}' names code to import"):
            build_model(text, TASK, 0)


def test_allowing_nothing_holds_for_every_key(imported: Path) -> None:
    """As for a configuration in a run directory that somebody else wrote."""
    for keys in ({"method": SPY}, {"aggregation": SPY}, {"method": "fml", "fml.auxiliary": SPY}):
        with pytest.raises(PbflError, match="names code to import"):
            build_method(parse(keys, SECTIONS).allowing(()))
    assert not imported.exists()


@pytest.mark.parametrize("key", ["method", "mods", "models", "dataset", "partition", "aggregation"])
def test_resuming_imports_nothing_that_only_the_run_names(tmp_path: Path, imported: Path, key: str) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2, key: SPY})
    said = f"error: '{run}' names code to import; if it is yours: --import {SPY}"
    assert refused("run", "--resume", run, "--dry-run") == said
    assert refused("run", "--resume", run, "--import", "os:getcwd") == said
    assert f"pbfl run --resume {run} --import {SPY}" in pbfl("show", run).stdout
    assert not imported.exists()
    for allowed in (["--import", SPY], ["--set", f"{key}={SPY}"]):
        pbfl("run", "--resume", run, "--dry-run", *allowed)
        assert imported.exists(), allowed
        imported.unlink()
    assert refused("run", "--import", SPY).startswith("error: --import: allows code")


def test_names_of_classes_are_no_code(tmp_path: Path) -> None:
    keys = {"labels": "lesion:benign,lesion:malignant", "label-column": "kind:of"}
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2, **keys})
    assert "--import" not in pbfl("show", run).stdout
    with pytest.raises(PbflError, match=f"^a file names code to import; if it is yours: --import {SPY}$"):
        check_allowed("a file", (), keys, {**keys, "models": SPY})
    check_allowed("a file", (), keys)


def test_resuming_supernodes_imports_nothing_that_only_their_file_names(
    tmp_path: Path, imported: Path
) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2})
    clients = json.loads((run / "run.json").read_text())["clients"]
    edit(run / "run.json", clients=[{**client, "simulated": False} for client in clients])
    node = {"client-id": 0, "state-dir": str(run / "clients/0"), "allow-code": f"os:getcwd, {SPY}"}
    (run / "nodes.json").write_text(json.dumps({"nodes": [node], "secure": True}))
    command = pbfl("show", run).stdout
    assert f"--import {SPY} --import os:getcwd" in command or f"--import os:getcwd --import {SPY}" in command
    said = f"error: '{run}' names code to import; if it is yours:"
    assert refused("deploy", "local", "--resume", run, "--import", "os:getcwd") == f"{said} --import {SPY}"
    both = " ".join(f"--import {name}" for name in sorted([SPY, "os:getcwd"]))
    assert refused("deploy", "local", "--resume", run) == f"{said} {both}"
    assert not imported.exists()


def test_the_command_that_resumes_supernodes_names_their_code_before_they_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(deployment, "follow_run", lambda *given: told.append(given[-1]))
    nodes: list[dict[str, Scalar]] = [
        {"client-id": 0, "state-dir": "0", "model": "a:b"},
        {"client-id": 1, "state-dir": "1", "allow-code": "c:d"},
    ]
    settings = parse({"method": "local"}, SECTIONS)
    plan = deployment.Plan(tmp_path / "run", {"method": "e:f"}, settings, nodes, False)
    deployment.start(tmp_path, plan, Console())
    assert told == [f"pbfl deploy local --resume {tmp_path / 'run'} --import a:b --import c:d --import e:f"]


def test_no_other_place_imports_by_name() -> None:
    """Two tables of this package's own modules, and the one function that takes a UserCode."""
    package = Path(pbfl_flwr.__file__).parent
    apps = [package.parent / name / "app.py" for name in ("client_app", "server_app")]
    places: set[str] = set()
    for file in [*package.rglob("*.py"), *apps]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _called(node.func) in IMPORTS:
                places.add(f"{file.relative_to(package.parent)}: {_called(node.func)}")
    allowed = {
        "pbfl_flwr/methods/__init__.py: import_module",  # METHODS
        "pbfl_flwr/models/build.py: import_module",  # ARCHITECTURES
        "pbfl_flwr/util/user_code.py: import_module",
    }
    assert places == allowed


def _called(function: ast.expr) -> str:
    """The name of a called function; of methods, only those of importlib and runpy."""
    if isinstance(function, ast.Name):
        return function.id
    return (
        function.attr if isinstance(function, ast.Attribute) and function.attr not in ("eval", "exec") else ""
    )


def test_import_takes_no_plain_text() -> None:
    with pytest.raises(PbflError, match=r"^method = 'os:getcwd' names code to import"):
        import_function("method", "os:getcwd")
    assert callable(import_function("method", own_code("os:getcwd", ["os:getcwd"])))
