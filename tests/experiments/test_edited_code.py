"""A method of one's own that is edited between two runs: no old figures for new code, no run of both by accident."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.execute import several
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.engines.local import federate
from pbfl_flwr.flower.engines.placement import Resources, Slot
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.runs.directory import RunDirectory, RunRefused
from pbfl_flwr.runs.records import RunRecord
from pbfl_flwr.strategies import strategy_of
from tests.flower.inprocess import InProcessGrid, tiny_data
from tests.small_runs import edit, entry, pbfl, planned_of, refused, terminal, write_run

METHOD = """
from dataclasses import dataclass
from pbfl_flwr.methods.fedproto import build as base
from my_factor import FACTOR
from pbfl_flwr.methods.local import Local

@dataclass(frozen=True)
class Mine(Local):
    factor: float = FACTOR

def build(settings): return Mine()
"""
KEYS: dict[str, Scalar] = {
    "method": "my_method:build",
    "num-clients": 2,
    "num-server-rounds": 1,
    "max-samples": 200,
}
ONE = Resources(workers=1)
Edit = Callable[[float], None]


@pytest.fixture
def edit_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edit:
    """Edit the module that the method imports; what is imported next is as in a new process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_method.py").write_text(METHOD)

    def new_factor(factor: float) -> None:
        (tmp_path / "my_factor.py").write_text(f"FACTOR = {factor}\n")
        for name in ("my_method", "my_factor"):
            sys.modules.pop(name, None)

    new_factor(1.0)
    return new_factor


def record(run: Path | str) -> RunRecord:
    return RunDirectory(run).record()


def test_a_comparison_runs_again_what_was_made_with_other_code_and_keeps_it(edit_factor: Edit) -> None:
    common = "\n".join(f"{key} = {json.dumps(value)}" for key, value in KEYS.items())
    Path("two.toml").write_text(f"[common]\n{common}\n[runs.Mine]\n[runs.Local]\nmethod = 'local'\n")
    compare = ("compare", "two.toml", "--workers", 1)
    assert "2 of 2 runs are to be run\n" in pbfl(*compare).output
    assert "0 of 2 runs are to be run\n" in pbfl(*compare).output
    old = record("runs/two/Mine-seed0")
    assert old.method["factor"] == 1.0
    assert [*old.code] == ["my_method:build"]
    assert record("runs/two/Local-seed0").code == {}

    edit_factor(2.0)
    line = (
        "made before my_method:build was edited, to be run again and then kept in "
        f"{Path.cwd()}/runs/two/other-code: Mine, seed 0; --set new-code=true takes them as they are\n"
    )
    dry = pbfl(*compare, "--dry-run")
    assert line in dry.output
    assert "to run again" in dry.output
    assert "0 of 2 runs are to be run" in pbfl(*compare, "--dry-run", "--set", "new-code=true").output
    assert record("runs/two/Mine-seed0") == old

    other = pbfl(*compare, "--only", "Local").output
    assert (
        "made before my_method:build was edited and not chosen, so not in the tables: Mine, seed 0\n" in other
    )
    again = pbfl(*compare)
    assert f"{line}1 of 2 runs are to be run\n" in again.output
    (kept,) = Path("runs/two/other-code").iterdir()
    assert kept.name == f"Mine-seed0-{old.experiment[-8:]}"
    assert record(kept) == old
    assert record("runs/two/Mine-seed0").method["factor"] == 2.0
    assert "0 of 2 runs are to be run\n" in pbfl(*compare).output


def test_runs_side_by_side_begin_anew_in_the_place_of_what_is_kept(edit_factor: Edit, tmp_path: Path) -> None:
    (planned,) = planned_of({"Mine": {**KEYS, "feature-dim": 4}}, [], [0], [], tmp_path)
    old = write_run(planned.directory, [entry(1, 0.5, 0.5)], **KEYS)
    edit(old / "run.json", code={"my_method:build": "of another source"}, experiment="x-12345678")
    (old / ".lock").touch()
    say_what_is_there = [sys.executable, "-c", f"import os; print(os.listdir({str(old)!r}))"]
    assert not several.run_in_parallel(
        [planned], [Slot(1)], lambda run, slot: say_what_is_there, terminal(), lambda run: None
    )
    assert (old / "pbfl.log").read_text() == "['pbfl.log']\n"
    assert {"run.json", "rounds.jsonl"} < {
        file.name for file in (tmp_path / "other-code/Mine-seed0-12345678").iterdir()
    }


def test_a_run_of_code_that_was_edited_after_the_command_began_is_named(
    edit_factor: Edit, tmp_path: Path
) -> None:
    (planned,) = planned_of({"Mine": {**KEYS, "feature-dim": 4}}, [], [0], [], tmp_path / "out")
    made = write_run(tmp_path / "made", [entry(1, 0.5, 0.5)], **KEYS)
    edit(made / "run.json", code={"my_method:build": "of another source"})
    moving = [
        sys.executable,
        "-c",
        f"import shutil; shutil.copytree({str(made)!r}, {str(planned.directory)!r}, dirs_exist_ok=True)",
    ]
    (said,) = several.run_in_parallel(
        [planned], [Slot(1)], lambda run, slot: moving, terminal(), lambda run: None
    )
    assert said.startswith("Mine, seed 0: my_method:build was edited meanwhile, so it is in no table until ")


def run_here(**keys: Scalar) -> RunRecord:
    federate("run", {**KEYS, **keys}, 2, ONE)
    return record("run")


def test_a_run_goes_on_with_other_code_only_if_asked_and_says_since_when(edit_factor: Edit) -> None:
    first = run_here()
    before = Path("run/run.json").read_bytes()
    edit_factor(2.0)
    with pytest.raises(
        RunRefused, match=r"my_method:build was edited since; new-code = true goes on with it"
    ):
        run_here(**{"num-server-rounds": 3, "resume": True})
    again = ("run", "--resume", "run", "--import", "my_method:build")
    assert refused(*again, "--set", "num-server-rounds=3") == (
        "error: my_method:build: edited since the run was made; --set new-code=true goes on with it, and run.json says "
        "from which round on"
    )
    assert Path("run/run.json").read_bytes() == before

    more = (*again, "--workers", 1, "--set")
    done = pbfl(*more, "num-server-rounds=3", "--set", "new-code=true")
    assert done.exit_code == 0, done.output
    assert "code was edited during the run: other from round 2 on" in done.output
    second = record("run")
    assert (second.method, second.code) == (first.method, first.code)
    (change,) = second.changes
    assert (change.from_round, change.method["factor"]) == (2, 2.0)
    assert change.code.keys() == first.code.keys() != {}
    assert change.code != first.code

    assert pbfl(*more, "num-server-rounds=4").exit_code == 0  # same code: nothing to ask, nothing to say
    assert record("run").changes == second.changes
    edit_factor(3.0)
    assert pbfl(*more, "num-server-rounds=5").exit_code == 2  # asked for each time


def test_code_that_is_edited_after_it_was_imported_starts_no_run(edit_factor: Edit, tmp_path: Path) -> None:
    run_here()
    (tmp_path / "my_factor.py").write_text("FACTOR = 2.0\n")
    with pytest.raises(
        PbflError, match=r"^'my_method:build': its source was edited since this process import"
    ):
        federate("another", KEYS, 2, ONE)
    assert not RunDirectory("another").taken


def test_edited_code_starts_no_run_without_a_directory(edit_factor: Edit, tmp_path: Path) -> None:
    def new() -> MethodStrategy:
        return strategy_of("my_method:build", num_clients=2, num_server_rounds=1, feature_dim=8)

    def run(strategy: MethodStrategy) -> None:
        strategy.start(InProcessGrid(make_client_app(tiny_data, strategy.settings), {}, 2))

    run(first := new())
    (tmp_path / "my_factor.py").write_text("FACTOR = 2.0\n")
    for strategy in (new(), first):
        with pytest.raises(PbflError, match=r"^'my_method:build': its source was edited since this process"):
            run(strategy)
