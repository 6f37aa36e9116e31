"""``--dry-run`` of what makes several runs: what each of them would be, and nothing is started."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pbfl_flwr.experiments.execute.several import show_plan
from pbfl_flwr.experiments.plan import comparison as compare
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun
from pbfl_flwr.runs.directory import RunDirectory
from tests.small_runs import entry, pbfl, planned_of, write_run

FILE = """
title = "Two methods"
[common]
dataset = "digits"
models = "mlp5"
num-clients = 2
num-server-rounds = 2
feature-dim = 4
[runs.A]
method = "fedproto"
[runs.B]
method = "local"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


def shown(planned: list[PlannedRun]) -> tuple[bool, list[list[str]], str]:
    file = io.StringIO()
    console = Console(file=file, width=300)
    fine = show_plan(planned, console)
    text = file.getvalue()
    return fine, [line.split() for line in text.splitlines()], text


def test_every_run_is_finished_or_to_resume_or_to_run_or_refused(file: Path, tmp_path: Path) -> None:
    planned = planned_of(compare.read(str(file))[1], [], [0, 1], [], tmp_path)
    there, some, other, refused = planned
    lines = [entry(number, 0.5, 0.5) for number in (1, 2)]
    write_run(there.directory, lines, **there.requested.values)
    write_run(some.directory, lines[:1], **some.requested.values)
    fine, rows, _ = shown(planned)
    assert fine
    assert [row[:-1] for row in rows[2:6]] == [
        ["A", "fedproto", "finished", "0", "2/2"],
        ["A", "fedproto", "to", "resume", "1", "1/2"],
        ["B", "local", "to", "run", "0", "0/2"],
        ["B", "local", "to", "run", "1", "0/2"],
    ]
    assert rows[2][-1] == str(there.directory)
    assert " ".join(rows[6]) == "3 of 4 runs are to be run; nothing was started"
    write_run(refused.directory, lines, **{**refused.requested.values, "learning-rate": 0.5})
    fine, rows, text = shown(planned)
    assert not fine
    assert rows[5][:5] == ["B", "local", "refused", "1", "-"]
    assert "2 of 4 runs are to be run; nothing was started" in text
    assert "B, seed 1: " in text
    assert "was run with learning-rate = 0.5" in text
    assert not other.directory.exists()


def test_a_run_that_patience_ended_lacks_nothing(file: Path, tmp_path: Path) -> None:
    planned = planned_of(
        compare.read(str(file))[1], ["num-server-rounds=9", "patience=1"], [], ["A"], tmp_path
    )
    write_run(planned[0].directory, [entry(1, 0.5, 0.5), entry(2, 0.5, 0.5)], **planned[0].requested.values)
    RunDirectory(planned[0].directory).mark_early_stop(2)
    fine, rows, _ = shown(planned)
    assert fine
    assert rows[2][:-1] == ["A", "fedproto", "finished", "0", "2/2"]


def test_a_dry_run_starts_nothing_and_checks_everything(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compare", file, "--dry-run"]
    done = pbfl(*words)
    assert done.exit_code == 0, done.stderr
    assert "2 of 2 runs are to be run; nothing was started" in done.stdout
    wrong = pbfl(*words, "--set", "data-dir=/nowhere", "--set", "dataset=npz")
    assert wrong.exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_what_a_run_would_be_warned_of_is_said_once(file: Path, tmp_path: Path) -> None:
    words = [
        "--set",
        "method=gfpl",
        "--set",
        "feature-dim=16",
        "--seeds",
        "0-1",
        "--dry-run",
        "--out",
        tmp_path,
    ]
    told = " ".join(pbfl("compare", file, *words).stdout.split())
    assert told.count("gfpl: num-server-rounds = 2: the first exchange of mixtures is in round 10") == 1


def test_a_refused_run_ends_it_with_2(file: Path, tmp_path: Path) -> None:
    first = planned_of(compare.read(str(file))[1], [], [], ["A"], tmp_path / "o")[0]
    write_run(first.directory, [entry(1, 0.5, 0.5)], **{**first.requested.values, "seed": 7})
    before = json.loads((first.directory / "run.json").read_text())
    done = pbfl("compare", file, "--engine", "processes", "--dry-run", "--out", tmp_path / "o")
    assert done.exit_code == 2
    assert "refused" in done.stdout
    assert json.loads((first.directory / "run.json").read_text()) == before
