"""The page: everything is on it, nothing comes from elsewhere, nobody's words become markup."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra 'report')")
pytest.importorskip("jinja2", reason="jinja2 is not installed (the extra 'report')")

from pbfl_flwr.experiments import report, results, run_tables
from pbfl_flwr.experiments.results import RunGroup
from tests.small_runs import entry, pbfl, refused, write_run


class Reader(HTMLParser):
    """Collects elements and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="session")
def page(three_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    result = pbfl("report", *three_runs, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def test_everything_is_there_and_nothing_is_fetched(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 3_000_000
    read = Reader(text)
    for attribute in ("src", "href", "xlink:href"):
        for tag, attributes in read.elements:
            place = attributes.get(attribute)
            assert place is None or place.startswith(("#", "data:")), (tag, place)
    assert not re.search(r"url\((?!#|data:)", text)
    assert "@import" not in text
    tags = [tag for tag, _ in read.elements]
    assert "script" not in tags
    assert tags.count("img") == tags.count("figure") >= 20
    for words in ("Accuracy and fairness", "Paired comparison", "Cost per round", "learning-rate", "torch"):
        assert words in read.text
    identities = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    assert len({attributes["alt"] for tag, attributes in read.elements if tag == "img"}) == tags.count("img")
    (policy,) = [attributes["content"] for _, attributes in read.elements if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline';")
    assert "script" not in policy


def test_numbers_stay_in_one_line_and_remarks_do_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "td.number { white-space: nowrap; }" in text
    for title, last in (("Accuracy and fairness", "number"), ("Paired comparison", None)):
        (table,) = re.findall(f'aria-label="{title}">(.*?)</table>', text, re.DOTALL)
        rows = table.split("</tr>")[:-1]
        assert len(rows) >= 3
        assert {Reader(row).elements[-1][1].get("class") for row in rows} == {last}


def test_the_title_of_many_runs_is_short(three_runs: list[Path]) -> None:
    (group,) = results.load(three_runs[:1])

    def title(labels: list[str]) -> str:
        (found,) = re.findall(
            "<h1>(.*)</h1>", report.page([RunGroup(label, group.runs) for label in labels], [])
        )
        return str(found)

    names = [f"row {number}" for number in range(12)]
    assert title(names) == "row 0, row 1, row 2, row 3, row 4 and 7 more"
    assert title(names[:5]) == ", ".join(names[:5])
    long = [f"{number}{'x' * 99}" for number in range(3)]
    assert title(long) == f"{long[0]} and 2 more"
    assert title(["y" * 200]) == "y" * 200


def test_one_run_works_too(three_runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "one.html"
    result = pbfl("report", three_runs[0], "--out", out, "--png", "--svg", "--pdf")
    assert result.exit_code == 0, result.output
    text = Reader(out.read_text(encoding="utf-8")).text
    assert "Paired comparison" not in text
    assert "validation-chosen" in text
    files = list((tmp_path / "one-pictures").iterdir())
    assert {file.suffix for file in files} == {".png", ".svg", ".pdf"}
    assert len({file.stem for file in files}) * 3 == len(files) >= 30
    line = "other pictures there are not of this report"
    assert line not in result.output
    again = pbfl("report", three_runs[0], "--out", out, "--png").output
    assert f"{len(files) * 2 // 3} {line}" in again


def test_what_clients_say_stays_text(hostile_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    report.write(results.load([hostile_run]), out)
    read = Reader(out.read_text(encoding="utf-8"))
    tags = [tag for tag, _ in read.elements]
    assert "script" not in tags
    assert tags.count("img") == tags.count("figure")
    assert not [
        attributes for _, attributes in read.elements if any(name.startswith("on") for name in attributes)
    ]
    assert "</td><script>window.hurt = 1</script>" in read.text
    assert '"><img src=x onerror=window.hurt=1>{{ 7 * 7 }}' in read.text  # nor is it a template


def test_the_sheets_of_the_page(groups: list[RunGroup]) -> None:
    predictors = run_tables.accuracy_sheet(groups)
    assert {len(row) for row in predictors.rows} == {len(predictors.columns)}
    assert {row[0] for row in predictors.rows} == {"fedproto", "tinyproto", "protonorm"}
    clients = run_tables.client_sheet(groups)
    assert len(clients.rows) == 4
    assert clients.columns[-3:] == ("fedproto, %", "tinyproto, %", "protonorm, %")
    first = groups[0].first.accuracies()
    assert [row[-3] for row in clients.rows] == [f"{100 * first[client]:.2f}" for client in range(4)]
    configuration = report.configuration_sheet(groups)
    assert configuration.rows[0] == ("method", "fedproto", "tinyproto", "protonorm")
    assert clients.columns[clients.text_columns] == "training samples"


def test_the_page_by_one_predictor(three_runs: list[Path], tmp_path: Path) -> None:
    groups = results.load(three_runs, by="local")
    name = {group.label: group.first.accuracies("local") for group in groups}
    assert [row[-3] for row in run_tables.client_sheet(groups).rows] == [
        f"{100 * name['fedproto'][client]:.2f}" for client in range(4)
    ]
    out = tmp_path / "local.html"
    assert pbfl("report", *three_runs, "--by", "local", "--out", out).exit_code == 0
    text = Reader(out.read_text(encoding="utf-8")).text
    assert "fedproto, tinyproto, protonorm, by local" in text
    assert "Accuracy by local in %; last, best" in text
    assert "of the accuracy by local in the last round," in text
    assert "Accuracy by local of every client in the last round" in text
    assert pbfl("report", *three_runs, "--by", "etf", "--out", out).exit_code == 0
    text = Reader(out.read_text(encoding="utf-8")).text
    assert "Never scored by etf, so in no pair: fedproto, tinyproto, protonorm." in text
    assert "fedproto: no client was scored by 'etf'" in text
    assert pbfl("report", *three_runs, "--by", "nobody", "--out", out).exit_code == 2


def test_a_directory_as_the_page_is_refused_before_anything_is_drawn(
    three_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pbfl_flwr.experiments.pictures.draw", None)
    assert (
        refused("report", *three_runs, "--out", tmp_path)
        == f"error: {tmp_path} cannot be written (Is a directory)"
    )


def test_warnings_are_on_top(hostile_run: Path) -> None:
    (run,) = report.overviews(results.load([hostile_run]))
    assert any(line.startswith("client 1 failed in 3 rounds, first 1:") for line in run["warnings"])


def test_a_directory_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [entry(number, 0.5, 0.75) for number in (1, 2)]
    mine = tmp_path / "runs" / "mine"
    for label, keys in (("A", {}), ("B-x", {"cps-dim": 2})):
        for seed in (0, 1):
            write_run(mine / f"{label}-seed{seed}", lines, seed=seed, **keys)
    write_run(mine / "C-seed0", lines[:1], **{"num-server-rounds": 2, "cps-dim": 3})
    (mine / "table.md").write_text("")
    result = pbfl("report", "runs/mine")
    assert result.exit_code == 0, result.stderr
    assert "left out, stopped: runs/mine/C-seed0\n" in result.stdout
    text = Reader((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "A, B-x – pbfl report" in text
    assert "B-x − A" in text
    named = sorted(path for path in mine.iterdir() if path.name != "C-seed0")
    result = pbfl("report", *named)
    assert result.exit_code == 0, result.stderr
    assert f"left out, not a run: {mine / 'table.md'}\n" in result.stdout
    for words, said in (
        ([mine / "table.md", mine / "table.md"], "no finished run to report; left out, not a run: "),
        (["runs"], "runs' is not a run directory: it has no run.json"),
        ([mine / "C-seed0", tmp_path / "nowhere"], "nowhere' is not a run directory"),
    ):
        assert said in refused("report", *words)
    for path in mine.glob("[AB]*/rounds.jsonl"):
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert "no finished run to report; left out, stopped: " in pbfl("report", mine).stderr


def test_what_cannot_be_reported_is_one_line(
    three_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, said in (
        ([tmp_path], "no run.json"),
        ([three_runs[0], three_runs[0]], "is given twice"),
        ([three_runs[0], "--out", tmp_path], "cannot be written"),
    ):
        assert said in refused("report", *arguments)
    for name in [name for name in sys.modules if name.startswith("pbfl_flwr.experiments.pictures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("pbfl_flwr.experiments.pictures")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused("report", three_runs[0], "--out", tmp_path / "never.html")
    assert "pip install 'pbfl-flwr[report]'" in said
