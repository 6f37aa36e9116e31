"""Sweeps: lists become combinations, combinations become runs, and runs side by side leave nothing behind."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.execute import several
from pbfl_flwr.experiments.plan import configuration, sweep
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, plan
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.flower.engines.placement import Machine, Resources, Slot
from pbfl_flwr.util.memory import available_memory
from tests.real_runs import MARK, left_behind
from tests.small_runs import entry, planned_of, printed, rows_of, terminal, write_run

SMALL = ("num-clients=2", "num-server-rounds=1", "feature-dim=4")  # keys of the runs of write_run


def runs_of(swept: sweep.Sweep, out: Path) -> list[PlannedRun]:
    return planned_of(swept.runs, [], swept.seeds, [], out)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("25,50,100", [25, 50, 100]),
        ("0.1", [0.1]),
        ("fedproto, fedtgp", ["fedproto", "fedtgp"]),
        ("true,false", [True, False]),
        ('"cnn4,resnet8"', ["cnn4,resnet8"]),
        ('["cnn4,resnet8", "cnn4"]', ["cnn4,resnet8", "cnn4"]),
        ("[1, 2]", [1, 2]),
        ("small-4", ["small-4"]),
        ("0.1, 1, 1.0", [0.1, 1]),
        ("", [""]),
    ],
)
def test_lists(text: str, values: list[Scalar]) -> None:
    assert sweep.listed("key", text) == values


@pytest.mark.parametrize("text", ["2024_11_29", "2024_11_29,1e3"])
def test_values_of_a_key_of_texts_are_as_written(text: str) -> None:
    assert sweep.listed("data-dir", text) == text.split(",")


def test_every_combination_is_a_run_and_seeds_share_a_row(tmp_path: Path) -> None:
    found = sweep.read(
        "fedproto-digits", ["cps-dim=25,50", "seed=0,1,2", "learning-rate=0.1", "method=fedproto,fedtgp"]
    )
    assert found.swept == ["cps-dim", "method"]
    assert [tuple(keys[key] for key in found.swept) for keys in found.runs.values()] == [
        (25, "fedproto"), (25, "fedtgp"), (50, "fedproto"), (50, "fedtgp")
    ]  # fmt: skip
    planned = runs_of(found, tmp_path)
    assert len(planned) == 12
    assert planned[5].directory == tmp_path / "cps-dim=25,method=fedtgp-seed2"
    keys = planned[5].requested.values
    assert (keys["cps-dim"], keys["method"], keys["seed"]) == (25, "fedtgp", 2)
    assert (keys["learning-rate"], keys["dataset"]) == (0.1, "digits")
    place = Path("runs/sweep-fedproto-digits-cps-dim-method-learning-rate=0.1")
    assert sweep.directory("fedproto-digits", found) == place
    only_seeds = sweep.read(None, ["seed=0,1"])
    assert list(only_seeds.runs) == ["all"]
    assert sweep.directory(None, only_seeds) == Path("runs/sweep-seed")
    fixed = ["models=a/b", "auc=true", "num-server-rounds=3"]  # a sweep may go further where it is
    other = sweep.read(None, ["seed=0,1", *fixed])
    assert sweep.directory(None, other) == Path("runs/sweep-seed-auc=true,models=a_b")


def test_numbers_may_begin_with_their_point() -> None:
    for text in (".1,.01", "[.1, .01]"):
        found = sweep.read(None, [f"learning-rate={text}"])
        assert [keys["learning-rate"] for keys in found.runs.values()] == [0.1, 0.01]


def test_labels_can_name_directories_and_differ() -> None:
    found = sweep.read(None, ['models=["a/b:c", "a b:c"]'])
    first, second = found.runs
    assert first != second
    assert not set("/: ") & set(first + second)
    long = sweep.read(
        None, [f"models=[{', '.join(repr(','.join(['cnn4'] * 99 + [last])) for last in ('cnn2', 'mlp5'))}]"]
    )
    assert len({*long.runs}) == 2
    assert max(map(len, long.runs)) < 200  # a file's name has up to 255 bytes, and -seed0 follows


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["cps-dim=25"], "no key has several values"),
        ([], "no key has several values"),
        (["cps-dim"], "--set cps-dim: must be key=value"),
        (["=1,2"], "--set =1,2: must be key=value"),
        (["cps-dim=[[1], [2]]"], "must be a value, or values separated by commas"),
    ],
)
def test_what_is_no_sweep(assignments: list[str], said: str) -> None:
    with pytest.raises(PbflError) as caught:
        sweep.read(None, assignments)
    assert said in str(caught.value)


def test_a_preset_with_a_list_is_no_preset_here_either(tmp_path: Path) -> None:
    (tmp_path / "listed.toml").write_text('models = ["cnn4"]\n')
    with pytest.raises(PbflError, match=r"models = \['cnn4'\]: must be one number, true, false or text"):
        sweep.read(str(tmp_path / "listed.toml"), ["seed=0,1"])


def test_bad_values_are_named_with_their_combination(tmp_path: Path) -> None:
    for value in ("cps-dim=-1", "seed=-1", "seed=true", "seed=x"):
        key, _, wrong = value.partition("=")
        with pytest.raises(PbflError, match=f"^(all|{value}): {key} = "):
            runs_of(sweep.read(None, [f"{key}=25,{wrong}"]), tmp_path)


def test_room_is_bounded_by_memory_and_cpus() -> None:
    def room(wanted: int, available: int | None, cpus: int, **requested: Any) -> int:
        return len(several.fitting_slots(wanted, available, Machine(cpus), Resources(**requested)))

    one, two = (900 + 2 * 350) * 2**20, 2 * (900 + 350) * 2**20  # one run with two workers, two with one each
    assert room(4, None, 2, engine="flower") == 2
    assert room(4, two, 2, engine="ray") == 2
    assert room(4, two - 1, 2, engine="flower") == 1
    assert room(4, two, 2, engine="flower", workers=2) == 1  # each of them was wished two
    on_cluster: dict[str, Any] = {"engine": "ray", "ray_address": "auto"}
    assert room(4, 2 * 600 * 2**20, 2, **on_cluster) == 2  # the servers
    lean = several.PROCESS_MB * 2**20
    assert room(4, 2 * lean, 2) == 2  # of one process each
    assert room(4, 2 * lean - 1, 2) == 1
    assert room(2, 6 * lean, 4) == 2  # of a server and two workers each
    assert room(2, 6 * lean - 1, 4) == 1
    assert room(1, one - 1, 2, engine="flower") == 1  # the one that was asked for is tried all the same
    assert several.fitting_slots(3, None, Machine(8), Resources()) == [Slot(2)] * 3


def test_room_is_bounded_by_cards() -> None:
    machine = Machine(8, ("0",))
    assert several.fitting_slots(4, None, machine, Resources(1, 1)) == [Slot(1, "0")]
    assert several.fitting_slots(4, None, machine, Resources(1, 0.25)) == [Slot(1, "0")] * 4
    assert several.fitting_slots(4, None, machine, Resources(1, 0.4)) == [Slot(1, "0")] * 2


def test_a_container_has_the_memory_that_it_was_given(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    for place, content in (
        ("proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable: 48000000 kB\n"),
        ("sys/fs/cgroup/memory.max", "max\n"),
        ("sys/fs/cgroup/memory.current", "1000000\n"),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(content)
    assert available_memory(tmp_path) == 48_000_000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4000000\n")
    assert available_memory(tmp_path) == 3_000_000
    for place, content in (  # a group below, of version 2, and one of version 1
        ("proc/self/cgroup", "9:memory:/old/below\n1:cpu:/other\n0::/system.slice/device.service\n"),
        ("sys/fs/cgroup/system.slice/memory.max", "2500000\n"),
        ("sys/fs/cgroup/system.slice/memory.current", "100000\n"),
        ("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "2000000\n"),
        ("sys/fs/cgroup/memory/old/memory.usage_in_bytes", "1900000\n"),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(content)
    assert available_memory(tmp_path) == 100_000
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/device.service\n")
    assert available_memory(tmp_path) == 2_400_000
    (tmp_path / "sys/fs/cgroup/system.slice/memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert available_memory(tmp_path) == 2_450_000
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\n")
    assert available_memory(tmp_path) is None


def test_the_command_of_a_run_is_its_keys(tmp_path: Path) -> None:
    (run, _) = runs_of(sweep.read(None, ['models="cnn4,resnet8"', "cps-dim=1,2"]), tmp_path)
    words = several.command(run, Path("/app"), Resources(1, 0.5, 2, "flower"))
    first = words.index("run")
    assert (
        " ".join(words[first : first + 8]) == "run --engine flower --app /app --gpus-per-client 0.5 --workers"
    )
    assert words[words.index("--run-dir") + 1] == str(run.directory)
    assert 'models="cnn4,resnet8"' in words
    assert "cps-dim=1" in words
    write_run(run.directory, [entry(1, 0.5, 0.5)])
    assert "--resume" in several.command(run, Path("/app"), Resources())
    on_ray = several.command(run, Path(), Resources(engine="ray", ray_address="head:6379"))
    assert on_ray[first : first + 5] == ["run", "--engine", "ray", "--ray-address", "head:6379"]
    own = several.command(run, Path(), Resources())
    assert own[first : first + 2] == ["run", "--gpus-per-client"]
    assert "--app" not in own


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e-05, True, "inf", "'a', \"b\"\n", "ü\x7f", ""])
def test_a_run_side_by_side_has_the_values_of_one_in_turn(tmp_path: Path, value: Scalar) -> None:
    (run,) = plan({"all": {"app.limit": value}}, [], [0], tmp_path)
    words = several.command(run, Path(), Resources())
    read = configuration.gather(None, [word for word in words if word.startswith("app.")])
    assert read == configuration.RequestedKeys({"app.limit": value})


def test_a_run_side_by_side_imports_from_where_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "statistics.py").write_text("raise SystemExit('another module of this name')")
    monkeypatch.chdir(tmp_path)
    (run,) = plan({"all": {}}, [], [0], tmp_path)
    words = several.command(run, Path(), Resources())
    source = {**os.environ, "PYTHONPATH": str(Path(several.__file__).parents[3])}
    done = subprocess.run([*words[: words.index("run")], "list", "presets"], env=source, capture_output=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    assert several.command(run, Path(), Resources())[:2] == [sys.executable, "-m"]


def test_the_best_row_is_named_by_validation_data_and_never_by_test_data(tmp_path: Path) -> None:
    held_out = {(1, 0): 0.25, (1, 1): 0.75, (2, 0): 0.625, (2, 1): 0.5}  # means 0.5 and 0.5625
    found = sweep.read(None, ["cps-dim=1,2", "seed=0,1", "validation-share=0.2", *SMALL])
    runs = runs_of(found, tmp_path)
    for run in runs:
        keys = run.requested.values
        share = held_out[int(keys["cps-dim"]), run.seed]
        line = entry(1, 0.5, 1 - share, validation={"global": {"weighted": share}})
        write_run(
            run.directory, [line], **{key: keys[key] for key in ("cps-dim", "seed", "validation-share")}
        )
    sheet, *_ = sweep.tables(found, runs).shown
    assert isinstance(sheet, Sheet)
    assert sheet.notes[0] == "Best on validation data: cps-dim = 2 (56.25 %)."
    assert [row["on validation data"] for row in rows_of(sheet)] == ["50.00 ± 35.36", "56.25 ± 8.84"]
    assert found.warning == ""
    held_out_once = sweep.read(None, ["cps-dim=1,2", "validation-share=0,0.2"])
    warned = sweep.read(None, ["cps-dim=1,2"])
    assert warned.warning == held_out_once.warning
    assert warned.warning.startswith(
        "validation-share = 0: a row chosen by these accuracies is chosen on test data"
    )
    (sheet,) = sweep.tables(warned, runs_of(warned, tmp_path / "none")).shown
    assert isinstance(sheet, Sheet)
    assert warned.warning in sheet.notes
    assert sweep.read(None, ["seed=0,1"]).warning == ""  # one row: nothing to choose


def program(code: str, *words: object) -> Callable[[PlannedRun, Slot], list[str]]:
    """Return the command of a run: Python code with its seed, its slot's workers and these words as arguments."""
    return lambda run, slot: [
        sys.executable, "-c", code, str(run.seed), str(slot.workers), *map(str, words)
    ]  # fmt: skip


def planned(tmp_path: Path, count: int) -> list[PlannedRun]:
    return runs_of(sweep.read(None, [f"seed={','.join(map(str, range(count)))}"]), tmp_path)


def test_runs_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "times").mkdir()
    code = """
import sys, time, pathlib
begin, seed, file = time.time(), sys.argv[1], pathlib.Path(sys.argv[3], sys.argv[1])
file.touch()
while len(list(file.parent.iterdir())) < 2:  # the second run starts while the first one runs
    time.sleep(0.01)
print("said")
file.write_text(f"{begin} {time.time()}")
sys.exit(seed == "1")
"""
    console = terminal()
    after: list[int] = []
    runs = planned(tmp_path, 4)
    command = program(code, tmp_path / "times")
    failed = several.run_in_parallel(
        runs, [Slot(1)] * 2, command, console, lambda run: after.append(run.seed)
    )
    assert failed == ["all, seed 1"]
    assert sorted(after) == [0, 1, 2, 3]
    told = printed(console)
    assert f"all-seed1: failed, see {runs[1].directory / 'pbfl.log'}" in told
    assert "all-seed3: finished" in told
    assert (tmp_path / "all-seed0" / "pbfl.log").read_text() == "said\n"
    spans = [tuple(map(float, (tmp_path / "times" / str(n)).read_text().split())) for n in range(4)]
    at_once = [sum(begin <= start < end for begin, end in spans) for start, _ in spans]
    assert max(at_once) <= 2


def test_runs_side_by_side_see_the_cards_of_their_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    code = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[2]); time.sleep(0.4)"

    def made(place: Path, *shared: Slot) -> list[str]:
        assert several.run_in_parallel(planned(place, 4), shared, program(code), terminal()) == []
        return sorted((place / f"all-seed{seed}" / "pbfl.log").read_text().strip() for seed in range(4))

    seen = made(tmp_path / "cards", Slot(2, "0"), Slot(3, "1,2"))
    assert set(seen) == {"0 2", "1,2 3"}
    assert (
        made(tmp_path / "none", Slot(1), Slot(1)) == ["all 1"] * 4
    )  # workers hide cards that were not wished for


def test_an_interrupted_run_ends_its_neighbours(tmp_path: Path) -> None:
    code = """
import sys, time, pathlib
alive = pathlib.Path(sys.argv[3])
if sys.argv[1] == "0":
    alive.touch()
    time.sleep(60)
while not alive.exists():
    time.sleep(0.05)
sys.exit(130)
"""
    command = program(code, tmp_path / "alive")
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        several.run_in_parallel(planned(tmp_path, 2), [Slot(1)] * 2, command, terminal())
    assert time.monotonic() - begin < 30


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sends SIGKILL, reads /proc")
def test_runs_side_by_side_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """With what they have started themselves, and also if they do not hear SIGTERM."""
    helper = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(120)"
    stays = f"""
import signal, subprocess, sys
if sys.argv[1] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", {helper!r}, sys.argv[1]]).wait()
"""
    parent = f"""
import sys
from pathlib import Path
from rich.console import Console
from pbfl_flwr.experiments.execute import several
from pbfl_flwr.experiments.plan.planned_runs import plan
from pbfl_flwr.flower.engines.placement import Slot
runs = plan(dict(all=dict()), [], [0, 1], Path("out").absolute())
command = lambda run, slot: [sys.executable, "-c", {stays!r}, str(run.seed)]
several.run_in_parallel(runs, [Slot(1)] * 2, command, Console())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        cwd=tmp_path,
        env={**os.environ, MARK: str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    end = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in "01"):
        assert process.poll() is None
        assert time.monotonic() < end, "the runs did not start"
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert left_behind(tmp_path, 60) == []


def test_a_run_that_cannot_begin_keeps_no_other_from_it(tmp_path: Path) -> None:
    runs = planned(tmp_path, 4)
    runs[0].directory.touch()
    write_run(runs[3].directory, [entry(1, 0.5, 0.5)])  # with other keys
    made: list[int] = []
    failed = several.run_in_parallel(
        runs, [Slot(1)] * 2, program(""), terminal(), lambda run: made.append(run.seed)
    )
    refused, unwritable = failed
    assert refused.startswith("all, seed 3: ")
    assert "all-seed3 was run with num-clients = 2, seed = 0, feature-dim = 4; give" in refused
    assert unwritable == f"all, seed 0: {runs[0].directory} cannot be written (File exists)"
    assert sorted(made) == [1, 2]


def test_the_table(tmp_path: Path) -> None:
    found = sweep.read(
        None, ["cps-dim=1,2", "seed=0,1", "num-clients=2", "feature-dim=4", "num-server-rounds=2"]
    )
    runs = runs_of(found, tmp_path)
    for run, last in zip(runs[:3], (0.25, 0.75, 0.5), strict=True):
        write_run(run.directory, [entry(1, 0.5, 0.75), entry(2, 0.5, last)], **run.requested.values)
    files = sweep.tables(found, runs).files
    text = files["table.md"]
    # 25 and 75: mean 50, sample deviation 50/1.4142
    assert "| 1 | global | 2 | 2 | 50.00 ± 35.36 | 75.00 ± 0.00 |" in text
    assert "1 of 4 runs are not finished." in text
    by_head = sweep.tables(found, runs, "head").files["table.md"]
    assert by_head.startswith("**Sweep over cps-dim, by head**\n\n| cps-dim | by | seeds | rounds | last |")
    lines = files["table.csv"].splitlines()
    assert lines[0].startswith("cps-dim,predictor,scored,clients,seeds,rounds,last,last_sd,best,")
    assert lines[1].startswith("1,global,after,2,2,2,50.0000,35.3553,75.0000,")
