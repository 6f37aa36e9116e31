"""Reproductions: the files say what the papers print, and the table says what the runs and the papers say."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.catalogue import ROWS
from pbfl_flwr.experiments.plan import reproduction as reproduce
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, selected
from tests.small_runs import edit, entry, pbfl, write_run

FILE = """
title = "A table"
paper = "Somebody"
table = "Table 9: accuracy"
hardware = "a computer"
accuracy = "weighted"
round = "best"
spread = "seeds"
seeds = [0, 1]
deviations = ["the moon was full"]
[common]
num-clients = 2
num-server-rounds = 9
feature-dim = 4
[small]
num-server-rounds = 2
[blocks.one]
dataset = "digits"
learning-rate = 0.5
[blocks.two]
dataset = "fashion-mnist"
remark = "Do not believe it."
runs.B.cps-dim = 3
[runs.A]
method = "fedproto"
[runs.B]
method = "tinyproto"
tinyproto.base = "fedtgp"
cps-dim = 2
[published]
A = [[51.50, 0.25], []]
B = [[60.00], [70.00, 1.00]]
"""

# By hand from the papers: (file, block, row, what is printed there).
PRINTED = [
    ("cps-table1", "cifar10", "FedTGP-s50-PPA-CPKD", [87.11, 0.08]),
    ("cps-table1", "tiny-imagenet", "FedProto-s250", [15.70, 0.47]),
    ("cps-table2", "cifar100", "CPS-350", [32.86, 0.34]),
    ("cps-table2", "cifar10", "d-150", [80.58, 1.30]),
    ("protonorm-table1", "cifar10-pathological", "FedTGP", [85.46, 0.05]),
    ("protonorm-table1", "flowers102", "ProtoNorm", [53.83, 0.38]),
    ("protonorm-table1", "tiny-imagenet", "FedKD", [23.08, 0.17]),
    ("protonorm-table2", "clients-100", "ProtoNorm", [41.06, 0.17]),
    ("protonorm-table2", "d-64", "FedDistill", [37.08, 0.12]),
    ("protonorm-table3", "flowers102-resnet18", "FedUV", [55.36, 0.32]),
    ("protonorm-table4", "tiny-imagenet", "gamma-1000", []),
    ("protonorm-table4", "cifar100", "gamma-800", [46.66]),
    ("protonorm-table5", "cifar100", "FedTGP-1.2", [47.33]),
    ("protonorm-table5", "cifar10", "FedProto-1.4", []),
    ("tinyproto-table1", "gtsrb", "TinyProto-FT", [97.68, 0.10]),
    ("tinyproto-table1", "cifar100", "FedProto", [40.72, 0.84]),
    ("tinyproto-table2", "alpha-0.01", "TinyProto-FP", [68.24, 0.34]),
    ("tinyproto-table3", "ag-news", "TinyProto-FT", [97.39, 0.02]),
    ("tinyproto-table3", "ag-news", "LG-FedAvg", [97.26, 0.05]),
    ("tinyproto-table4", "tiny-imagenet", "FedTGP-APS", [28.40]),
    ("gfpl-table1", "mnist-4", "FeSEM", [97.06, 2.72]),
    ("gfpl-table1", "femnist-5", "FedProx", [91.33, 7.32]),
    ("gfpl-table1", "cifar10-3", "Local", [67.72, 9.45]),
    ("gfpl-table1", "cifar100-5", "GFPL", [67.23, 1.55]),
    ("gfpl-table2", "femnist-20", "GFPL", [94.82, 2.85]),
    ("gfpl-table2", "cifar100-20", "GFPL-without-DCS", [60.63, 7.23]),
    ("fedcpd-table1", "fashion-mnist", "FedCPD", [97.83, 4.83]),
    ("fedcpd-table1", "cifar10", "FedGH", [83.06, 20.89]),
    ("fedcpd-table1", "cifar100-pathological", "FedALA", [67.31, 3.66]),
    ("fedcpd-table2", "cifar10-beta-1", "FedPA", [72.16]),
    ("fedcpd-table3", "cifar100", "align-pcl", [58.24]),
]


def read(place: Path, old: str = "", new: str = "") -> reproduce.Reproduction:
    """The reproduction, with a part of its file replaced."""
    (place / "nine.toml").write_text(FILE.replace(old, new))
    return reproduce.read(str(place / "nine.toml"))


@pytest.fixture
def paper(tmp_path: Path) -> reproduce.Reproduction:
    return read(tmp_path)


def planned(
    paper: reproduce.Reproduction,
    out: Path,
    *assignments: str,
    seeds: Sequence[int] = (),
    blocks: Sequence[str] = ("one", "two"),
    labels: Sequence[str] = ("A", "B"),
) -> list[PlannedRun]:
    """The checked runs of these blocks and labels, at scale small."""
    runs = reproduce.plan(paper, "small", assignments, seeds, out)
    return selected([run for run in runs if run.block in blocks], labels)


def table(paper: reproduce.Reproduction, runs: Sequence[PlannedRun], by: str = "") -> str:
    return reproduce.tables(paper, "small", runs, {}, by).files["table.md"]


@pytest.mark.parametrize("name", reproduce.reproductions())
def test_shipped_files_are_tables_of_percentages(name: str) -> None:
    paper = reproduce.read(name)
    assert name.split("-table")[1] in paper.title
    figures = [cell for row in paper.published.values() for cell in row]
    assert all(0 < cell[0] < 100 for cell in figures if cell)
    assert {len(cell) for cell in figures if cell} == ({1} if paper.spread == "none" else {2})
    for word in [*paper.blocks, *paper.runs]:
        assert re.fullmatch(r"[A-Za-z0-9.-]+", word), "it names a directory"


@pytest.mark.parametrize(("name", "block", "label", "printed"), PRINTED)
def test_what_the_papers_print(name: str, block: str, label: str, printed: list[float]) -> None:
    assert reproduce.read(name).published_cell(block, label) == printed


def test_every_shipped_table_was_looked_up_by_hand() -> None:
    assert {name for name, *_ in PRINTED} == set(reproduce.reproductions())


def test_tinyproto_ft_has_the_released_scripts_constants() -> None:
    script = {"cifar10": 0.001, "cifar100": 0.01, "tiny-imagenet": 0.01}
    for number, blocks in ((1, 3), (2, 5), (4, 3)):
        paper = reproduce.read(f"tinyproto-table{number}")
        keys = [paper.runs_of(block)["TinyProto-FT"] for block in paper.blocks]
        own = [run for run in keys if run.get("aggregation") == "aps-mean"]
        assert len(own) == blocks
        for run in own:  # counted before the split there, 4/3 of what is counted here
            assert float(run["aps-scale"]) == pytest.approx(4 / 3 * script[str(run["dataset"])], rel=1e-5)
        small = paper.runs_of(next(iter(paper.blocks)), "small")["TinyProto-FT"]
        assert (small["aggregation"], small["aps-scale"]) == ("auto", "auto")


def test_later_keys_win(paper: reproduce.Reproduction, tmp_path: Path) -> None:
    assert paper.runs_of("one")["A"]["learning-rate"] == 0.5
    assert paper.runs_of("one")["B"]["cps-dim"] == 2
    assert paper.runs_of("two")["B"]["cps-dim"] == 3
    assert paper.runs_of("two")["B"]["tinyproto.base"] == "fedtgp"
    small = planned(paper, tmp_path, "learning-rate=0.1", labels=["B"])
    assert [run.directory for run in small] == [tmp_path / block / "B-seed0" for block in ("one", "two")]
    assert small[0].requested.values["num-server-rounds"] == 2
    assert small[0].requested.values["learning-rate"] == 0.1
    full = [run for run in reproduce.plan(paper, "paper", [], [], tmp_path) if run.block == "one"]
    assert [(run.label, run.seed) for run in full] == [("A", 0), ("A", 1), ("B", 0), ("B", 1)]
    assert full[0].requested.values["num-server-rounds"] == 9
    assert reproduce.changes(paper, full) == []
    assert reproduce.changes(paper, small) == [
        "num-server-rounds = 2, the full setting has 9",
        "learning-rate = 0.1, the full setting has 0.01, 0.5",
        "seeds 0, the full setting has 0, 1",
    ]


def test_blocks_are_chosen_by_dataset_and_name(paper: reproduce.Reproduction) -> None:
    assert reproduce.chosen(paper, "", []) == ["one", "two"]
    assert reproduce.chosen(paper, "digits", []) == ["one"]
    assert reproduce.chosen(paper, "", ["two"]) == ["two"]
    for dataset, names, said in [
        ("mnist", [], "--dataset mnist: must be one of digits, fashion-mnist"),
        ("", ["three"], "--block three: must be one of one, two"),
        ("digits", ["two"], "none of the blocks two"),
    ]:
        with pytest.raises(PbflError, match=said):
            reproduce.chosen(paper, dataset, names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("A = [[51.50, 0.25], []]", "A = [[51.50]]"), "published.A has 1 entries; needed are 2"),
        (("A = [[51.50, 0.25], []]", "A = [[151.50], []]"), "published.A.0.0: Input should be less than"),
        (("A = [[51.50, 0.25], []]", "C = [[1.0], []]"), "must be both in runs and in published"),
        (("runs.B.cps-dim = 3", "runs.C.cps-dim = 3"), "blocks.two.runs.C: unknown run"),
        (('hardware = "a computer"', ""), "hardware: Field required"),
        (('round = "best"', 'round = "worst"'), "round: Input should be"),
    ],
)
def test_files_that_are_no_reproduction(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(PbflError, match=re.escape(said)):
        read(tmp_path, *change)


def test_the_table(paper: reproduce.Reproduction, tmp_path: Path) -> None:
    runs = planned(paper, tmp_path, seeds=[0, 1])
    for number, scores in ((0, (0.75, 0.25)), (1, (0.5, 0.5)), (4, (0.5, 0.5))):
        heads = (0.5, 0.5) if number == 0 else (0.5, 0.25)
        lines = [entry(n + 1, heads[n], scores[n]) for n in range(2)]
        write_run(runs[number].directory, lines, **runs[number].requested.values)
    files = reproduce.tables(paper, "small", runs, {"three": "dataset 'x' not found"}).files
    text = files["table.md"]
    # sample deviation of two values: their distance over the root of 2, 25/1.4142 = 17.68; 62.5 - 51.5
    assert "| A | global | 51.50 ± 0.25 | 62.50 ± 17.68 | 37.50 ± 17.68 | +11.00 |" in text
    assert "| A | global | - | 50.00 | 50.00 | - |" in text
    for line in (
        "Not finished: A (seed 1), B (seeds 0, 1).",
        "Do not believe it.",
        "* the moon was full",
        "**three** was left out: dataset 'x' not found",
        "* num-server-rounds = 2, the full setting has 9",
        "The paper's hardware: a computer.",
        "At scale small our results are not comparable with the paper's.",
    ):
        assert line in text
    assert "Our results are all by" not in text
    full = reproduce.tables(paper, "paper", runs, {}).files["table.md"]
    assert "not comparable" not in full
    first, second = csv.DictReader(files["table.csv"].splitlines())
    expected = {"block": "one", "run": "A", "predictor": "global", "seeds": "2", "best": "62.5000"}
    expected |= {"published": "51.50", "published_spread": "0.25", "difference": "11.0000"}
    assert {name: first[name] for name in expected} == expected
    expected = {"block": "two", "published": "", "difference": "", "best": "50.0000", "best_sd": ""}
    assert {name: second[name] for name in expected} == expected


def test_the_table_by_one_predictor(paper: reproduce.Reproduction, tmp_path: Path) -> None:
    runs = planned(paper, tmp_path, blocks=["one"])
    for run in runs:
        write_run(run.directory, [entry(1, 0.5, 0.75), entry(2, 0.25, 0.25)], **run.requested.values)
    text = table(paper, runs, "head")
    assert "scale small, by head" in text
    assert "Our results are all by head, the paper's by each method's own predictor." in text
    assert "| run | compared by | paper |" in text
    assert "| A | head | 51.50 ± 0.25 | 50.00 | 25.00 | -1.50 |" in text
    text = table(paper, runs, "local")
    assert "| A | local | 51.50 ± 0.25 | - | - | - |" in text
    assert "Never scored by local: A, B." in text
    edit(runs[1].directory / "run.json", moment="before")
    text = table(paper, runs)
    assert "| run | compared by | scored | paper |" in text
    assert "| A | global | after | 51.50 ± 0.25 |" in text
    assert "| B | global | before | 60.00 |" in text
    words = ["reproduce", tmp_path / "nine.toml", "--block", "one", "--engine", "processes", "--by", "head"]
    assert pbfl(*words, "--out", tmp_path).exit_code == 0
    row = next(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert (row["predictor"], row["best"]) == ("head", "50.0000")


def test_blocks_and_rows_that_were_not_asked_for_this_time_stay_in_the_tables(tmp_path: Path) -> None:
    paper = read(tmp_path, '"fashion-mnist"', '"digits"')  # on every machine
    out = tmp_path / "out"
    for run in planned(paper, out):
        write_run(run.directory, [entry(1, 0.5, 0.75), entry(2, 0.5, 0.25)], **run.requested.values)
    words = ["reproduce", tmp_path / "nine.toml", "--out", out, "--engine", "processes"]
    assert pbfl(*words).exit_code == 0
    before = {path: path.read_bytes() for path in out.glob("table.*")}
    assert pbfl(*words, "--block", "two", "--only", "B").exit_code == 0
    assert {path: path.read_bytes() for path in out.glob("table.*")} == before
    (out / "one" / "A-seed0" / "rounds.jsonl").unlink()  # begun, not finished
    assert pbfl(*words, "--block", "two").exit_code == 0
    rows = [line.split(",")[:2] for line in (out / "table.csv").read_text().splitlines()]
    assert rows == [["block", "run"], ["one", "B"], ["two", "A"], ["two", "B"]]


@pytest.mark.parametrize(
    ("spread", "cells", "said", "notes"),
    [
        ("clients", "75.00 ± 12.50", "± over clients.", ", ± over seeds"),  # 12.50 is the runs' own
        ("none", "75.00 ± 0.00", "the paper has no ±, ours is the sample standard deviation over seeds.", ""),
    ],
)
def test_the_table_says_what_each_deviation_is_over(
    spread: str, cells: str, said: str, notes: str, tmp_path: Path
) -> None:
    paper = read(tmp_path, 'spread = "seeds"', f'spread = "{spread}"')
    runs = planned(paper, tmp_path, seeds=[0, 1], blocks=["one"], labels=["A"])
    for run, last in zip(runs, (0.25, 0.5), strict=True):
        write_run(run.directory, [entry(1, 0.5, 0.75), entry(2, 0.5, last)], **run.requested.values)
    text = table(paper, runs)
    assert f"| A | global | 51.50 ± 0.25 | {cells} |" in text
    assert "| 37.50 ± 17.68 |" in text  # the column global, in both cases over the seeds
    assert f"the best round is compared; {said}" in text
    assert f"last-round accuracies{notes}.\n" in text
    if spread == "clients":
        assert "last-round accuracies.\n" in table(paper, runs[:1])


def test_a_row_without_scores_has_no_spread_over_clients_and_is_named(tmp_path: Path) -> None:
    paper = read(tmp_path, 'spread = "seeds"', 'spread = "clients"')
    runs = planned(paper, tmp_path, blocks=["one"])
    for run, globals_ in zip(runs, (None, 0.5), strict=True):
        write_run(run.directory, [entry(n, 0.25, globals_) for n in (1, 2)], **run.requested.values)
    files = reproduce.tables(paper, "small", runs, {}).files
    text = files["table.md"]
    assert "| A | global | 51.50 ± 0.25 | - | - | - | 25.00 | - |" in text
    assert "| B | global | 60.00 | 50.00 ± 12.50 | 50.00 ± 12.50 | -10.00 | 25.00 | 50.00 |" in text
    assert "\nNever scored by global: A.\n" in text
    row = next(csv.DictReader(files["table.csv"].splitlines()))
    assert (row["clients"], row["seeds"], row["best"], row["difference"]) == ("", "0", "", "")


def test_missing_data_is_named_with_its_files_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    result = pbfl("reproduce", "protonorm-table1", "--block", "cifar10", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "block cifar10 is left out: dataset 'cifar10' not found; looked for" in result.output
    assert "cifar-10-batches-py" in result.output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_differs(paper: reproduce.Reproduction, tmp_path: Path) -> None:
    done = pbfl("reproduce", tmp_path / "nine.toml", "--block", "one", "--out", tmp_path / "out", "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "scale small: num-server-rounds = 2, the full setting has 9" in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_list_names_blocks() -> None:
    assert ("fedcpd-table3", "FedCPD, Table 3: cifar100") in ROWS["reproductions"]()
