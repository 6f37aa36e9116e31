"""What run directories come to: groups of seeds, fairness, pairs on the same clients."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import results, summary
from pbfl_flwr.experiments.notes import majority_lines
from pbfl_flwr.experiments.pairs import paired_sheet, probability
from pbfl_flwr.experiments.report import cost_sheet, fairness_sheet
from pbfl_flwr.experiments.results import scores
from pbfl_flwr.experiments.run_tables import client_sheet
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
    write_lines(path / "clients.jsonl", client_line(4, [*range(20, 0, -1)], tests=20))  # 5 %, 10 %, .. 100 %
    plain = write_run(tmp_path / "b", [entry(1, 0.5, 0.5)], method="local")
    found, without = groups = results.load([path, plain])
    figures = {
        "last": 62.5,
        "best": 75,
        "validation_chosen": 68.75,
        "validation": 50,
        "validation_last": 25,
    }
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


def test_pairs_on_the_same_clients(tmp_path: Path) -> None:
    places = [
        run(tmp_path / "a", 0.5, [1, 3, 4]),
        run(tmp_path / "b", 0.25, [0, 3, 2], method="tinyproto"),
    ]
    (found,) = rows_of(paired_sheet(results.load(places)))
    assert found["first − second"] == "fedproto − tinyproto"
    assert (found["n"], found["difference"]) == ("3", "+25.00")  # (1/4 + 0 + 2/4)/3
    assert found["better / equal / worse"] == "2 / 1 / 0"
    assert "not informative" in found["remark"]


def test_p_values_are_adjusted_for_the_rows_of_their_kind(tmp_path: Path) -> None:
    """Two families, over clients and over seeds, of three rows each."""
    correct = {"fedproto": [9] * 8, "tinyproto": [*range(8)], "protonorm": [0, 1, 2, 3, 4, 5, 7, 6]}
    runs = [
        run(tmp_path / f"{method}{seed}", weighted, each, method=method, seed=seed)
        for (method, each), weighted in zip(correct.items(), (0.75, 0.5, 0.25), strict=True)
        for seed in (0, 1)
    ]
    for path in runs:
        edit(path / "clients.jsonl", num_test=[10] * 8)
    rows = rows_of(paired_sheet(results.load(runs)))
    # All eight differ and agree, 2/2⁸; the last two methods differ on two clients, one for each; two seeds, 2/2².
    assert [(row["over"], row["p"], row["p (Holm)"]) for row in rows] == [
        ("clients", "0.008", "0.023"), ("seeds", "0.500", "1.000"),
        ("clients", "0.008", "0.023"), ("seeds", "0.500", "1.000"),
        ("clients", "1.000", "1.000"), ("seeds", "0.500", "1.000"),
    ]  # fmt: skip
    assert [row["95% interval"] for row in rows][1] == "+25.00 to +25.00"
    assert [probability(p) for p in (None, 0.00099, 0.001)] == ["-", "< 0.001", "0.001"]


ALL = ("a0", "a1", "b0", "b1")  # FedProto and TinyProto, two seeds each
CLIENTS, SEEDS = ("clients", "2"), ("seeds", "2")
OTHER_SAMPLES = "Different data on the clients, so not compared: fedproto − tinyproto."
OF_ONE_ROW = "Runs of one row on different data: tinyproto."


@pytest.mark.parametrize(
    ("names", "partitions", "scored", "rows", "said"),
    [
        (ALL, "xxxx", {}, [CLIENTS, SEEDS], None),
        (ALL, "xxyy", {}, [], OTHER_SAMPLES),
        (ALL, "xxxy", {}, [], OTHER_SAMPLES),
        (ALL, "xx??", {}, [CLIENTS, SEEDS], None),  # of a time without hashes
        (ALL[:3], "xxx", {}, [CLIENTS], "Only one common seed, so not compared over seeds: fedproto − tinyproto."),
        (("a0", "b1"), "xx", {}, [], "No common seed, so not compared: fedproto − tinyproto."),
        (
            ALL,
            "xxxx",
            {"b0": [1], "b1": [1]},
            [("clients", "1")],
            "Accuracies cover different clients (fraction-train, fraction-evaluate, failures), "
            "so not compared over seeds: fedproto − tinyproto.",
        ),
        (
            ALL,
            "xxxx",
            {"a0": [0], "a1": [1]},
            [],
            "No client scored by both in every common seed, so not compared over clients: fedproto − tinyproto.",
        ),
    ],
)  # fmt: skip
def test_what_is_compared_with_what(
    tmp_path: Path,
    names: tuple[str, ...],
    partitions: str,
    scored: dict[str, list[int]],
    rows: list[tuple[str, str]],
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
    assert [row[1:3] for row in sheet.rows] == rows
    assert [note for note in sheet.notes if "so not compared" in note][:1] == ([said] if said else [])
    assert (OF_ONE_ROW in fairness_sheet(groups).notes) == (partitions == "xxxy")


def test_rows_name_unlike_predictors_and_notes_stay_short(tmp_path: Path) -> None:
    places = [
        run(tmp_path / name, 0.5, [1, 3], method=name) for name in ("fedproto", "tinyproto", "protonorm")
    ]
    for name in ("run.json", "rounds.jsonl", "clients.jsonl"):
        file = places[2] / name
        file.write_text(file.read_text().replace('"global"', '"head"'))
    sheet = paired_sheet(results.load(places))
    remarks = {row[0]: row[-1] for row in sheet.rows}
    assert remarks["fedproto − tinyproto"] == "no pair differs"
    assert remarks["fedproto − protonorm"].startswith("global vs. head")
    assert "Only one common seed, so not compared over seeds: every pair." in sheet.notes


def test_pairs_at_other_moments_and_of_other_lengths_are_remarked(tmp_path: Path) -> None:
    places = [
        run(tmp_path / name, 0.5, [1, 3], method=name) for name in ("fedproto", "tinyproto", "protonorm")
    ]
    edit(places[1] / "run.json", moment="before")
    write_lines(places[2] / "rounds.jsonl", entry(2, 0.25, 0.5))
    groups = results.load(places)
    remarks = {row[0]: row[-1] for row in paired_sheet(groups).rows}
    moments, lengths = "scored after vs. before local training", "1 vs. 2 rounds"
    assert remarks["fedproto − tinyproto"] == f"{moments}; no pair differs"
    assert remarks["fedproto − protonorm"] == f"{lengths}; no pair differs"
    said = "scored before vs. after local training"
    assert remarks["tinyproto − protonorm"] == f"{said}; {lengths}; no pair differs"
    for sheet in (fairness_sheet(groups), summary.comparison_sheet("", groups)):
        assert [row["scored"] for row in rows_of(sheet)] == ["after", "before", "after"]
        assert any(note.startswith("Scored: before or after") for note in sheet.notes)
    for sheet in (fairness_sheet(groups[::2]), summary.comparison_sheet("", groups[::2])):
        assert "scored" not in sheet.columns


def test_a_row_of_runs_of_different_lengths_is_remarked(tmp_path: Path) -> None:
    places = [run(tmp_path / f"a{seed}", 0.5, [1, 3], seed=seed, **ROUNDS) for seed in (0, 1)]
    places += [run(tmp_path / "b", 0.5, [1, 3], method="tinyproto", **ROUNDS)]
    write_lines(places[1] / "rounds.jsonl", entry(2, 0.25, 0.5))
    sheet = fairness_sheet(results.load(places))
    assert [row[3] for row in sheet.rows] == ["1–2", "1"]
    assert "Runs with different numbers of rounds in one row: fedproto." in sheet.notes


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
    over_clients, over_seeds = paired_sheet(groups).rows
    assert over_clients[1:4] == ("clients", "2", "+25.00")  # ((4 - 0)/8 + (6 - 6)/8)/2
    assert over_seeds[1:4] == ("seeds", "2", "+37.50")  # (0.25 + 0.5)/2


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
    assert [results.mean_over_seeds(group, [0, 1]) for group in groups] == [
        {"x": 0.125, "y": 0.75},
        {"y": 0.75, "x": 0.125},
    ]
    rows = rows_of(paired_sheet(groups))
    assert [(row["over"], row["better / equal / worse"]) for row in rows] == [
        ("clients", "0 / 2 / 0"), ("seeds", "0 / 2 / 0")
    ]  # fmt: skip
    assert [row[:2] + row[-2:] for row in client_sheet(groups).rows] == [
        ("0", "x", "25.00", "25.00"),
        ("1", "y", "75.00", "75.00"),
    ]


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
    ],
    ids=[
        "keys that differ",
        "directories",
        "labels of a comparison",
        "labels in directories",
        "seeds of a label",
    ],
)
def test_labels_say_what_differs(
    tmp_path: Path, runs: list[tuple[str, dict[str, Any]]], labels: list[str]
) -> None:
    groups = results.load([run(tmp_path / place, 0.5, [1], **keys) for place, keys in runs])
    assert [group.label for group in groups] == labels


def test_runs_are_repetitions_only_where_their_results_may_differ_by_the_seed_alone(tmp_path: Path) -> None:
    places = [
        run(tmp_path / "a", 0.5, [1, 3]),
        run(
            tmp_path / "b", 0.5, [1, 3], seed=1, threads=2, **{"round-timeout": 9, "max-upload-mb": 9}
        ),  # which change no result
        run(tmp_path / "c", 0.5, [1, 3], seed=2, **{"cps-dim": 2}),
    ]
    found = [(group.label, [*group.by_seed()]) for group in results.load(places)]
    assert found == [("fedproto (cps-dim=auto)", [0, 1]), ("fedproto (cps-dim=2)", [2])]


def without(run_dir: Path, key: str) -> Path:
    """Make a run older than a key."""
    about = json.loads((run_dir / "run.json").read_text())
    about["configuration"].pop(key)
    edit(run_dir / "run.json", **about)
    return run_dir


@pytest.mark.parametrize("newer", ["trim-share", "fedtgp.margin-cap"])
def test_a_run_that_is_older_than_a_key_has_its_default(tmp_path: Path, newer: str) -> None:
    changes: list[dict[str, Any]] = [{}, {}, {newer: 0.25}]
    old, *others = [
        run(tmp_path / str(seed), 0.5, [1, 3], method="fedtgp", seed=seed, **keys)
        for seed, keys in enumerate(changes)
    ]
    default = json.loads((old / "run.json").read_text())["configuration"][newer]
    found = results.load([without(old, newer), *others])
    assert [[*group.by_seed()] for group in found] == [[0, 1], [2]]
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
    assert "Not scored for every seed, so not compared over seeds: fedproto − local." in notes
    never = [write_run(tmp_path / f"c{seed}", [without], seed=seed, method="fedavg") for seed in (0, 1)]
    notes = fairness_sheet(results.load([*runs, *never], by="global")).notes
    assert "Never scored by global: fedavg." in notes
    assert "Not scored for every seed: fedproto, 1 of 2 seeds." in notes
