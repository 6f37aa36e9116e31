"""Comparisons: plans are checked before anything starts, finished runs are kept, the table is what the runs say."""

import csv
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from scipy.stats import ttest_rel

from pbfl_flwr.config import parse
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import summary
from pbfl_flwr.experiments.execute import several
from pbfl_flwr.experiments.execute.runner import INTERRUPTED
from pbfl_flwr.experiments.plan import comparison as compare
from pbfl_flwr.experiments.plan import planned_runs
from pbfl_flwr.experiments.plan.configuration import RequestedKeys
from pbfl_flwr.flower.engines.placement import Resources, Slot
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.runs.directory import RESULT, RunDirectory
from tests.real_runs import left_behind, sets, start, wait_for_rounds
from tests.small_runs import (
    columns,
    edit,
    end_early,
    entry,
    over,
    pbfl,
    planned_of,
    printed,
    terminal,
    write_lines,
    write_run,
)

FILE = """
title = "Two methods"
[common]
num-clients = 2
num-server-rounds = 2
feature-dim = 4
[runs.A]
method = "fedproto"
[runs.B]
method = "tinyproto"
tinyproto.base = "fedtgp"
cps-dim = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


def rows(
    file: Path,
    out: Path,
    assignments: Sequence[str] = (),
    seeds: Sequence[int] = (),
    only: Sequence[str] = (),
) -> list[planned_runs.PlannedRun]:
    return planned_of(compare.read(str(file))[1], assignments, seeds, only, out)


def test_runs_of_another_comparison_take_other_common_keys(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('title = "Other"\nruns-of = "prototype-family-cifar10"\n[common]\ndataset = "digits"\n')
    title, runs = compare.read(str(path))
    assert title == "Other"
    assert runs["TinyProto-FT"] == {"dataset": "digits", "method": "tinyproto", "tinyproto.base": "fedtgp"}
    assert [*runs] == [*compare.read("prototype-family-cifar10")[1]]


def test_both_comparisons_of_methods_have_all_that_can_be_in_them_and_differ_in_the_architectures() -> None:
    every, some = (compare.read(f"{name}-fashion-mnist")[1] for name in ("all-methods", "heterogeneous"))
    built = {name: build_method(parse({"method": name}, SECTIONS)) for name in METHODS}
    assert {keys["method"] for keys in every.values()} == {*METHODS}
    assert {keys["method"] for keys in some.values()} == {
        name for name, method in built.items() if not method.same_architecture
    }
    for label, keys in some.items():
        assert {**keys, "models": "cnn4"} == every[label]


def test_common_keys_and_labels(file: Path, tmp_path: Path) -> None:
    title, runs = compare.read(str(file))
    assert title == "Two methods"
    assert runs["B"]["tinyproto.base"] == "fedtgp"
    planned = planned_of(runs, ["learning-rate=0.5"], [3, 4], ["B"], tmp_path)
    assert [(run.label, run.seed, run.directory.name) for run in planned] == [
        ("B", 3, "B-seed3"),
        ("B", 4, "B-seed4"),
    ]
    assert planned[0].requested.values["learning-rate"] == 0.5
    assert planned[0].requested.values["seed"] == 3


def test_every_bad_key_of_every_run_is_named_at_once_and_nothing_starts(file: Path, tmp_path: Path) -> None:
    file.write_text(
        FILE.replace('base = "fedtgp"', 'base = "nobody"').replace("num-clients = 2", "num-clients = 0")
    )
    result = pbfl("compare", file, "--out", tmp_path / "out", "--set", "nonsense=1")
    assert result.exit_code == 2
    for text in ("A: num-clients = 0", "B: tinyproto.base = 'nobody'", "A: unknown key 'nonsense'"):
        assert any(line.startswith(f"error: {text}") for line in result.stderr.splitlines()), text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("seed = [0, 1]", "seed = [0, 1]: must be one number, true, false or text"),
        ("app.x = [0, 1]", "app.x = [0, 1]: must be one number, true, false or text"),
        ("resume = true", "resume = true: names no run"),
    ],
)
def test_keys_that_no_run_can_have(file: Path, line: str, said: str) -> None:
    file.write_text(FILE.replace("num-clients = 2", line))
    result = pbfl("compare", file, "--dry-run")
    assert result.exit_code == 2
    assert [text.partition(said)[0] for text in result.stderr.splitlines()] == ["error: A: ", "error: B: "]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "[other]\na = 1",
            "other: unknown; must be one of title, common, runs, runs-of, and the runs' keys stand",
        ),
        ("x =", "is not TOML"),
        ("runs = 3", "runs: Input should be a valid dictionary"),
        ("[runs]\nA = 3", "runs.A: Input should be a valid dictionary"),
        ('[runs."../esc/A"]\nseed = 1', "runs.../esc/A.*: must be the name of a directory, without /"),
        ('[runs.".."]\nseed = 1', "runs.....*: must be the name of a directory, without /"),
        ("title = 'K\xe4se'", "is not TOML: .* in position 10"),
        ('runs-of = "all-methods-cifar10"', r"which has no \[runs.<label>\] tables"),
        ('runs-of = "prototype-family-cifar10"\n[runs.A]\nmethod = "local"', "needed are either"),
        ('runs-of = "nothing"', "comparison 'nothing': no such file"),
        ("[common]", r"needed are either \[runs.<label>\] tables or runs-of"),
    ],
)
def test_files_that_are_no_comparison(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(PbflError, match=reason) as error:
        compare.read(str(path))
    assert "\n" not in str(error.value)


def test_a_comparison_may_begin_with_a_byte_order_mark(file: Path) -> None:
    """As editors on Windows write it."""
    before = compare.read(str(file))
    file.write_text(file.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert compare.read(str(file)) == before


def test_only_and_seeds_are_checked(file: Path, tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="--only C: must be one of A, B"):
        rows(file, tmp_path, only=["C"])
    for wrong in ("1,x", "-1", "0-", "1-2-3", "0:2"):
        with pytest.raises(PbflError, match=f"--seeds {wrong}: must be whole numbers"):
            planned_runs.parse_seeds(wrong)
    for wrong in ("2-0", "0-99999999999"):
        with pytest.raises(PbflError, match=f"--seeds {wrong}: must be a range"):
            planned_runs.parse_seeds(wrong)
    assert planned_runs.parse_seeds("0, 2") == [0, 2]
    assert planned_runs.parse_seeds("0-2,5 - 6") == [0, 1, 2, 5, 6]
    repeated = planned_runs.parse_seeds("0,1,00")  # the same run must not count as two seeds
    assert [run.seed for run in planned_of({"A": {}}, [], repeated, [], tmp_path)] == [0, 1]


class Starting:
    """Starts nothing: remembers which runs with which keys it was asked for, and returns their exit code."""

    def __init__(self, code: int = 0, **codes: int) -> None:
        self.code, self.codes = code, codes
        self.asked: dict[str, RequestedKeys] = {}

    def __call__(self, requested: RequestedKeys, directory: Path) -> int:
        self.asked[directory.name] = requested
        if (code := self.codes.get(directory.name.replace("-", "_"), self.code)) < 0:
            raise PbflError("in use by another run")
        return code


LINES = [entry(number, 0.5, 0.5) for number in (1, 2, 3, 4)]


def test_finished_runs_are_kept_and_a_failure_stops_nobody(file: Path, tmp_path: Path) -> None:
    planned = rows(file, tmp_path, seeds=[0, 1])
    write_run(planned[0].directory, LINES[:2])
    starting = Starting(A_seed1=1)
    assert several.run_in_turn(planned, starting) == ["A, seed 1"]
    assert [*starting.asked] == ["A-seed1", "B-seed0", "B-seed1"]


def test_a_directory_that_cannot_be_used_costs_its_own_run(file: Path, tmp_path: Path) -> None:
    """What is left of a run without its run.json is no empty directory, and no name is longer than the system's."""
    left, long, good = rows(file, tmp_path, seeds=[0, 1])[:3]
    (write_run(left.directory, LINES[:2]) / "run.json").unlink()
    before = (left.directory / "rounds.jsonl").read_bytes()
    long = replace(long, directory=tmp_path / ("x" * 300))
    starting = Starting()
    failed = several.run_in_turn([left, long, good], starting)
    assert [*starting.asked] == [good.directory.name]
    assert "holds rounds.jsonl of a run whose run.json is missing" in failed[0]
    assert failed[1].endswith("File name too long")
    exits = [sys.executable, "-c", ""]
    beside = several.run_in_parallel([left, long, good], [Slot(1)], lambda run, slot: exits, terminal())
    assert beside == failed
    assert (left.directory / "rounds.jsonl").read_bytes() == before


def test_tables_that_cannot_be_made_stop_no_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def simulate(app: Path, run_dir: Path, requested: RequestedKeys, *others: object) -> int:
        made.append(run_dir.name)
        write_run(run_dir, LINES[:2], **requested.values)
        return 0

    monkeypatch.setattr(several, "simulate", simulate)
    (finished, *_) = rows(file, tmp_path, seeds=[0, 1], only=["A"])
    write_run(finished.directory, LINES[:2], **finished.requested.values)
    (finished.directory / "clients.jsonl").write_text("{\n")
    result = pbfl("compare", file, "--out", tmp_path, "--seeds", "0,1", "--workers", 1)
    assert made == ["A-seed1", "B-seed0", "B-seed1"]
    assert result.exit_code == 1
    assert "clients.jsonl, line 1 is damaged" in result.stderr


@pytest.mark.parametrize("partition", ["iid", "natural"])
def test_runs_on_a_file_that_has_changed_are_not_taken_for_others(tmp_path: Path, partition: str) -> None:
    """Nor finished ones: a single sample, or whose it is."""
    data, file, out = tmp_path / "mine.npz", tmp_path / "mine.toml", tmp_path / "out"
    x, y, client = np.zeros((60, 4), dtype=np.float32), np.arange(60) % 3, np.arange(60) // 30
    lines = [f'dataset = "npz"\ndata-dir = "{data}"\npartition = "{partition}"\nmodels = "mlp"']
    file.write_text(
        "\n".join(["[common]", *FILE.splitlines()[3:6], *lines, "[runs.A]", 'method = "fedproto"'])
    )
    np.savez(data, x=x, y=y, client=client)
    words = ["compare", file, "--out", out, "--engine", "processes", "--workers", 1]
    assert pbfl(*words).exit_code == 0
    np.savez(data, x=x, y=y, client=client)
    assert "0 of 1 runs are to be run" in pbfl(*words).stdout
    if partition == "natural":
        client[[0, 30]] = client[[30, 0]]
    else:
        x[1, 2] = 1
    np.savez(data, x=x, y=y, client=client)
    for more in ([], ["--dry-run"], ["--set", "num-server-rounds=3"]):
        refused = pbfl(*words, *more)
        assert refused.exit_code == 2
        said = f"{out / 'A-seed0'} was made with other samples than dataset = 'npz' (data-dir = '{data}') has now"
        assert " ".join(said.split()) in " ".join(refused.stderr.split())
    assert pbfl(*words, "--out", tmp_path / "new").exit_code == 0


def test_a_run_that_is_refused_stops_nobody_and_is_in_no_table(file: Path, tmp_path: Path) -> None:
    planned = rows(file, tmp_path, seeds=[0, 1])
    other, damaged, *_ = planned
    write_run(other.directory, LINES[:2], **{"data-dir": "/old", "threads": 2})
    write_run(damaged.directory, LINES[:2])
    (damaged.directory / "run.json").write_text("{")
    said = several.run_in_turn(planned, Starting(B_seed0=-1))
    assert said[0].startswith("A, seed 0: ")
    assert "was run with data-dir = /old; give" in said[0]
    assert said[1].startswith("A, seed 1: ")
    assert "is damaged" in said[1]
    assert said[2:] == ["B, seed 0: in use by another run"]
    assert planned_runs.finished_groups(planned) == []


def test_a_longer_run_is_not_taken_for_the_one_that_is_asked_for(file: Path, tmp_path: Path) -> None:
    first, second = rows(file, tmp_path)  # two rounds each
    write_run(first.directory, LINES[:3])
    write_run(second.directory, LINES[:2], **{**second.requested.values, "num-server-rounds": 3})
    said = several.run_in_turn([first, second], Starting())
    assert [line.rsplit(": ", 1)[0] for line in said] == ["A, seed 0", "B, seed 0"]
    assert all("was run with num-server-rounds = 3, not 2; give at least as many" in s for s in said)
    assert planned_runs.finished_groups([first, second]) == []
    longer = rows(file, tmp_path, ["num-server-rounds=3"], only=["A"])
    assert [summary.ROUNDS.cell(row) for row in planned_runs.finished_groups(longer)] == ["3"]


def test_an_interrupted_run_goes_on_and_may_end_sooner(file: Path, tmp_path: Path) -> None:
    run, _ = planned = rows(file, tmp_path)
    write_run(run.directory, LINES[:1], **{"num-server-rounds": 3})
    with pytest.raises(KeyboardInterrupt):  # an interruption ends the comparison
        several.run_in_turn(planned, starting := Starting(INTERRUPTED))
    ((name, requested),) = starting.asked.items()
    assert (name, requested.values["resume"], requested.values["num-server-rounds"]) == ("A-seed0", True, 2)


def test_an_interrupted_run_ends_after_the_default_number_of_rounds_if_none_is_asked_for(
    file: Path, tmp_path: Path
) -> None:
    file.write_text(FILE.replace("num-server-rounds = 2\n", ""))
    run, _ = rows(file, tmp_path)
    write_run(run.directory, LINES, **{"num-server-rounds": 50})
    now = planned_runs.standing(run)
    assert (now.state, now.rounds) == ("to resume", 4)
    assert now.keys is not None
    assert now.keys.values["num-server-rounds"] == 20
    assert "num-server-rounds=20" in several.command(run, Path(), Resources())


def test_a_run_killed_after_its_last_round_is_to_be_resumed(file: Path, tmp_path: Path) -> None:
    run, _ = rows(file, tmp_path)
    write_run(run.directory, LINES[:2], **run.requested.values)
    assert planned_runs.standing(run).state == "finished"
    (run.directory / RESULT).unlink()
    now = planned_runs.standing(run)
    assert (now.state, now.rounds) == ("to resume", 2)
    assert not planned_runs.finished(run)


def test_a_finished_run_s_history_is_read_once_and_refused_if_it_is_damaged(
    file: Path, tmp_path: Path
) -> None:
    run, _ = rows(file, tmp_path)
    write_run(run.directory, LINES[:2], **run.requested.values)
    with patch.object(RunDirectory, "round_records", return_value=LINES[:2]) as read:
        assert planned_runs.standing(run) == planned_runs.Standing("finished", 2)
    read.assert_called_once_with()
    (run.directory / "rounds.jsonl").write_text("{}\n")
    assert "rounds.jsonl, line 1 is damaged" in planned_runs.standing(run).refusal


def test_a_run_without_a_key_of_an_app_is_not_the_one_with_it(file: Path, tmp_path: Path) -> None:
    run, _ = rows(file, tmp_path)
    write_run(run.directory, LINES[:2], **run.requested.values)
    assert planned_runs.finished(run)
    with_key, _ = rows(file, tmp_path, ["app.noise=0.5"])
    said = planned_runs.standing(with_key).refusal
    assert said.endswith("was run with no app.noise; give the same keys, or another --out")


def test_a_run_that_patience_ended_is_finished_for_who_asks_with_the_same_patience(
    file: Path, tmp_path: Path
) -> None:
    sections, more = compare.read(str(file))[1], ["num-server-rounds=9", "patience=2"]
    first, second = planned_of(sections, more, [0, 1], ["A"], tmp_path)
    for run, made in ((first, LINES[:3]), (second, LINES)):
        write_run(run.directory, made, **run.requested.values)
        end_early(run.directory, len(made))
    assert planned_runs.finished(first)
    assert [summary.ROUNDS.cell(row) for row in planned_runs.finished_groups([first, second])] == ["3–4"]
    assert [summary.ROUNDS.cell(row) for row in planned_runs.finished_groups([second])] == ["4"]
    for rounds in (50, 5):
        (run,) = planned_of(sections, [f"num-server-rounds={rounds}", "patience=2"], [0], ["A"], tmp_path)
        assert planned_runs.finished(run)
    for rounds, patience, said in (
        (2, 2, "num-server-rounds = 9, not 2"),
        (9, 3, "patience = 2; give the same keys"),
    ):
        keys = [f"num-server-rounds={rounds}", f"patience={patience}"]
        (run,) = planned_of(sections, keys, [0], ["A"], tmp_path)
        assert f"was run with {said}" in planned_runs.standing(run).refusal


def test_the_table(file: Path, tmp_path: Path) -> None:
    planned = rows(file, tmp_path, seeds=[0, 1], only=["A"])
    write_run(planned[0].directory, [entry(1, 0.5, 0.75), entry(2, 0.5, 0.25)])
    write_run(planned[1].directory, [entry(1, 0.5, 0.5), entry(2, 0.25, 0.75)], seed=1)
    files = compare.tables("Two methods", planned).files
    text = files["table.md"]
    assert "| A | global | 2 | 2 | 50.00 ± 35.36 | 75.00 ± 0.00 |" in text  # (25+75)/2, 50/√2
    assert text.count("Always predicting a client's most frequent training class: 75.12 %") == 1
    (cells,) = csv.DictReader(files["table.csv"].splitlines())
    expected = {"run": "A", "predictor": "global", "scored": "after", "clients": "2", "rounds": "2"}
    expected |= {"seeds": "2", "last": "50.0000", "last_sd": "35.3553", "best_sd": "0.0000", "local": ""}
    assert {name: cells[name] for name in expected} == expected
    assert r"A & global & 2 & 2 & 50.00 $\pm$ 35.36 &" in files["table.tex"]


def test_the_table_says_over_how_many_clients_it_is(file: Path, tmp_path: Path) -> None:
    planned = rows(file, tmp_path, seeds=[0, 1])
    both = [entry(1, 0.5, 0.75), entry(2, 0.5, 0.25)]
    (first, second) = both
    histories = [both, [first, over(1, second)], [first, over(1, second, "head")], both]
    for number in (0, 3):
        write_run(planned[number].directory, both, **planned[number].requested.values)
    (row, other) = planned_runs.finished_groups(planned)
    assert not any("not cover all" in note for note in summary.comparison_sheet("", [row, other]).notes)
    for number in (1, 2):
        write_run(planned[number].directory, histories[number], **planned[number].requested.values)
    found = planned_runs.finished_groups(planned)
    said = "Accuracies that do not cover all participating clients: A: global over 1–2 of 2; B: head over 1–2 of 2."
    assert said in summary.comparison_sheet("", found).notes
    assert [summary.CLIENTS.cell(row) for row in found] == [
        "1–2 of 2",
        "2",
    ]  # B's primary predictor is global


@pytest.mark.parametrize("newer", ["max-samples", "learning-rate", "fedtgp.margin-cap"])
def test_a_run_older_than_a_key_is_one_at_its_default(file: Path, tmp_path: Path, newer: str) -> None:
    file.write_text(FILE.replace('"fedproto"', '"fedtgp"'))
    runs = rows(file, tmp_path / "out", seeds=[0, 1])
    for run in runs:
        write_run(run.directory, [entry(n, 0.25, 0.5) for n in (1, 2)], **run.requested.values)
        write_lines(run.directory / "clients.jsonl", *(columns(n, [{"global": 2}] * 2) for n in (1, 2)))
    configuration = RunDirectory(runs[0].directory).record().configuration
    older = {key: value for key, value in configuration.items() if key != newer}
    edit(runs[0].directory / "run.json", configuration=older)
    done = pbfl("compare", file, "--out", tmp_path / "out", "--seeds", "0-1", "--engine", "processes")
    assert done.exit_code == 0, done.output
    assert "0 of 4 runs are to be run" in done.stdout
    assert "ifferent data" not in done.stdout
    assert "| B − A | 2 | +0.00 |" in (tmp_path / "out" / "paired.md").read_text()


def test_all_rows_and_pairs_by_one_predictor(file: Path, tmp_path: Path) -> None:
    file.write_text(FILE + '[runs.C]\nmethod = "local"\n')
    out = tmp_path / "out"
    for run in rows(file, out):
        scores = [0.25, 0.75] if run.label == "A" else [0.25, 0.5]
        globals_ = None if run.label == "C" else scores[1]
        write_run(run.directory, [entry(n, scores[0], globals_) for n in (1, 2)], **run.requested.values)
        predictors = {"head": 1} if run.label == "C" else {"head": 1, "global": round(4 * scores[1])}
        write_lines(run.directory / "clients.jsonl", *(columns(n, [predictors] * 2) for n in (1, 2)))
        if run.label != "A":
            edit(run.directory / "run.json", primary_predictor="head")
    words = ["compare", file, "--out", out, "--engine", "processes", "--workers", 1]
    assert pbfl(*words).exit_code == 0
    assert "| A − C | 1 | +50.00 |" in (out / "paired.md").read_text()
    assert "global vs. head" in (out / "paired.md").read_text()
    assert "| C | head | 1 | 2 | 25.00 |" in (out / "table.md").read_text()
    assert pbfl(*words, "--by", "global").exit_code == 0
    text, pairs = ((out / f"{name}.md").read_text() for name in ("table", "paired"))
    assert text.startswith("**Two methods, by global**\n\n| run | by | seeds | rounds | last |")
    for row in (
        "| A | global | 1 | 2 | 75.00 |",
        "| B | global | 1 | 2 | 50.00 |",
        "| C | global | 0 | 2 | - | - | - | - | 25.00 |",
    ):
        assert row in text
    assert "\nNever scored by global: C.\n" in text
    assert pairs.startswith("**Two methods: pairs, by global**")
    assert "| B − A | 1 | -25.00 |" in pairs
    assert "C |" not in pairs.replace("| C", "C")
    assert "vs." not in pairs
    assert "of the accuracy by global in the last round," in pairs
    assert "\nNever scored by global, so in no pair: C.\n" in pairs
    assert [line.split(",")[1] for line in (out / "table.csv").read_text().splitlines()[1:]] == ["global"] * 3
    assert pbfl(*words, "--by", "nobody").exit_code == 2


def test_which_pairs_and_which_round_are_said_on_the_command_line(file: Path, tmp_path: Path) -> None:
    """The same words for compare and report, and the same figures in both."""
    file.write_text(FILE + '[runs.C]\nmethod = "local"\n')
    out, page = tmp_path / "out", tmp_path / "page.html"
    for run in rows(file, out, seeds=[0, 1, 2]):
        last = {"A": 0.75, "B": 0.5, "C": 0.25}[run.label] + run.seed * (0.0625 if run.label == "A" else 0)
        write_run(run.directory, [entry(1, 0, 1.0), entry(2, 0, last)], **run.requested.values)
        write_lines(run.directory / "clients.jsonl", *(columns(n, [{"global": 2}] * 2) for n in (1, 2)))
    words = ["compare", file, "--out", out, "--seeds", "0-2", "--engine", "processes"]
    p = f"{ttest_rel([0.75, 0.8125, 0.875], [0.5, 0.5, 0.5]).pvalue:.3f}"
    for more, row in (
        ([], "C | 3 | +25.00 |"),
        (["--against", "A"], "C − A | 3 | -56.25 |"),
        (["--pair", "A/B"], "A − B | 3 | +31.25 | +31.25 |"),
        (["--pair", "A/B", "--round", "best"], "A − B | 3 | +0.00 |"),
        (["--pair", "A/B", "--round", "window"], "A − B | 3 | +15.62 |"),
    ):
        assert pbfl(*words, *more).exit_code == 0
        text = (out / "paired.md").read_text()
        assert row in text
        assert ("mean of the last 10 scored" in (out / "table.md").read_text()) == ("window" in more)
        assert pbfl("report", out, "--out", page, *more).exit_code == 0
        cells = re.findall(r">([+-]\d+\.\d\d)</td>", page.read_text())
        (difference, *_) = re.findall(r"\| ([+-]\d+\.\d\d) \|", text)
        assert difference in cells
    assert pbfl(*words, "--pair", "A/B").exit_code == 0
    assert f" | {p} | {p} | " in (out / "paired.md").read_text()
    for command in (words, ["report", out]):
        assert "--against D: must be one of A, B, C" in pbfl(*command, "--against", "D").stderr
        assert "--pair A: must be FIRST/SECOND" in pbfl(*command, "--pair", "A").stderr
    assert "--against C: must be one of A, B" in pbfl(*words, "--only", "A,B", "--against", "C").stderr


def test_the_tables_say_what_is_not_finished_and_no_row_takes_the_place_of_the_reference(
    file: Path, tmp_path: Path
) -> None:
    file.write_text(FILE + '[runs.C]\nmethod = "local"\nlearning-rate = 1e17\n')  # fails
    out, few = tmp_path / "out", "max-samples=200"
    for run in rows(file, out, [few], only=["A", "B"]):
        write_run(run.directory, LINES[:2], **run.requested.values)
        write_lines(run.directory / "clients.jsonl", *(columns(n, [{"global": 2}] * 2) for n in (1, 2)))
    words = ["compare", file, "--out", out, "--workers", 1, "--set", few]
    for options, shown in (
        ([], "\nNo two rows are compared: C, the reference, has no finished run.\n"),
        (["--against", "C"], "\nNo two rows are compared: C, the reference, has no finished run.\n"),
        (["--against", "A"], "| B − A | 1 |"),
        (["--pair", "A/B", "--pair", "A/C"], "| A − B | 1 |"),
        (["--only", "A,B"], "| B − A | 1 |"),
    ):
        failed = "--only" not in options
        assert pbfl(*words, *options).exit_code == failed
        table, pairs = ((out / f"{name}.md").read_text() for name in ("table", "paired"))
        assert shown in pairs
        assert [("\nNot finished: C (seed 0).\n" in text) for text in (table, pairs)] == [failed] * 2


def test_a_row_names_the_seeds_that_it_lacks(file: Path, tmp_path: Path) -> None:
    first, *others = rows(file, tmp_path, seeds=[0, 1, 2])
    write_run(first.directory, LINES[:2], **first.requested.values)
    note = "\nNot finished: A (seeds 1, 2), B (seeds 0, 1, 2).\n"
    assert note in compare.tables("", [first, *others]).files["table.md"]


def test_each_seed_may_deal_the_data_anew(file: Path, tmp_path: Path) -> None:
    words = ["compare", file, "--out", tmp_path / "out", "--dry-run", "--deal-anew"]
    assert "--deal-anew: needs --seeds" in pbfl(*words).stderr
    assert pbfl(*words, "--seeds", "4,5").exit_code == 0
    planned = planned_runs.plan(compare.read(str(file))[1], [], [4, 5], tmp_path, deal_anew=True)
    assert [run.requested.values["partition-seed"] for run in planned] == [4, 5, 4, 5]


def test_data_that_look_wrong_are_warned_of_once_before_the_runs(file: Path, tmp_path: Path) -> None:
    waves = np.sin(np.arange(64) * 0.2 + np.arange(20 * 3).reshape(20, 3, 1) * 1.7)
    for name, x in (("mixed", waves.transpose(0, 2, 1).reshape(20, 3, 64)), ("right", waves)):
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.repeat(["run", "walk"], 10))
    words = ["dataset=npz", "models=har-cnn", "partition=iid", f"data-dir={tmp_path}/mixed.npz"]
    _, runs = compare.read(str(file))
    (said,) = planned_runs.preflight(planned_of(runs, words, [0, 1], [], tmp_path), Resources(), LoadedData())
    assert said.startswith("data: inputs are read as windows (channels, length), 3 of 64 readings")
    right = [*words[:-1], f"data-dir={tmp_path}/right.npz"]
    assert (
        planned_runs.preflight(planned_of(runs, right, [0, 1], [], tmp_path), Resources(), LoadedData()) == []
    )
    for given, there in ((words, True), (right, False)):
        options = [word for setting in (*given, "num-clients=2") for word in ("--set", setting)]
        assert (f"# {said}" in pbfl("run", "--dry-run", *options).stdout.splitlines()) == there


def test_a_table_that_cannot_be_written_is_one_line(file: Path, tmp_path: Path) -> None:
    for run in rows(file, tmp_path / "x"):
        write_run(run.directory, LINES[:2], **run.requested.values)
    (tmp_path / "x" / "table.md").mkdir()
    result = pbfl("compare", file, "--out", tmp_path / "x", "--engine", "processes")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"{tmp_path}/x/table.md cannot be written" in result.stderr


def compared(file: Path, out: Path) -> tuple[list[object], dict[Path, bytes]]:
    """Finish all runs of a comparison; return the command that made its tables, and these."""
    for run in rows(file, out):
        write_run(run.directory, LINES[:2], **run.requested.values)
    words = ["compare", file, "--out", out, "--engine", "processes", "--workers", 1]
    assert pbfl(*words).exit_code == 0
    return words, {path: path.read_bytes() for path in out.glob("*.*")}


@pytest.mark.parametrize("change", ["learning-rate=0.2", "num-server-rounds=1"])
def test_the_tables_of_an_earlier_start_stay_where_a_run_is_refused(
    file: Path, tmp_path: Path, change: str
) -> None:
    out = tmp_path / "out"
    words, before = compared(file, out)
    assert len(before) == 6
    result = pbfl(*words, "--set", change)
    assert result.exit_code == 1
    assert "not written, because a run is refused; existing files are unchanged" in result.stdout
    assert "Two methods" not in result.stdout
    assert {path: path.read_bytes() for path in out.glob("*.*")} == before


def test_runs_with_other_keys_are_not_finished(file: Path, tmp_path: Path) -> None:
    compared(file, tmp_path)
    runs = compare.read(str(file))[1]
    assert all(map(planned_runs.finished, planned_runs.plan(runs, [], [], tmp_path)))
    for change in ("learning-rate=0.2", "cps-dim=3", "cps-dim=x"):  # the last is invalid
        assert not any(map(planned_runs.finished, planned_runs.plan(runs, [change], [], tmp_path)))


def test_without_a_finished_run_there_is_no_table(file: Path, tmp_path: Path) -> None:
    planned = rows(file, tmp_path)
    assert planned_runs.reason_not_to_write(planned) == "no run is finished"
    write_run(planned[0].directory, LINES[:2])
    assert not planned_runs.reason_not_to_write(planned)
    other = {**planned[1].requested.values, "learning-rate": 0.2}
    write_run(planned[1].directory, [entry(1, 0.5, 0.5)], **other)  # it can not go on
    assert planned_runs.reason_not_to_write(planned) == "a run is refused"


def dry(*words: object) -> tuple[int, list[list[str]], str]:
    """Return exit code, rows and text of a dry run."""
    done = pbfl("compare", *words, "--engine", "processes", "--dry-run")
    return done.exit_code, [line.split() for line in done.stdout.splitlines()], done.stdout


def test_a_dry_run_says_of_every_run_whether_it_is_finished_or_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    words = [file, "--seeds", "0-1", "--out", tmp_path]
    planned = rows(file, tmp_path, seeds=[0, 1])
    there, some, other, wrong = planned
    write_run(there.directory, LINES[:2], **there.requested.values)
    write_run(some.directory, LINES[:1], **some.requested.values)
    code, table, _ = dry(*words)
    assert code == 0
    assert [row[:-1] for row in table[2:6]] == [
        ["A", "fedproto", "finished", "0", "2/2"],
        ["A", "fedproto", "to", "resume", "1", "1/2"],
        ["B", "tinyproto", "to", "run", "0", "0/2"],
        ["B", "tinyproto", "to", "run", "1", "0/2"],
    ]
    assert table[2][-1] == str(there.directory)
    assert " ".join(table[6]) == "3 of 4 runs are to be run; nothing was started"
    write_run(wrong.directory, LINES[:2], **{**wrong.requested.values, "learning-rate": 0.5})
    before = (wrong.directory / "run.json").read_bytes()
    code, table, text = dry(*words)
    assert code == 2
    assert table[5][:5] == ["B", "tinyproto", "refused", "1", "-"]
    assert "2 of 4 runs are to be run; nothing was started" in text
    assert re.search("B, seed 1: .* was run with learning-rate = 0.5", text)
    assert (wrong.directory / "run.json").read_bytes() == before
    assert not other.directory.exists()


def test_a_dry_run_of_a_run_that_patience_ended_lacks_nothing(file: Path, tmp_path: Path) -> None:
    more = ["num-server-rounds=9", "patience=1", "patience-on=test"]
    (run,) = rows(file, tmp_path, more, only=["A"])
    write_run(run.directory, LINES[:2], **run.requested.values)
    end_early(run.directory, 2)
    code, table, _ = dry(file, "--only", "A", "--out", tmp_path, *sets(*more))
    assert code == 0
    assert table[2][:5] == ["A", "fedproto", "finished", "0", "2/2"]


def test_a_dry_run_checks_the_data_and_warns_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compare", file, "--dry-run"]
    assert "2 of 2 runs are to be run; nothing was started" in pbfl(*words).stdout
    assert pbfl(*words, *sets("data-dir=/nowhere", "dataset=npz")).exit_code == 2
    assert not (tmp_path / "runs").exists()
    _, _, text = dry(
        file, *sets("method=gfpl", "feature-dim=16", "cps-dim=auto"), "--seeds", "0-1", "--out", tmp_path
    )
    warning = "gfpl: num-server-rounds = 2: the first exchange of mixtures is in round 10"
    assert " ".join(text.split()).count(warning) == 1


SIDE_BY_SIDE = """
title = "Side by side"
[common]
num-clients = 2
max-samples = 200
[runs.A]
method = "fedproto"
[runs.B]
method = "local"
"""


def results(out: Path) -> dict[str, str]:
    return {run.name: RunDirectory(run).result() for run in out.iterdir() if run.is_dir()}


TWO_SLOTS = """
from pbfl_flwr.cli import main
from pbfl_flwr.experiments.execute import several
from pbfl_flwr.flower.engines.placement import Slot
several.fitting_slots = lambda count, *_: [Slot(1)] * count
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_stopped_runs_side_by_side_go_on_to_the_results_of_runs_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "c.toml", tmp_path / "out"
    file.write_text(SIDE_BY_SIDE)
    words = ["compare", file, "--engine", "processes", "--workers", 1, "--out"]
    endless = [out, "--parallel", 2, "--set", "num-server-rounds=10000"]
    process = start(tmp_path, *words, *endless, program=[sys.executable, "-c", TWO_SLOTS])
    runs = [out / f"{label}-seed0" for label in "AB"]
    for run in runs:
        wait_for_rounds(process, run, 2)  # the first is in the checkpoint for certain
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "run the same command to continue" in output
    assert left_behind(tmp_path) == []
    rounds = max(len(RunDirectory(run).round_records()) for run in runs) + 1
    monkeypatch.setattr(several, "fitting_slots", lambda count, *_: [Slot(1)] * count)  # on any machine
    more = ["--set", f"num-server-rounds={rounds}"]
    done = pbfl(*words, out, "--parallel", 2, *more)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert not any(line.startswith("A-seed0: round 1/") for line in lines)
    for name in ("A-seed0", "B-seed0"):
        assert any(line.startswith(f"{name}: round {rounds}/{rounds}  accuracy") for line in lines)
        assert f"{name}: finished" in lines
    assert pbfl(*words, tmp_path / "in-turn", *more).exit_code == 0
    assert results(out) == results(tmp_path / "in-turn")
    assert all(results(out).values())
    tables = [list(csv.DictReader((place / "table.csv").open())) for place in (out, tmp_path / "in-turn")]
    measured = dict.fromkeys(("seconds", "peak_mb"), "")
    assert [{**row, **measured} for row in tables[0]] == [{**row, **measured} for row in tables[1]]


def test_lines_of_runs_in_several_directories_say_which_they_are_of(tmp_path: Path) -> None:
    (path := tmp_path / "c.toml").write_text(SIDE_BY_SIDE)
    runs = [run for block in ("digits", "spiral") for run in rows(path, tmp_path / block, only=["A"])]
    console = terminal()
    several.run_in_parallel(runs, [Slot(1)], lambda run, slot: [sys.executable, "-c", "exit(1)"], console)
    ends = [line for line in printed(console) if "failed" in line]
    assert [line.split(":")[0] for line in ends] == ["digits/A-seed0", "spiral/A-seed0"]
