"""``pbfl report``: results as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import GIVEN, REFUSED, By, ended, predictor
from pbfl_flwr.errors import PbflError, expanded, reading
from pbfl_flwr.experiments.text.numbers import kilobytes, say, screen


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", click_type=GIVEN, help="Run directories, or directories of runs."),
    ],
    out: Annotated[Path, typer.Option("--out", click_type=GIVEN, help="The page that is written.")] = Path(
        "report.html"
    ),
    by: By = "",
    png: Annotated[bool, typer.Option("--png", help="Write the pictures as PNG files too.")] = False,
    allowed: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE:FUNCTION",
            help="Own code that a run names and pictures need: a model, a method; may be repeated.",
        ),
    ] = None,
    svg: Annotated[bool, typer.Option("--svg", help="Write the pictures as SVG files too.")] = False,
) -> None:
    """Write one self-contained page about one run or several side by side: tables, statistics, pictures."""
    from pbfl_flwr.experiments import report as reporting
    from pbfl_flwr.experiments.results import records, run_listing

    try:
        with reading(", ".join(map(str, runs))):
            found, left_out = run_listing.for_a_report(runs)
            groups = records.load(found, allowed or (), predictor(by))
            written = reporting.write(groups, expanded(out).absolute(), png=png, svg=svg)
    except PbflError as error:
        raise ended(error, REFUSED) from None
    console = screen()
    for line in left_out:
        say(console, line)
    say(console, f"written to {written[0]} ({kilobytes(written[0].stat().st_size)})")
    if len(written) > 1:
        say(console, f"{len(written) - 1} pictures in {written[-1].parent}")
