"""What run directories come to: groups of seeds, fairness, pairs on the same clients."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import results, summary
from pbfl_flwr.experiments.notes import majority_lines
from pbfl_flwr.experiments.pairs import AT, Asked, paired_sheet, probability
from pbfl_flwr.experiments.report import cost_sheet, fairness_sheet
from pbfl_flwr.experiments.results import scores
from pbfl_flwr.experiments.run_tables import client_sheet
from pbfl_flwr.experiments.statistics import holm
from pbfl_flwr.method import settings_in
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from tests.small_runs import columns, edit, entry, rounds_of, rows_of, write_lines, write_run

ROUNDS = {"num-server-rounds": 2}


def client_line(number: int, correct: list[int], tests: int = 4) -> dict[str, Any]:
    """One line of clients.jsonl: predictor global, the same number of test samples each."""
    return columns(number, [{"global": value} for value in correct], tests)


def run(path: Path, weighted: float, correct: list[int], **changes: Any) -> Path:
    write_run(path, [entry(1, 0.25, weighted)], **changes)
    write_lines(path / "clients.jsonl", client_line(1, correct))
    return path


def test_runs_that_differ_in_the_seed_are_one_row(tmp_path: Path) -> None:
    places = [
        run(tmp_path / "a0", 0.5, [1, 3]),
        run(tmp_path / "a1", 0.75, [2, 4], seed=1),
        run(tmp_path / "b0", 0.25, [0, 2], method="tinyproto"),
    ]
    groups = results.load(places)
    assert [(group.label, len(group.runs)) for group in groups] == [("fedproto", 2), ("tinyproto", 1)]
    sheet = fairness_sheet(groups)
    found = rows_of(sheet)[0]
    assert found["last"] == "62.50 ± 17.68"  # 25/√2
    assert "validation-chosen" not in found
    assert found["std over clients"] == "12.50 ± 0.00"
    assert found["worst decile"] == "50.00 ± 17.68"
    assert sheet.notes[-1].startswith("Always predicting a client's most frequent training class: 75.12 %")


def test_every_figure_of_a_run_by_hand_and_below_its_head(tmp_path: Path) -> None:
    shares = [(0.5, 0.25), (0.75, 0.125), (0.6875, 0.5), (0.625, 0.25)]  # on test data, on validation samples
    rounds = [
        entry(number, 0.25, weighted, validation={"global": {"weighted": held_out}})
        for number, (weighted, held_out) in enumerate(shares, start=1)
    ]
    rounds[1]["accuracy"]["global"]["std"] = 0.25
    counted = {"balanced": 0.3125, "macro_f1": 0.1875, "auc_macro": 0.6875, "auc_micro": 0.8125}
    rounds[3]["accuracy"]["global"] |= {"mean": 0.5625, **counted}
    path = write_run(tmp_path / "a", rounds)
    in_twentieths = [*range(20, 0, -1)]  # 5 %, 10 %, .. 100 %
    write_lines(path / "clients.jsonl", *(client_line(n, in_twentieths, tests=20) for n in range(1, 5)))
    plain = write_run(tmp_path / "b", [entry(1, 0.5, 0.5)], method="local")
    found, without = groups = results.load([path, plain])
    figures = {
        "last": 62.5,
        "best": 75,
        "validation_chosen": 68.75,
        "validation": 50,
        "validation_last": 25,
    }
    figures |= {"window": 64.0625}  # all four are among the last ten
    figures |= {"last_round": 4, "best_round": 2, "validation_chosen_round": 3}
    figures |= {"validation_round": 3, "validation_last_round": 4}
    figures |= {"mean": 56.25, "std": 12.5, "best_std": 25, "worst": 50, "best_decile": 97.5, "lowest": 5}
    figures |= {"head": 25, "global": 62.5, "majority": 75.12, **{key: 100 * n for key, n in counted.items()}}
    figures |= {
        "up": 100,
        "down": 300,
        "total": 1200,
        "paper": 36,
        "seconds": 2,
        "peak_mb": 512,
    }  # of one client
    assert found.first.figures == figures
    assert found.first.scores["head"].chosen is None
    in_csv, in_csv_without = csv.DictReader(summary.summary_csv(groups).splitlines())
    assert {key: in_csv[key] for key in figures if key in in_csv} == {
        key: f"{value:.4f}" for key, value in figures.items() if not key.endswith("_round")
    }
    assert in_csv["last_sd"] == in_csv["local"] == in_csv_without["validation_chosen"] == ""

    sheet = summary.comparison_sheet("", groups)
    row, row_without = rows_of(sheet)
    held_out = {"on validation data": "50.00", "on validation data, last": "25.00"}
    optional = {"validation-chosen": "68.75", **held_out}
    optional |= {
        "balanced accuracy": "31.25",
        "macro-F1": "18.75",
        "AUC macro": "68.75",
        "AUC micro": "81.25",
    }
    accuracies = {"last": "62.50", "best (on test data)": "75.00", "std over clients": "12.50", **optional}
    accuracies |= {"worst decile": "50.00", "head": "25.00", "global": "62.50", "seeds": "1", "rounds": "4"}
    costs = {"payload up": "100 B", "payload down": "300 B", "all bytes per round": "1.2 kB"}
    costs |= {"paper's scalars": "36", "s per round": "2.0"}
    assert row == {"run": found.label, "primary predictor": "global", **accuracies, **costs}
    assert {row_without[name] for name in optional} == {"-"}
    notes = "\n".join(sheet.notes)
    assert "\nBalanced accuracy (mean" in notes
    assert "\nNever" not in notes
    sheet = summary.comparison_sheet("", [without])
    assert not {*optional, "local", "etf"} & {*sheet.columns}
    assert not any(note.startswith("Balanced") for note in sheet.notes)

    (row,) = rows_of(fairness_sheet([found]))
    fairness = {"mean of clients": "56.25", "best decile": "97.50", "lowest client": "5.00"}
    assert {name: row.get(name, "") for name in {**accuracies, **fairness}} == {
        **dict.fromkeys(accuracies, ""), **fairness, **{name: accuracies[name] for name in accuracies if name in row}
    }  # fmt: skip
    assert "validation-chosen" in row
    assert rows_of(cost_sheet([found])) == [
        {"run": found.label, **costs, "peak memory of a worker, MB": "512"}
    ]


def test_majorities_of_several_partitions_are_told_once_each_in_ascending_order() -> None:
    (said,) = majority_lines([0.12, None, 0.095, 0.1, 0.12], "a new client")
    assert said.startswith(
        "Always predicting a new client's most frequent training class: 9.50, 10.00, 12.00 %, "
    )
    assert majority_lines([None, None]) == []


def test_a_pair_of_one_run_each_says_on_how_many_clients_and_has_no_p(tmp_path: Path) -> None:
    places = [
        run(tmp_path / "a", 0.5, [1, 3, 4]),
        run(tmp_path / "b", 0.25, [0, 3, 2], method="tinyproto"),
    ]
    sheet = paired_sheet(results.load(places))
    (found,) = rows_of(sheet)
    assert (
        found["first − second"] == "tinyproto − fedproto"
    )  # without training alone the first row is compared with
    assert (found["runs"], found["difference"]) == ("1", "-25.00")
    assert (found["95% interval"], found["p"], found["p (Holm)"]) == ("-", "-", "-")
    assert found["clients better / equal / worse"] == "0 / 1 / 2"
    assert found["remark"] == "consistent over clients of this run: 2 of 3"
    assert "With one run a side there is no interval and no p; --seeds makes several." in sheet.notes
    alone = paired_sheet(results.load(places), asked=Asked(planned={"fedproto": "fedproto"}))
    assert (alone.rows, alone.notes) == ((), ("No two rows are compared.",))


def test_a_pair_whose_runs_all_differ_by_the_same_has_no_p_but_more_than_one_run(tmp_path: Path) -> None:
    places = [
        run(tmp_path / f"{m}{seed}", 0.5, [1, 3], method=m, seed=seed)
        for m in ("fedproto", "local")
        for seed in (0, 1)
    ]
    sheet = paired_sheet(results.load(places))
    (found,) = rows_of(sheet)
    assert (found["runs"], found["p"], found["remark"]) == ("2", "-", "all runs differ by the same")
    assert not any("one run a side" in note or "p: paired" in note for note in sheet.notes)


def test_runs_are_the_units_and_weighted_and_unweighted_stand_side_by_side(tmp_path: Path) -> None:
    places = []
    for method, shares, mean in (
        ("fedproto", (0.5, 0.75, 0.625), 0.5),
        ("local", (0.25, 0.625, 0.125), 0.5625),
    ):
        for seed, weighted in enumerate(shares):
            path = write_run(tmp_path / f"{method}{seed}", [entry(1, 0, weighted)], method=method, seed=seed)
            edit(path / "rounds.jsonl", accuracy=with_mean(path, mean - seed / 16))
            write_lines(path / "clients.jsonl", client_line(1, [4, 1] if method == "fedproto" else [1, 1]))
            places.append(path)
    sheet = paired_sheet(results.load(places))
    (row,) = rows_of(sheet)
    differences = [0.25, 0.125, 0.5]  # mean 7/24, sample deviation 0.19094
    error, mean = 0.19094065395649334 / 3**0.5, 7 / 24
    low, high = (100 * (mean + way * 4.302652729911275 * error) for way in (-1, 1))
    assert sum(differences) / 3 == pytest.approx(mean)
    assert row["first − second"] == "fedproto − local"
    assert (row["runs"], row["difference"], row["unweighted"]) == ("3", "+29.17", "-6.25")
    assert row["95% interval"] == f"{low:+.2f} to {high:+.2f}"
    t = mean / error
    assert row["p"] == row["p (Holm)"] == f"{1 - t / (t**2 + 2) ** 0.5:.3f}"
    assert row["clients better / equal / worse"] == "1 / 1 / 0"
    assert row["remark"] == "weighted and unweighted differ in sign"
    assert any("share one partition, so this holds for this partition" in note for note in sheet.notes)


def with_mean(path: Path, mean: float) -> dict[str, Any]:
    """The accuracies in the only line of a run's rounds.jsonl, with this unweighted one."""
    accuracy: dict[str, Any] = json.loads((path / "rounds.jsonl").read_text())["accuracy"]
    return {**accuracy, "global": {**accuracy["global"], "mean": mean}}


FOUR = {  # label -> accuracies with three seeds
    "local": (0.5, 0.625, 0.75),
    "fedproto": (0.625, 0.75, 0.9375),
    "tinyproto": (0.5, 0.6875, 0.75),
    "protonorm": (0.75, 0.75, 0.75),
}


@pytest.fixture
def four(tmp_path: Path) -> list[results.RunGroup]:
    return results.load(
        [
            run(tmp_path / f"{method}{seed}", weighted, [1, 3], method=method, seed=seed)
            for method, shares in FOUR.items()
            for seed, weighted in enumerate(shares)
        ]
    )


def p_of(first: str, second: str) -> float:
    return float(ttest_rel(FOUR[first], FOUR[second]).pvalue)


@pytest.mark.parametrize(
    ("asked", "labels"),
    [
        (Asked(), ["fedproto − local", "tinyproto − local", "protonorm − local"]),
        (Asked("fedproto"), ["local − fedproto", "tinyproto − fedproto", "protonorm − fedproto"]),
        (Asked(pairs=("tinyproto/protonorm",)), ["tinyproto − protonorm"]),
        (Asked(pairs=("fedproto/local", "protonorm/fedproto")), ["fedproto − local", "protonorm − fedproto"]),
        (Asked(planned={"fedproto": "fedproto", "protonorm": "protonorm"}), ["protonorm − fedproto"]),
        (Asked("local", planned={"local": "local", "tinyproto": "tinyproto"}), ["tinyproto − local"]),
    ],
)
def test_holms_family_is_what_is_asked(four: list[results.RunGroup], asked: Asked, labels: list[str]) -> None:
    rows = rows_of(sheet := paired_sheet(four, asked=asked))
    assert [row["first − second"] for row in rows] == labels
    plain = [p_of(*label.split(" − ")) for label in labels]
    assert [row["p"] for row in rows] == [probability(p) for p in plain]
    assert [row["p (Holm)"] for row in rows] == [probability(p) for p in holm(plain)]
    many = f"{len(labels)} test{'s' if len(labels) > 1 else ''}"
    assert any(note == f"p (Holm): adjusted for the {many} of this table." for note in sheet.notes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Asked("nobody"), "--against nobody: must be one of a, b/c"),
        (Asked("a", ("a/b/c",)), "--against and --pair: each says which pairs are compared"),
        (Asked(pairs=("a/a",)), "--pair a/a: must be FIRST/SECOND, two different ones of a, b/c"),
        (Asked(pairs=("a",)), "--pair a: must be FIRST/SECOND"),
    ],
)
def test_pairs_that_are_not_there_are_refused(asked: Asked, said: str) -> None:
    with pytest.raises(PbflError, match=re.escape(said)):
        asked.check(["a", "b/c"])
    Asked(pairs=("a/b/c", "b/c/a")).check(["a", "b/c"])


def test_several_partitions_are_the_units(tmp_path: Path) -> None:
    """Two runs on each of three partitions: their means are tested, and clients are others on each."""
    places = [
        run(
            tmp_path / f"{method}{dealt}{seed}",
            share,
            [1, 3],
            method=method,
            seed=seed,
            **{"partition-seed": dealt},
        )
        for method, shares in (("fedproto", (0.5, 0.75, 0.875)), ("local", (0.25, 0.625, 0.25)))
        for dealt, mean in enumerate(shares)
        for seed, share in enumerate((mean - 0.125, mean + 0.125))
    ]
    groups = results.load(places)
    assert [(group.label, len(group.runs)) for group in groups] == [("fedproto", 6), ("local", 6)]
    (row,) = rows_of(sheet := paired_sheet(groups))
    assert (row["runs"], row["difference"]) == ("6 on 3 partitions", "+33.33")
    assert row["p"] == probability(float(ttest_rel((0.5, 0.75, 0.875), (0.25, 0.625, 0.25)).pvalue))
    assert row["clients better / equal / worse"] == "-"
    assert any("paired t-test over the partitions" in note for note in sheet.notes)
    assert not any("different data" in note for note in fairness_sheet(groups).notes)


def test_each_test_is_said_to_be_over_its_own_units(tmp_path: Path) -> None:
    """FedProto is on both partitions, each of the others on one or both of them, all with two seeds."""
    for method, partitions in {"fedproto": [0, 1], "local": [0, 1], "fedgh": [0], "fedtgp": [1]}.items():
        for dealt in partitions:
            for seed in (0, 1):
                share = 0.5 if method == "fedproto" else 0.25 + seed / 8 + dealt / 16
                keys = {"method": method, "seed": seed, "partition-seed": dealt}
                run(tmp_path / f"{method}{dealt}{seed}", share, [1, 3], **keys)

    def said(*methods: str) -> str:
        groups = results.load(sorted(path for name in methods for path in tmp_path.glob(f"{name}*")))
        return " ".join(paired_sheet(groups, asked=Asked("fedproto")).notes)

    over, runs = "paired t-test over the partitions", "paired t-test over the runs"
    one = "Of a pair on one partition it is over the runs, and holds for this partition."
    assert over in (both := said("fedproto", "local", "fedgh"))
    assert one in both
    assert one not in said("fedproto", "local")
    assert over not in (alone := said("fedproto", "fedgh", "fedtgp"))
    assert runs in alone
    assert "share one partition, so this holds for the pair's partition" in alone
    assert "share one partition, so this holds for this partition" in said("fedproto", "fedgh")


def test_the_round_that_is_compared(tmp_path: Path) -> None:
    """The last one, the best one, or the mean of the last ten: in figures, pairs, and over clients."""
    shares = {"fedproto": [0.5, *[0.25] * 10, 0.375], "local": [0.25] * 12}
    places = []
    for method, each in shares.items():
        places.append(
            write_run(
                tmp_path / method, [entry(n, 0, share) for n, share in enumerate(each, 1)], method=method
            )
        )
        right = {0.5: [4, 0], 0.25: [1, 1], 0.375: [1, 2]}
        write_lines(
            places[-1] / "clients.jsonl", *(client_line(n, right[share]) for n, share in enumerate(each, 1))
        )
    cases: tuple[tuple[results.Round, str, str], ...] = (
        ("last", "+12.50", "1 / 1 / 0"),
        ("best", "+25.00", "1 / 0 / 1"),
        ("window", "+1.25", "1 / 1 / 0"),
    )
    for at, difference, clients in cases:
        groups = results.load(places, at=at)
        assert groups[0].first.figures["window"] == pytest.approx(26.25)
        (row,) = rows_of(sheet := paired_sheet(groups))
        assert (row["difference"], row["clients better / equal / worse"]) == (difference, clients)
        assert ("mean of the last 10 scored" in fairness_sheet(groups).columns) == (at == "window")
        assert any(AT[at] in note for note in sheet.notes)


def test_window_leaves_out_the_initial_networks(tmp_path: Path) -> None:
    """The same rounds, scored before training (with a final scoring) or after it, have the same mean."""
    shares = [0.25, 0.5, 1.0]
    after = [entry(number, share, None) for number, share in enumerate(shares, 1)]
    before = [
        entry(number, share, None, accuracy_of_round=number - 1)
        for number, share in enumerate([0.0, *shares[:2]], 1)
    ]
    before[-1]["final"] = {"accuracy": after[-1]["accuracy"], "failures": []}
    places = [write_run(tmp_path / name, rounds) for name, rounds in (("a", after), ("b", before))]
    assert len(results.series(results.FinishedRun.load(places[1]).rounds)) == 4
    windows = [results.FinishedRun.load(place, by="head", at="window") for place in places]
    assert [run.compared() for run in windows] == [pytest.approx(7 / 12)] * 2
    assert windows[0].figures["window"] == windows[1].figures["window"]
    unfinished = write_run(tmp_path / "c", before[:1])  # with nothing else to show
    assert results.FinishedRun.load(unfinished, by="head", at="window").compared() == 0.0


def test_windows_over_other_clients_in_single_rounds_are_remarked(tmp_path: Path) -> None:
    """Each run scores both clients in some round; FedTGP in twice as many rounds as Local, both clients in all."""
    for method, clients in {
        "fedproto": [[0, 1], [0], [0, 1]],
        "fedgh": [[0, 1], [0], [0, 1]],
        "local": [[0, 1], [0, 1]],
        "fedtgp": [[0, 1]] * 4,
    }.items():
        rounds = [entry(number, 0, 0.5) for number in range(1, len(clients) + 1)]
        path = write_run(tmp_path / method, rounds, method=method)
        each = [client_line(number, [2] * len(who)) for number, who in enumerate(clients, 1)]
        write_lines(path / "clients.jsonl", *each)
    groups = results.load(sorted(tmp_path.iterdir()), at="window")
    asked = Asked(pairs=("fedproto/local", "fedproto/fedgh", "fedtgp/local"))
    remarks = [row[-1] for row in paired_sheet(groups, asked=asked).rows]
    assert ["over other clients in some rounds" in remark for remark in remarks] == [True, False, False]


def test_probabilities() -> None:
    assert [probability(p) for p in (None, 0.00099, 0.001)] == ["-", "< 0.001", "0.001"]


ALL = ("a0", "a1", "b0", "b1")  # FedProto and TinyProto, two seeds each
OTHER_SAMPLES = "Different data on the clients, so not compared: tinyproto − fedproto."
OF_ONE_ROW = "Runs of one row on different data: tinyproto."
OF_ROWS = "Rows on other data, though with the same keys: tinyproto than fedproto."


@pytest.mark.parametrize(
    ("names", "partitions", "scored", "runs", "said"),
    [
        (ALL, "xxxx", {}, ["2"], None),
        (ALL, "xxyy", {}, [], OTHER_SAMPLES),
        (ALL, "xxxy", {}, [], OTHER_SAMPLES),
        (ALL, "xx??", {}, ["2"], None),  # of a time without hashes
        (ALL[:3], "xxx", {}, ["1"], None),
        (("a0", "b1"), "xx", {}, [], "No common seed, so not compared: tinyproto − fedproto."),
        (
            ALL,
            "xxxx",
            {"b0": [1], "b1": [1]},
            [],
            "Accuracies cover different clients (fraction-train, fraction-evaluate, failures), "
            "so not compared: tinyproto − fedproto.",
        ),
    ],
)  # fmt: skip
def test_what_is_compared_with_what(
    tmp_path: Path,
    names: tuple[str, ...],
    partitions: str,
    scored: dict[str, list[int]],
    runs: list[str],
    said: str | None,
) -> None:
    """Pairs need the same samples on the same clients; ``scored`` are the clients of a run if not both."""
    for name, data in zip(names, partitions, strict=True):
        clients = scored.get(name, [0, 1])
        method = {"a": "fedproto", "b": "tinyproto"}[name[0]]
        path = run(tmp_path / name, 0.5, [2] * len(clients), method=method, seed=int(name[1]))
        edit(path / "clients.jsonl", client=clients)
        edit(path / "partition.json", data=None if data == "?" else data)
    groups = results.load([tmp_path / name for name in names])
    sheet = paired_sheet(groups)
    assert [row[1] for row in sheet.rows] == runs
    assert [note for note in sheet.notes if "so not compared" in note][:1] == ([said] if said else [])
    assert (OF_ONE_ROW in fairness_sheet(groups).notes) == (partitions == "xxxy")
    assert (OF_ROWS in fairness_sheet(groups).notes) == (partitions == "xxyy")


def test_rows_name_unlike_predictors_and_notes_stay_short(tmp_path: Path) -> None:
    places = [
        run(tmp_path / name, 0.5, [1, 3], method=name) for name in ("fedproto", "tinyproto", "protonorm")
    ]
    for name in ("run.json", "rounds.jsonl", "clients.jsonl"):
        file = places[2] / name
        file.write_text(file.read_text().replace('"global"', '"head"'))
    remarks = {row[0]: row[-1] for row in paired_sheet(results.load(places)).rows}
    same = "consistent over clients of this run: 2 of 2"  # a difference of 0, equal on both
    assert remarks == {"tinyproto − fedproto": same, "protonorm − fedproto": f"head vs. global; {same}"}


def test_pairs_at_other_moments_and_of_other_lengths_are_remarked(tmp_path: Path) -> None:
    places = [
        run(tmp_path / name, 0.5, [1, 3], method=name) for name in ("fedproto", "tinyproto", "protonorm")
    ]
    edit(places[1] / "run.json", moment="before")
    write_lines(places[2] / "rounds.jsonl", entry(2, 0.25, 0.5))
    write_lines(places[2] / "clients.jsonl", client_line(2, [1, 3]))
    groups = results.load(places)
    every = Asked(pairs=("fedproto/tinyproto", "fedproto/protonorm", "tinyproto/protonorm"))
    remarks = {row[0]: row[-1].rpartition("; ")[0] for row in paired_sheet(groups, asked=every).rows}
    moments, lengths = "scored after vs. before local training", "1 vs. 2 rounds"
    said = "scored before vs. after local training"
    assert remarks == {
        "fedproto − tinyproto": moments,
        "fedproto − protonorm": lengths,
        "tinyproto − protonorm": f"{said}; {lengths}",
    }
    for sheet in (fairness_sheet(groups), summary.comparison_sheet("", groups)):
        assert [row["scored"] for row in rows_of(sheet)] == ["after", "before", "after"]
        assert any(note.startswith("Scored: before or after") for note in sheet.notes)
    for sheet in (fairness_sheet(groups[::2]), summary.comparison_sheet("", groups[::2])):
        assert "scored" not in sheet.columns


def test_a_row_of_runs_of_different_lengths_is_remarked(tmp_path: Path) -> None:
    places = [run(tmp_path / f"a{seed}", 0.5, [1, 3], seed=seed, **ROUNDS) for seed in (0, 1)]
    places += [run(tmp_path / "b", 0.5, [1, 3], method="tinyproto", **ROUNDS)]
    write_lines(places[1] / "rounds.jsonl", entry(2, 0.25, 0.5))
    write_lines(places[1] / "clients.jsonl", client_line(2, [1, 3]))
    sheet = fairness_sheet(results.load(places))
    assert [row[3] for row in sheet.rows] == ["1–2", "1"]
    assert "Runs with different numbers of rounds in one row: fedproto." in sheet.notes


def test_a_row_of_runs_of_different_code_is_remarked(tmp_path: Path) -> None:
    """Code of the last rounds, since ``new-code`` goes on with a run."""
    places = [
        run(tmp_path / f"{m}{seed}", 0.5, [1, 3], method=m, seed=seed)
        for m in ("fedproto", "local")
        for seed in (0, 1)
    ]
    old, new = ({"method": {}, "code": {"mine:build": letter}} for letter in "ab")
    edit(places[0] / "run.json", **old)
    edit(places[1] / "run.json", **new)
    edit(places[2] / "run.json", **old, changes=[{"from_round": 1, **new}])
    edit(places[3] / "run.json", **new)
    sheet = summary.comparison_sheet("", results.load(places))
    assert "Code edited between the runs of one row: fedproto." in sheet.notes


def test_a_row_of_methods_with_other_settings_is_remarked(tmp_path: Path) -> None:
    """A newer version may decide otherwise what "auto" stands for."""
    places = [
        run(tmp_path / f"{m}{seed}", 0.5, [1, 3], method=m, seed=seed)
        for m in ("fedproto", "local")
        for seed in (0, 1)
    ]
    for seed in (0, 1):
        edit(places[seed] / "run.json", method={"weight": 1.0 + seed / 2})
        edit(places[2 + seed] / "run.json", method={"weight": 1.0, "mask_seed": 7 + seed})
    sheet = summary.comparison_sheet("", results.load(places))
    assert "Runs of one row whose method has other settings: fedproto." in sheet.notes


@pytest.mark.parametrize("method", METHODS)
def test_seeds_of_one_method_are_not_said_to_have_other_settings(tmp_path: Path, method: str) -> None:
    keys = {"method": method, **({"cps-dim": 2} if method == "tinyproto" else {})}
    places = [run(tmp_path / str(seed), 0.5, [1, 3], seed=seed, **keys) for seed in (0, 1)]
    for place in places:
        settings = parse(json.loads((place / "run.json").read_text())["configuration"], SECTIONS)
        edit(place / "run.json", method=settings_in(build_method(settings)))
    assert not any("other settings" in note for note in summary.run_notes(results.load(places)))


def test_a_run_whose_method_was_built_for_fewer_rounds_is_remarked(tmp_path: Path) -> None:
    """FedKD's schedule follows the number of rounds, so a run that is continued is not as one made at once."""
    places = [run(tmp_path / method, 0.5, [1, 3], method=method) for method in ("fedproto", "local")]
    edit(
        places[0] / "run.json",
        method={"rounds": 3},
        changes=[{"from_round": 4, "method": {"rounds": 6}, "code": {}}],
    )
    sheet = summary.comparison_sheet("", results.load(places))
    assert "Begun with another number of rounds, on which the method depends: fedproto." in sheet.notes


def test_clients_are_averaged_over_the_common_seeds(tmp_path: Path) -> None:
    groups = results.load(
        [
            run(tmp_path / "a0", 0.5, [1, 3]),
            run(tmp_path / "a1", 0.75, [3, 3], seed=1),
            run(tmp_path / "a2", 0.75, [4, 4], seed=2),
            run(tmp_path / "b0", 0.25, [0, 2], method="tinyproto"),
            run(tmp_path / "b1", 0.25, [0, 4], method="tinyproto", seed=1),
        ]
    )
    (row,) = rows_of(paired_sheet(groups, asked=Asked(pairs=("fedproto/tinyproto",))))
    assert (row["runs"], row["difference"]) == ("2", "+37.50")  # (0.25 + 0.5)/2
    assert row["clients better / equal / worse"] == "1 / 1 / 0"  # 4/8 and 0/8, 6/8 and 6/8


def test_devices_with_names_are_paired_by_name(tmp_path: Path) -> None:
    """Those that join are numbered as they come, in another order in every run."""

    def named(place: str, names: str, correct: list[int], **keys: object) -> Path:
        path = run(tmp_path / place, 0.5, correct, **keys)
        members = json.loads((path / "run.json").read_text())["clients"]
        named = [{**member, "name": name} for member, name in zip(members, names, strict=True)]
        edit(path / "run.json", clients=named)
        return path

    runs = [named("a0", "xy", [1, 3]), named("a1", "yx", [3, 0], seed=1)]
    runs += [
        named("b0", "yx", [3, 1], method="tinyproto"),
        named("b1", "xy", [0, 3], seed=1, method="tinyproto"),
    ]
    groups = results.load(runs)
    # of 4 test samples each: x 1 and 0, y 3 and 3
    assert [results.mean_over_seeds(group, [(1, 0), (1, 1)]) for group in groups] == [
        {"x": 0.125, "y": 0.75},
        {"y": 0.75, "x": 0.125},
    ]
    (row,) = rows_of(paired_sheet(groups))
    assert row["clients better / equal / worse"] == "0 / 2 / 0"
    assert row["remark"] == "all runs differ by the same"
    assert [row[:2] + row[-2:] for row in client_sheet(groups).rows] == [
        ("0", "x", "25.00", "25.00"),
        ("1", "y", "75.00", "75.00"),
    ]


def test_clients_have_the_samples_of_the_round_they_were_last_scored_in(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", [entry(1, 0.25, 0.5), entry(2, 0.25, 0.5)])
    later = {
        **columns(2, [{"head": 1, "global": 1}], tests=8),
        "num_train": [20],
    }  # of the first client alone
    write_lines(path / "clients.jsonl", client_line(1, [1, 3]), later)
    (group,) = results.load([path])
    sheet = client_sheet([group])
    place = sheet.columns.index("training samples")
    assert [row[place : place + 2] for row in sheet.rows] == [("20", "8"), ("6", "4")]


def test_a_last_accuracy_is_over_the_clients_of_its_round(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", [entry(1, 0.25, 0.5), entry(2, 0.25, 0.5)])
    unheard = columns(2, [])
    write_lines(path / "clients.jsonl", client_line(1, [1, 3]), unheard)
    assert results.FinishedRun.load(path).scored == {0, 1}
    assert results.FinishedRun.load(path).accuracies() == {}
    (path / "clients.jsonl").unlink()
    final = {**client_line(2, [3]), "client": [1]}
    write_lines(path / "clients.jsonl", client_line(1, [1, 3]), {**unheard, "final": final})
    assert results.FinishedRun.load(path).scored == {1}


def test_clients_of_a_round_that_is_not_there_yet_do_not_count(tmp_path: Path) -> None:
    path = run(tmp_path / "a", 0.5, [1, 3])
    write_lines(path / "clients.jsonl", client_line(2, [4, 4]))  # written first: killed, or still running
    record = results.FinishedRun.load(path)
    assert record.accuracies() == {0: 0.25, 1: 0.75}
    assert [line.round for line in record.clients] == [1]


def test_histories_that_lack_rounds_are_damaged(tmp_path: Path) -> None:
    """As of a run that was copied while it ran."""
    path = run(tmp_path / "a", 0.5, [1, 3])
    write_lines(path / "rounds.jsonl", entry(2, 0.25, 0.5))
    with pytest.raises(PbflError, match=r"clients.jsonl ends with round 1, rounds.jsonl with 2"):
        results.FinishedRun.load(path)
    write_lines(path / "rounds.jsonl", entry(4, 0.25, 0.5))
    with pytest.raises(PbflError, match=r"rounds.jsonl, line 3, is of round 4; must be of round 3"):
        results.FinishedRun.load(path)


def test_who_has_no_test_samples_is_in_no_accuracy(tmp_path: Path) -> None:
    path = run(tmp_path / "a", 0.5, [1, 3])
    edit(path / "clients.jsonl", **{**client_line(1, [1, 3, 0]), "num_test": [4, 4, 0]})
    record = results.FinishedRun.load(path)
    assert record.accuracies() == {0: 0.25, 1: 0.75}
    assert record.client_curves() == {0: [(1, 0.25)], 1: [(1, 0.75)]}
    assert record.scored == {0, 1}


OTHER = {"local-epochs": 2}
LONG = {"seed": 1, "local-epochs": 2, "batch-size": 16, "learning-rate": 0.02}  # too much for a label


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([("a", {}), ("b", {"cps-dim": 2})], ["fedproto (cps-dim=auto)", "fedproto (cps-dim=2)"]),
        # The third is the first again, the same seed: names of directories are all that tells them apart.
        ([("a", {}), ("b", {"cps-dim": 2}), ("c", {})], ["a", "b", "c"]),
        ([("mine/FP-seed0", {}), ("mine/FP-seed1", {"seed": 1}), ("own", {})], ["FP", "own"]),
        (
            [
                (f"{place}/FP-seed{s}", {"seed": s, **keys})
                for place, keys in (("mine", {}), ("other", OTHER))
                for s in (0, 1)
            ]
            + [("again/FP-seed0", {})],
            ["mine/FP", "other/FP", "again/FP"],
        ),
        ([("mine/FP-seed0", {}), ("mine/FP-seed1", LONG)], ["mine/FP-seed0", "mine/FP-seed1"]),
        (
            [("here/mine/FP-seed0", {}), ("there/mine/FP-seed0", {})],
            ["here/mine/FP-seed0", "there/mine/FP-seed0"],
        ),
    ],
    ids=[
        "keys that differ",
        "directories",
        "labels of a comparison",
        "labels in directories",
        "seeds of a label",
        "copies of a directory",
    ],
)
def test_labels_say_what_differs(
    tmp_path: Path, runs: list[tuple[str, dict[str, Any]]], labels: list[str]
) -> None:
    groups = results.load([run(tmp_path / place, 0.5, [1], **keys) for place, keys in runs])
    assert [group.label for group in groups] == labels


def test_two_directories_of_one_configuration_keep_their_own_seeds(tmp_path: Path) -> None:
    """Whichever was named first, and though only some seeds are in both."""
    old = [run(tmp_path / f"old/FP-seed{seed}", 0.5, [1], seed=seed) for seed in (0, 1)]
    new = [run(tmp_path / f"new/FP-seed{seed}", 0.75, [1], seed=seed) for seed in (0, 1, 2)]
    for places in ([*old, *new], [*new, *old]):
        found = {group.label: [each.path for each in group.runs] for group in results.load(places)}
        assert found == {"old/FP": old, "new/FP": new}


def test_a_copy_of_one_run_leaves_the_others_together(tmp_path: Path) -> None:
    places = [run(tmp_path / f"seed{seed}/fedproto", 0.5, [1], seed=seed) for seed in (0, 1, 2)]
    again = run(tmp_path / "again/fedproto", 0.5, [1])
    assert [[each.path for each in group.runs] for group in results.load([*places, again])] == [
        places,
        [again],
    ]


def test_labels_of_one_directory_keep_their_own_seeds(tmp_path: Path) -> None:
    """Two rows of a comparison may have the same keys."""
    one = run(tmp_path / "A-seed2", 0.5, [1], seed=2)
    others = [run(tmp_path / f"B-seed{seed}", 0.5, [1], seed=seed) for seed in (2, 0)]
    found = [[each.path for each in group.runs] for group in results.load([one, *others])]
    assert found == [[one], [*reversed(others)]]


def test_runs_are_repetitions_only_where_their_results_may_differ_by_the_seed_alone(tmp_path: Path) -> None:
    places = [
        run(tmp_path / "a", 0.5, [1, 3]),
        run(
            tmp_path / "b", 0.5, [1, 3], seed=1, threads=2, **{"round-timeout": 9, "max-upload-mb": 9}
        ),  # which change no result
        run(tmp_path / "c", 0.5, [1, 3], seed=2, **{"cps-dim": 2}),
    ]
    found = [(group.label, [run.seed for run in group.runs]) for group in results.load(places)]
    assert found == [("fedproto (cps-dim=auto)", [0, 1]), ("fedproto (cps-dim=2)", [2])]


def without(run_dir: Path, key: str) -> Path:
    """Make a run older than a key."""
    about = json.loads((run_dir / "run.json").read_text())
    about["configuration"].pop(key)
    edit(run_dir / "run.json", **about)
    return run_dir


@pytest.mark.parametrize(
    ("dataset", "deals", "alike"),
    [
        ("mine:load", ("h 1.5", "h 1.50001"), True),  # samples differ in rounding
        ("mine:load", ("h 1.5", "h 1.6"), False),
        ("mine:load", ("h 1.5", ""), True),  # a run of before deals were recorded
        ("digits", ("h 1.5", "h 1.5"), False),  # a partition function, but other files
        ("digits", ("", ""), False),
    ],
)
def test_samples_of_functions_are_compared_as_they_were_dealt(
    tmp_path: Path, dataset: str, deals: tuple[str, str], alike: bool
) -> None:
    for name, deal in zip(("fedproto", "local"), deals, strict=True):
        path = run(tmp_path / name, 0.5, [1, 3], method=name, dataset=dataset)
        clients = json.loads((path / "run.json").read_text())["clients"]
        edit(path / "run.json", clients=[{**client, "deal": deal} for client in clients])
        edit(path / "partition.json", data=name[0] * 32)
    one, other = results.load([tmp_path / "fedproto", tmp_path / "local"])
    assert results.same_data(one.first, other.first) == alike


@pytest.mark.parametrize(
    ("declared", "alike", "rows"),
    [
        ({}, True, 1),
        ({"num_train": 99}, False, 1),
        ({"columns": "other"}, False, 1),
        ({"labels": ["x", "y", "z"]}, False, 2),  # another task is another row
    ],
)
def test_data_of_the_clients_own_are_compared_as_they_declared_them(
    tmp_path: Path, declared: dict[str, Any], alike: bool, rows: int
) -> None:
    for seed in range(2):
        path = run(tmp_path / f"{seed}", 0.5, [1, 3], seed=seed)
        edit(path / "partition.json", counts=None, data=None)
        clients = json.loads((path / "run.json").read_text())["clients"]
        edit(path / "run.json", clients=[{**client, **(declared if seed else {})} for client in clients])
    groups = results.load([tmp_path / "0", tmp_path / "1"])
    one, other = (found for group in groups for found in group.runs)
    assert (results.same_data(one, other), len(groups)) == (alike, rows)


def test_networks_that_no_key_names_are_remarked(tmp_path: Path) -> None:
    for name, method, seed in (("0", "fedproto", 0), ("1", "fedproto", 1), ("other", "local", 1)):
        path = run(tmp_path / name, 0.5, [1, 3], method=method, seed=seed)
        clients = json.loads((path / "run.json").read_text())["clients"]
        if name == "1":
            clients[0]["architecture"] = "cnn2"
        edit(path / "run.json", clients=clients)
    groups = results.load([tmp_path / "0", tmp_path / "1", tmp_path / "other"])
    note = "Runs of one row with other networks on the clients: fedproto."
    assert note in summary.run_notes(groups)
    assert "other networks on the clients" in paired_sheet(groups).rows[0][-1]
    alike = results.load([tmp_path / "0", tmp_path / "other"])
    assert note not in summary.run_notes(alike)
    run(tmp_path / "named", 0.5, [1, 3], method="fedtgp", seed=1, models="mlp-8")  # a key says it
    named = paired_sheet(results.load([tmp_path / "1", tmp_path / "named"]))
    assert (len(named.rows), "networks" in named.rows[0][-1]) == (1, False)


def test_a_place_or_a_download_does_not_make_other_data(tmp_path: Path) -> None:
    first = run(tmp_path / "first", 0.5, [1, 3], download=True, **{"data-dir": "/a"})
    moved = run(tmp_path / "moved", 0.5, [1, 3], method="local", **{"data-dir": "/b"})
    for path in (first, moved):
        edit(path / "partition.json", data="x" * 32)
    unread = run(tmp_path / "unread", 0.5, [1, 3], method="fedtgp", **{"data-dir": "/c"})
    edit(unread / "partition.json", data=None)
    runs = [group.first for group in results.load([first, moved, unread])]
    assert [results.same_data(runs[0], other) for other in runs[1:]] == [True, False]
    again = run(tmp_path / "again", 0.5, [1, 3], seed=1, **{"data-dir": "/a"})
    assert len(results.load([first, again])) == 1


@pytest.mark.parametrize("newer", ["trim-share", "fedtgp.margin-cap"])
def test_a_run_that_is_older_than_a_key_has_its_default(tmp_path: Path, newer: str) -> None:
    changes: list[dict[str, Any]] = [{}, {}, {newer: 0.25}]
    old, *others = [
        run(tmp_path / str(seed), 0.5, [1, 3], method="fedtgp", seed=seed, **keys)
        for seed, keys in enumerate(changes)
    ]
    default = json.loads((old / "run.json").read_text())["configuration"][newer]
    found = results.load([without(old, newer), *others])
    assert [[run.seed for run in group.runs] for group in found] == [[0, 1], [2]]
    assert [group.label for group in found] == [f"fedtgp ({newer}={value})" for value in (default, 0.25)]


def test_runs_of_two_methods_have_the_same_data_if_one_is_older_than_a_key(tmp_path: Path) -> None:
    old = without(run(tmp_path / "old", 0.5, [1, 3]), "max-samples")
    new = run(tmp_path / "new", 0.5, [1, 3], method="local")
    fewer = run(tmp_path / "fewer", 0.5, [1, 3], method="fedtgp", **{"max-samples": 50})
    first, second, third = (group.first for group in results.load([old, new, fewer]))
    assert results.same_data(first, second)
    assert not results.same_data(first, third)


def test_what_cannot_be_reported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PbflError, match="is given twice"):
        results.load([run(tmp_path / "a", 0.5, [1]), Path("a")])
    with pytest.raises(PbflError, match="no finished round"):
        results.load([write_run(tmp_path / "empty", [], **{"num-server-rounds": 1})])


def test_the_first_of_equally_good_rounds_is_the_best_one_and_the_scoring_at_the_end_counts() -> None:
    def at(weighted: float, mean: float) -> dict[str, Any]:
        return {"head": {"weighted": weighted, "mean": mean}}

    # Scored before training: a line holds what the round before it came to, the last one its own as well.
    lines = [
        entry(1, 0, None, accuracy_of_round=0, accuracy=at(0.25, 0.5), validation=at(0.5, 0.0)),
        entry(2, 0, None, accuracy_of_round=1, accuracy=at(0.75, 0.25), validation=at(0.5, 0.0)),
        entry(3, 0, None, accuracy_of_round=2, accuracy=at(0.75, 0.375), validation=at(0.25, 0.0)),
    ]
    rounds = rounds_of(*lines)
    found = scores(rounds)["head"]
    assert (found.last[0], found.best[0]) == (2, 1)
    assert found.chosen is not None
    assert found.chosen == (0, rounds[0].accuracy["head"])  # 0.5 on validation samples, first in round 0
    assert found.validation == (0, rounds[0].validation["head"])
    assert found.validation_last == (2, rounds[2].validation["head"])
    assert scores(rounds, "mean")["head"].best[0] == 0
    final = {"accuracy": at(0.5, 0.625), "validation": at(0.75, 0.0)}
    rounds = rounds_of(*lines[:2], {**lines[2], "final": entry(3, 0, None, final=final)["final"]})
    found = scores(rounds)["head"]
    assert (found.last[0], found.last[1].mean, found.best[0]) == (3, 0.625, 1)
    assert found.chosen == found.last == scores(rounds, "mean")["head"].best
    assert found.validation == found.validation_last
    assert found.validation is not None
    assert found.validation[1].weighted == 0.75
    assert set(scores(rounds)) == {"head"}
    assert scores([]) == {}


def test_a_predictor_that_one_seed_lacks_is_not_said_to_be_unscored(tmp_path: Path) -> None:
    full, without = entry(1, 0.5, 0.6), entry(1, 0.5, 0.6)
    del without["accuracy"]["global"]
    runs = [write_run(tmp_path / f"a{seed}", [line], seed=seed) for seed, line in enumerate((full, without))]
    runs += [write_run(tmp_path / f"b{seed}", [full], seed=seed, method="local") for seed in (0, 1)]
    groups = results.load(runs, by="global")
    sheet = fairness_sheet(groups)
    notes, seeds = sheet.notes, sheet.columns.index("seeds")
    assert [row[seeds] for row in sheet.rows] == ["1", "2"]
    assert "Not scored for every seed: fedproto, 1 of 2 seeds." in notes
    assert not [note for note in notes if note.startswith("Never scored")]
    notes = paired_sheet(groups).notes
    assert "Not scored for every seed, so not compared: fedproto − local." in notes
    never = [write_run(tmp_path / f"c{seed}", [without], seed=seed, method="fedavg") for seed in (0, 1)]
    notes = fairness_sheet(results.load([*runs, *never], by="global")).notes
    assert "Never scored by global: fedavg." in notes
    assert "Not scored for every seed: fedproto, 1 of 2 seeds." in notes
