"""Which pbfl-flwr runs where: the same code has one name, and a federation of several says so."""

import shutil
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest

import pbfl_flwr
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import results
from pbfl_flwr.experiments.report import version_sheet
from pbfl_flwr.flower.client import handshake as client_handshake
from pbfl_flwr.flower.code_version import NOT_SENT, code_version
from pbfl_flwr.flower.server import recorder
from pbfl_flwr.runs.directory import RunDirectory
from tests.flower.inprocess import federation
from tests.flower.sites import run, sites

PACKAGE = Path(pbfl_flwr.__file__).parent


def code_version_of(package: Path) -> str:
    with patch.object(pbfl_flwr, "__file__", str(package / "__init__.py")):
        return code_version.__wrapped__()


def test_code_version_ignores_what_is_not_sent() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["fab-exclude"] == [
        f"pbfl_flwr/{name}" if name.endswith(".py") else f"pbfl_flwr/{name}/**" for name in NOT_SENT
    ]


def test_sent_and_installed_code_have_the_same_version(tmp_path: Path) -> None:
    sent = tmp_path / "pbfl_flwr"
    shutil.copytree(
        PACKAGE,
        sent,
        ignore=shutil.ignore_patterns("__pycache__", "*.toml", *(part.split("/")[-1] for part in NOT_SENT)),
    )
    assert code_version_of(sent) == code_version() == code_version_of(PACKAGE)
    assert code_version().startswith(f"{pbfl_flwr.__version__}-")
    (sent / "seeds.py").write_text((sent / "seeds.py").read_text() + "\n")
    assert code_version_of(sent) != code_version()


@pytest.mark.parametrize("message", ["0.0.9-0badc0de", "", None])
def test_warns_once_of_differing_code_versions(message: str | None, tmp_path: Path) -> None:
    with patch.object(client_handshake, "code_version", code_version if message is None else lambda: message):
        fed = federation(tmp_path, on_disk=True).run()
    expected = (
        f"pbfl-flwr 0.0.9-0badc0de on client 0, 1, 2, 3, 4, {code_version()} on the server: install the same one, or "
        "start the run with the app that brings its own code"
    )
    times = [line.warnings.count(expected) for line in fed.strategy.history]
    assert times == ([1, 0] if message else [0, 0])
    assert all(
        client.code_version == (code_version() if message is None else message)
        for client in fed.directory.record().clients
    )


def test_a_resumed_run_says_what_its_later_rounds_were_made_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation(tmp_path, on_disk=True, num_server_rounds=1).run()

    def resumed(version: str, rounds: int) -> RunDirectory:
        fed = federation(tmp_path, on_disk=True, num_server_rounds=rounds, resume=True)
        with (
            patch.object(recorder, "code_version", lambda: version),
            patch.object(client_handshake, "code_version", lambda: version),
        ):
            return fed.run().directory

    run = resumed("new", 2)
    record = run.record()
    (change,) = record.changes
    assert (change.from_round, change.versions) == (2, {**record.versions, "pbfl-flwr": "new"})
    assert f"from round 2 on with pbfl-flwr new, before {code_version()}; run.json says so" in caplog.messages
    assert {client.code_version for client in record.clients} == {"new"}
    # One that made no round is not shown, nor taken for what was before.
    resumed("unused", 2)
    shown = {row[0]: row[1] for row in version_sheet(results.load([run.path])).rows}
    assert shown == {**record.versions, "pbfl-flwr": f"{code_version()}; from round 2 on new"}
    caplog.clear()
    resumed("new", 3)
    assert not [line for line in caplog.messages if "with pbfl-flwr new" in line]
    assert run.record().changes == [change]


def test_refusing_device_mentions_its_code_version(tmp_path: Path) -> None:
    a, b = sites(tmp_path, "a", "b")
    nodes = [a, {**b, "model": "resnet9000"}]
    refused = "^1 of 2 clients: client-id = 'b': models = 'resnet9000': unknown model 'resnet9000'; "
    both = f"; this device runs pbfl-flwr 0.0.9-0badc0de, the server {code_version()}: install the same one$"
    with (
        patch.object(client_handshake, "code_version", lambda: "0.0.9-0badc0de"),
        pytest.raises(PbflError, match=f"{refused}.*{both}"),
    ):
        run(tmp_path, nodes).run()
    with pytest.raises(PbflError, match=refused) as error:
        run(tmp_path, nodes, "again").run()
    assert "this device runs" not in str(error.value)
