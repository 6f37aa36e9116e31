"""``pbfl reproduce``: rerun a published table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import (
    FAILED,
    GIVEN,
    KEPT,
    AppDirectory,
    Assignments,
    By,
    DryRun,
    EngineName,
    Gpus,
    Parallel,
    WhichEngine,
    Workers,
    app_for,
    concluded,
    ended,
    outlined,
    predictor,
    running,
)
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.text.numbers import say, screen


class Scale(StrEnum):
    """How much of the paper's setting is run."""

    small = "small"
    paper = "paper"


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="TABLE", help="A TOML file, or one of `pbfl list reproductions`.")
    ],
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Make only the blocks on this dataset.")
    ] = None,
    block: Annotated[str, typer.Option("--block", help="Make these blocks only, separated by commas.")] = "",
    scale: Annotated[
        Scale, typer.Option("--scale", help="The full setting, or what a small machine does in minutes.")
    ] = Scale.small,
    seeds: Annotated[
        str,
        typer.Option("--seeds", help="One run a seed, e.g. 0,1,2 or 0-2; default the paper's, one at small."),
    ] = "",
    only: Annotated[str, typer.Option("--only", help="Make these rows only, separated by commas.")] = "",
    by: By = "",
    assignments: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", click_type=GIVEN, help="Where runs and table go; default runs/<table>-<scale>."
        ),
    ] = None,
    parallel: Parallel = 1,
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = EngineName.flower,
    app_dir: AppDirectory = None,
    dry_run: DryRun = False,
) -> None:
    """Make a published table again and print it beside the paper's; started again, it goes on where it stopped."""
    from pbfl_flwr.config.choices import words
    from pbfl_flwr.experiments.comparing import compare, reproduction_table
    from pbfl_flwr.experiments.comparing import reproduce as reproduction
    from pbfl_flwr.experiments.running import parallel_runs
    from pbfl_flwr.flower.engines.placement import Resources

    console = screen()
    resources = Resources(1, gpus_per_client, workers, engine is EngineName.processes)
    try:
        directory = expanded(out or Path("runs") / f"{Path(name).stem}-{scale.value}").absolute()
        source, by = app_for(engine, app_dir), predictor(by)
        paper = reproduction.read(name)
        blocks = reproduction.chosen(paper, dataset, words(block))
        numbers = compare.numbers("--seeds", seeds)
        planned = reproduction.plans(
            paper, blocks, scale.value, assignments or [], numbers, words(only), directory
        )
        missing = reproduction.absent(planned)
        for left_out, why in missing.items():
            say(console, f"block {left_out} is left out: {why}", "yellow")
        planned = {key: runs for key, runs in planned.items() if key not in missing}
        if not planned:
            raise PbflError("no block can be run; the lines above say why")
        runs = [run for of_block in planned.values() for run in of_block]
        for note in compare.preflight(runs, resources):
            say(console, note, "yellow")
        slots = parallel_runs.room_here(parallel, resources, console)
        for line in reproduction.changes(paper, planned):
            say(console, f"scale {scale.value}: {line}")
        if dry_run:
            raise outlined(runs, console)
    except PbflError as error:
        raise ended(error) from None
    say(console, f"{sum(not compare.finished(run) for run in runs)} of {len(runs)} runs are to be made")

    def table(_: compare.Planned | None = None) -> str:
        shown = reproduction.with_finished(planned, paper, scale.value, assignments or [], numbers, directory)
        found = reproduction_table.rows(paper, shown, by)
        text = reproduction_table.markdown(paper, scale.value, shown, found, missing, by)
        if not compare.no_tables(runs):
            reproduction_table.write(directory, paper, text, found)
        return text

    with running(KEPT):
        failed = parallel_runs.make(runs, slots, source, resources, console, table)
        text, unwritten = table(), compare.no_tables(runs)
    ending = concluded(console, text, f"{directory / 'table.md'} and table.csv", failed, unwritten)
    raise typer.Exit(FAILED) if missing else ending
