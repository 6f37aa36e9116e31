"""Tables: at 80 columns, where nobody looks at a terminal, and in files of three languages."""

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pbfl_flwr.config import GROUPS, parse
from pbfl_flwr.data import DATASETS
from pbfl_flwr.experiments import catalogue, run_tables
from pbfl_flwr.experiments import console as output
from pbfl_flwr.experiments.plan.configuration import presets
from pbfl_flwr.experiments.results import FinishedRun, RunGroup
from pbfl_flwr.experiments.tables import Sheet, tex
from pbfl_flwr.methods import METHODS, SECTIONS
from pbfl_flwr.models.registry import ARCHITECTURES, FAMILIES
from tests.small_runs import edit, entry, pbfl, printed, terminal, write_run

SHEET = Sheet(
    "Two runs",
    ("run", "predictor", "last", "best"),
    (
        ("FedProto", "global", "35.53 ± 1.86", "36.10 ± 1.20"),
        ("a|b", "local", "51.32 ± 7.44", "52.63 ± 7.44"),
    ),
    ("A note.",),
    text_columns=2,
)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_as_many_columns_as_fit_beside_the_labels() -> None:
    # 30 - (8 + 2) leaves 20: 5 + 2 + 6 + 2 + 4 = 19 fit, 5 more do not.
    assert list(output.blocks([8, 5, 6, 4, 5, 40, 3], 1, 30)) == [
        range(1, 4), range(4, 5), range(5, 6), range(6, 7)
    ]  # fmt: skip
    assert list(output.blocks([8, 5, 6], 1, 80)) == [range(1, 3)]
    assert list(output.blocks([8, 40, 3], 1, 30)) == [range(1, 2), range(2, 3)]  # at least one


def test_words_stand_to_the_left_and_numbers_to_the_right() -> None:
    console = terminal(30)
    rows = [["a", "1.5", "a remark of many words"], ["b", "12.5", "none"]]
    output.print_blocks(console, ["run", "last", "remark"], rows, words=1)
    lines = [line for line in printed(console) if line.strip("─ ")]
    assert lines == [
        "run  last", "a     1.5", "b    12.5",
        "run  remark", "a    a remark of many words", "b    none",
    ]  # fmt: skip


def test_a_wide_table_becomes_blocks_that_begin_with_its_words() -> None:
    console = terminal(40)
    SHEET.show(console)
    lines = printed(console)
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines if line.startswith(("FedProto", "a|b", "run"))] == [
        ["run", "predictor", "last"],
        ["FedProto", "global", "35.53", "±", "1.86"],
        ["a|b", "local", "51.32", "±", "7.44"],
        ["run", "predictor", "best"],
        ["FedProto", "global", "36.10", "±", "1.20"],
        ["a|b", "local", "52.63", "±", "7.44"],
    ]
    SHEET.show(console := terminal(80))
    assert printed(console) == [
        "", "Two runs", "run       predictor          last          best", "─" * 47,
        "FedProto  global     35.53 ± 1.86  36.10 ± 1.20", "a|b       local      51.32 ± 7.44  52.63 ± 7.44",
        "A note.",
    ]  # fmt: skip
    SHEET.show(console := terminal(30))  # of which the words would fill more than half
    assert [line.split() for line in printed(console) if line.startswith("run")] == [
        ["run", "predictor"], ["run", "last"], ["run", "best"]
    ]  # fmt: skip


def test_every_command_fits_into_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBFL_HOME", "/home/somebody/.pbfl")
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    members = json.loads((run / "run.json").read_text())["clients"]
    long = {"name": "site-amsterdam-north", "architecture": "my_package.networks:build_a_small_one"}
    edit(run / "run.json", clients=[{**member, **long} for member in members])
    console = terminal(80)
    catalogue.show_keys("", console)
    for topic in catalogue.ROWS:
        catalogue.show_rows(topic, "", console)
    run_tables.client_sheet([RunGroup("", (FinishedRun.load(run),))]).show(console)
    lines = printed(console)
    assert [line for line in lines if len(line) > 80] == []
    first = {word for line in lines for word in line.split()[:1]}
    assert {*METHODS, *ARCHITECTURES, *FAMILIES, *DATASETS, *presets(), *parse({}).as_dict()} <= first
    assert not any("…" in line for line in lines)


def test_who_is_piped_gets_whole_lines() -> None:
    models = pbfl("list", "models").stdout.splitlines()
    summaries = {name: entry.summary for name, entry in ARCHITECTURES.items()}
    assert {line.split()[0]: line.split(maxsplit=1)[1] for line in models}.items() >= summaries.items()
    keys = pbfl("list", "keys").stdout.splitlines()
    at = keys.index("  failure-policy = continue")
    assert keys[at + 1] == (
        "      if a client fails: continue with the others, or stop the run with an error that names it "
        "[continue, stop]"
    )


def test_a_terminal_keeps_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.screen().width == output.UNLIMITED
    monkeypatch.setenv("COLUMNS", "60")
    assert output.screen().width == 60


@pytest.mark.parametrize("width", [50, 60])
def test_the_figures_of_a_run_stay_whole_on_a_narrow_terminal(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.125), entry(2, 0.75, 0.25)])
    monkeypatch.setenv("COLUMNS", str(width))
    shown = pbfl("show", run).stdout
    assert {"75.00", "25.00", "12.50", "62.50"} <= set(shown.split())
    assert "…" not in shown


def test_methods_by_word_and_keys_by_word_group_and_method() -> None:
    everything = pbfl("list", "keys").stdout
    titles = [line.split(":")[0] for line in everything.splitlines() if line[:1].strip()]
    assert titles == [*GROUPS, *SECTIONS]
    by_name = pbfl("list", "keys", "cps-").stdout.splitlines()
    assert (
        "prototypes: The stages of the prototype pipeline; auto is what the method's name stands for."
        in by_name
    )
    assert {"  cps-dim = auto", "  cps-scheme = dimension", "  cps-regularizer = full"} <= {*by_name}
    assert "  learning-rate = 0.05" not in by_name
    group = pbfl("list", "keys", "models").stdout
    names = [line.split()[0] for line in group.splitlines() if line[:3].strip() and line[0] == " "]
    assert names == ["models", "feature-dim", "initial-weights"]
    assert "  failure-policy = continue" in pbfl("list", "keys", "Stop the run").stdout.splitlines()
    methods = pbfl("list", "methods", "proto").stdout.splitlines()
    assert [line.split()[0] for line in methods] == ["fedproto", "tinyproto", "protonorm"]
    method = pbfl("list", "keys", "fedprox").stdout
    assert method.splitlines()[1] == "  fedprox.mu = 0.001"
    assert len(method.splitlines()) == 3


# In files --------------------------------------------------------------------------------------------------

WRITTEN = Sheet(
    "A & B", ("run", "last, %"), (("my_run|1", "50.0 ± 1.0"), ("b\nc αμΩ", "-")), ("± over 2 seeds",)
)


def test_markdown_keeps_the_columns() -> None:
    assert WRITTEN.markdown().splitlines() == [
        "**A & B**",
        "",
        "| run | last, % |",
        "|---|---:|",
        "| my_run\\|1 | 50.0 ± 1.0 |",
        "| b c αμΩ | - |",
        "",
        "± over 2 seeds",
    ]


def test_csv_is_read_back() -> None:
    assert list(csv.reader(io.StringIO(WRITTEN.csv()))) == [list(WRITTEN.columns), *map(list, WRITTEN.rows)]


def test_a_last_column_of_text_is_to_the_left() -> None:
    sheet = Sheet("T", ("run", "last", "remark"), (("a", "1", "b"),), text_last=True)
    assert "|---|---:|---|" in sheet.markdown()
    assert r"\begin{tabular}{lrl}" in sheet.latex()
    assert [sheet.holds_text(column) for column in range(3)] == [True, False, True]


def test_latex_escapes_and_uses_booktabs() -> None:
    text = WRITTEN.latex()
    assert r"    run & last, \% \\" in text
    assert r"\begin{tabular}{lr}" in text  # words to the left, figures to the right
    assert r"c $\alpha$$\mu$$\Omega$ & - \\" in text
    assert r"    my\_run$|$1 & 50.0 $\pm$ 1.0 \\" in text
    assert r"\caption{A \& B. $\pm$ over 2 seeds}" in text
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")
    # A row's end and a rule take [ and * for their own, also on the next line.
    assert r"    {[}x] & 1 \\" in (text := Sheet("", ("a", "b"), (("[x]", "1"), ("* y", "2"))).latex())
    assert r"    {*} y & 2 \\" in text
    assert tex("\\a^{b}") == r"\textbackslash{}a\textasciicircum{}\{b\}"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(tmp_path: Path) -> None:
    page = "\\documentclass{article}\n\\usepackage[T1]{fontenc}\n\\usepackage{booktabs,graphicx}\n"
    wide = Sheet("Wide", ("a column with a long head",) * 12, (("0.5",) * 12,))
    text = f"{page}\\begin{{document}}\n{WRITTEN.latex()}{wide.latex()}\\end{{document}}\n"
    (tmp_path / "page.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert "Overfull" not in (tmp_path / "page.log").read_text(errors="replace")  # nothing runs off the page
