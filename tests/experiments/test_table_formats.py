"""A table in three languages."""

import csv
import io
import shutil
import subprocess
from pathlib import Path

import pytest

from pbfl_flwr.experiments.tables import Sheet, tex

SHEET = Sheet("A & B", ("run", "last, %"), (("my_run|1", "50.0 ± 1.0"), ("b\nc", "-")), ("± over 2 seeds",))


def test_markdown_keeps_the_columns() -> None:
    assert SHEET.markdown().splitlines() == [
        "**A & B**",
        "",
        "| run | last, % |",
        "|---|---:|",
        "| my_run\\|1 | 50.0 ± 1.0 |",
        "| b c | - |",
        "",
        "± over 2 seeds",
    ]


def test_csv_is_read_back() -> None:
    assert list(csv.reader(io.StringIO(SHEET.csv()))) == [list(SHEET.columns), *map(list, SHEET.rows)]


def test_latex_escapes_and_uses_booktabs() -> None:
    text = SHEET.latex()
    assert r"    run & last, \% \\" in text
    assert r"\begin{tabular}{lr}" in text  # words to the left, figures to the right
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
    text = f"{page}\\begin{{document}}\n{SHEET.latex()}{wide.latex()}\\end{{document}}\n"
    (tmp_path / "page.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert "Overfull" not in (tmp_path / "page.log").read_text(errors="replace")  # nothing runs off the page
