"""``pbfl report``: results as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import NON_EMPTY_PATH, By
from pbfl_flwr.errors import expanded, reading
from pbfl_flwr.experiments.console import kilobytes, say, screen


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", click_type=NON_EMPTY_PATH, help="Run directories, or directories of runs."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", click_type=NON_EMPTY_PATH, help="The HTML file to write.")
    ] = Path("report.html"),
    by: By = None,
    png: Annotated[bool, typer.Option("--png", help="Also write the pictures as PNG files.")] = False,
    allowed: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE:FUNCTION",
            help="Code named by a run that may be imported for pictures: a model or method; may be repeated.",
        ),
    ] = None,
    svg: Annotated[bool, typer.Option("--svg", help="Also write the pictures as SVG files.")] = False,
) -> None:
    """Write a self-contained HTML report of one or several runs: tables, statistics, pictures."""
    from pbfl_flwr.experiments import report as reporting
    from pbfl_flwr.experiments import results, status

    with reading(", ".join(map(str, runs))):
        paths, left_out = status.for_a_report(runs)
        groups = results.load(paths, allowed or (), by or "")
        written = reporting.write(groups, expanded(out).absolute(), png=png, svg=svg)
    console = screen()
    for line in left_out:
        say(console, line)
    say(console, f"written to {written[0]} ({kilobytes(written[0].stat().st_size)})")
    if len(written) > 1:
        say(console, f"{len(written) - 1} pictures in {written[-1].parent}")
