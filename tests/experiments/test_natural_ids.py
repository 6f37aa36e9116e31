"""A run whose clients are people of the data: their names in tables, files, messages and exports."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from pbfl_flwr.runs.directory import RunDirectory
from tests.small_runs import pbfl, refused

PEOPLE = ("ada", "bob", "zoe")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("natural")
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 2
    np.savez(folder / "people.npz", x=x, y=y, client=np.repeat(PEOPLE, 20))
    keys = {
        "dataset": "npz",
        "data-dir": folder / "people.npz",
        "partition": "natural",
        "num-clients": 3,
        "models": "mlp-8",
        "feature-dim": 8,
        "num-server-rounds": 2,
        "mods": "late:bob_once",
        "failure-policy": "continue",
    }
    (folder / "late.py").write_text(
        "def bob_once(message, context, app):\n"
        "    if message.metadata.message_type.startswith('train') and context.node_config.get('partition-id') == 1:\n"
        "        raise ValueError('the camera is gone')\n"
        "    return app(message, context)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{Path.cwd()}")
        patch.syspath_prepend(folder)
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        done = pbfl("run", *sets, "--run-dir", folder / "run", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "client bob failed" in done.output
    return folder / "run"


def test_tables_and_files(run: Path) -> None:
    shown = pbfl("show", run).output
    rows = [line.split()[:3] for line in shown.splitlines()]
    assert [row for row in rows if row[1:2] and row[1] in PEOPLE and row[2] == "mlp-8"] == [
        ["0", "ada", "mlp-8"],
        ["1", "bob", "mlp-8"],
        ["2", "zoe", "mlp-8"],
    ]
    table = csv.DictReader(pbfl("show", run, "--format", "csv").output.splitlines())
    assert {(row["client"], row["name"]) for row in table} >= {("0", "ada"), ("2", "zoe")}
    document = json.loads(pbfl("show", run, "--format", "json").output)
    assert {failure["name"] for failure in document["failures"]} == {"bob"}
    assert [client.natural_id for client in RunDirectory(run).record().clients] == [*PEOPLE]


def test_exports(run: Path, tmp_path: Path) -> None:
    done = pbfl("export", run, "--client", "zoe", "--out", tmp_path / "zoe")
    assert done.output.startswith("client zoe, fedproto, mlp-8"), done.output
    card = json.loads((tmp_path / "zoe/card.json").read_text())["card"]
    assert (card["client"], card["natural_id"]) == ("2", "zoe")
    assert "holds no client eve" in refused("export", run, "--client", "eve", "--out", tmp_path / "eve")
