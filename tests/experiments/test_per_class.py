"""Tables and pictures of runs with per-class."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.experiments import results, run_tables, show
from pbfl_flwr.experiments.results import FinishedRun, RunGroup
from tests.small_runs import columns, edit, entry, printed, terminal, write_lines, write_run

# Class b has no test samples. Of the others 3 of 4 and 0 of 1 are right.
COUNTED: dict[str, Any] = {
    "weighted": 0.6,
    "balanced": 0.375,
    "balanced_mean": 0.5,
    "macro_f1": 0.25,
    "macro_f1_mean": 0.125,
    "by_class": [0.75, None, 0.0],
    "tested": [4, 0, 1],
}
COLUMNS: dict[str, Any] = columns(
    1,
    [{"global": 2, "head": 1}, {"global": 1, "head": 1}],
    num_test=[3, 2],
    by_class=[
        {"classes": [0], "tested": [3], "right": {"global": [2]}, "answered": {"global": [3]}},
        {"classes": [0, 1, 2], "tested": [1, 0, 1], "right": {"global": [1, 0, 0]}, "answered": {"global": [1, 1, 0]}},
    ],
)  # fmt: skip


def line(**counted: Any) -> dict[str, Any]:
    found = entry(1, 0.5, 0.6)
    for name, score in found["accuracy"].items():
        score |= {**COUNTED, **(counted if name == "global" else {})}
    return found


def run(place: Path, *lines: dict[str, Any], **keys: Any) -> Path:
    path = write_run(place, list(lines), **{"per-class": True, **keys})
    write_lines(path / "clients.jsonl", COLUMNS)
    return path


def group(path: Path) -> RunGroup:
    return RunGroup("one", (FinishedRun.load(path),))


def shown(path: Path) -> list[str]:
    show.show_run(path, console := terminal(120))
    return printed(console)


def test_show_prints_both_tables(tmp_path: Path) -> None:
    told = shown(run(tmp_path / "run", line(balanced=0.5, by_class=[1.0, None, 0.25])))
    words = [text.split() for text in told]
    assert ["global", "(primary)", "1", "60.00", "50.00", "25.00", "50.00", "12.50"] in words
    assert ["head", "1", "60.00", "37.50", "25.00", "50.00", "12.50"] in words
    assert ["class", "test", "samples", "head", "global"] in words
    assert ["a", "4", "75.00", "100.00"] in words
    assert ["c", "1", "0.00", "25.00"] in words
    assert "Without test samples of scored clients: b." in told
    assert not any("seed of each" in text for text in told)


def test_show_prints_nothing_of_it_without_the_key(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [entry(1, 0.5, 0.6)])
    assert not [text for text in shown(path) if "class" in text.lower() and "most frequent" not in text]
    assert run_tables.class_sheets([group(path)]) == []


def test_the_last_scoring(tmp_path: Path) -> None:
    early = line() | {"accuracy_of_round": 0}
    early["final"] = {"accuracy": line(balanced=1.0)["accuracy"], "failures": []}
    path = write_run(tmp_path / "run", [early])
    edit(path / "run.json", moment="before")
    sheet = run_tables.balance_sheet([group(path)])
    assert sheet is not None
    rows = {row[1]: row for row in sheet.rows}
    assert rows["global (primary)"][2:5] == ("1", "60.00", "100.00")


def test_a_class_that_another_predictor_was_tested_on_is_shown(tmp_path: Path) -> None:
    found = line()
    found["accuracy"]["head"] |= {"by_class": [0.75, 0.25, None], "tested": [4, 4, 0]}
    path = run(tmp_path / "run", found)
    sheet = run_tables.class_sheet([group(path)])
    assert sheet is not None
    assert sheet.columns[2:] == ("test samples", "head", "global")
    assert [row[1:] for row in sheet.rows] == [
        ("a", "4", "75.00", "75.00"),
        ("b", "0", "25.00", "-"),
        ("c", "1", "-", "0.00"),
    ]
    assert not [note for note in sheet.notes if note.startswith("Without test samples")]


def heights(axes: Any) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


def test_the_page_has_tables_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra 'report')")
    from pbfl_flwr.experiments import pictures, report

    with_it = run(tmp_path / "with", line())
    without = write_run(tmp_path / "without", [entry(1, 0.5, 0.6)], method="local")
    groups = results.load([with_it, without])
    sections = pictures.draw(groups)
    classes = next(section for section in sections if section.title == "Classes")
    assert [picture.name for picture in classes.pictures] == ["accuracy-by-class-0", "clients-by-class-0"]
    assert classes.left_out == ()
    points, bars, *_ = classes.pictures[0].figure.axes
    values = [drawn.get_ydata() for drawn in points.get_lines()]
    np.testing.assert_array_equal(values, [[75.0, np.nan, 0.0]] * 2)
    assert heights(bars) == [4, 0, 1]
    (image,) = classes.pictures[1].figure.axes[0].get_images()
    shown = image.get_array()
    assert shown is not None
    shown_values = np.ma.filled(shown.astype(float), np.nan)
    np.testing.assert_allclose(shown_values, [[200 / 3, 100], [np.nan, np.nan], [np.nan, 0]])
    page = report.page(groups, sections)
    assert "Accuracy by class" in page
    assert "Class-balanced metrics" in page
    sheet = run_tables.class_sheet(groups)
    assert sheet is not None
    assert [row[:3] for row in sheet.rows] == [("fedproto", "a", "4"), ("fedproto", "c", "1")]
    assert sheet.notes[-1] == "Without test samples of scored clients: fedproto: b."
    for title in ("Class-balanced metrics", "Accuracy by class"):
        assert "First seed of each configuration." in page.split(f"{title}</h2>")[1].split("<h2")[0]


def test_by_a_predictor_the_page_shows_its_counts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra 'report')")
    from pbfl_flwr.experiments import pictures, report

    path = run(tmp_path / "run", line())
    found = json.loads((path / "rounds.jsonl").read_text())
    found["accuracy"]["head"] |= {"by_class": [None, 0.5, 0.5], "tested": [0, 2, 3]}
    (path / "rounds.jsonl").write_text(json.dumps(found) + "\n")
    groups = results.load([path], by="head")
    sections = pictures.draw(groups)
    classes = next(section for section in sections if section.title == "Classes")
    (picture,) = classes.pictures  # the clients counted by the primary predictor alone
    assert "Predictor 'head': accuracy 60.0 %" in picture.caption
    assert heights(picture.figure.axes[1]) == [0, 2, 3]
    assert classes.left_out == ("fedproto: no client was scored by head",)
    page = report.page(groups, sections)
    assert "test samples are those of head." in page
    assert "Without test samples" not in page  # each class has some, a and b for one predictor each
