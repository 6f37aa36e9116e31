"""``pbfl reproduce``: reproduce a published table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import (
    FAILED,
    INTERRUPTED_NOTE,
    NON_EMPTY_PATH,
    AppDirectory,
    Assignments,
    By,
    DryRun,
    EngineName,
    Gpus,
    Parallel,
    RayAddress,
    WhichEngine,
    Workers,
    app_for,
    dry_run_exit,
    error_exit,
    predictor,
    resources_for,
    running,
    summary_exit,
)
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.console import say, screen


class Scale(StrEnum):
    """Scales of a reproduction."""

    small = "small"
    paper = "paper"


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="TABLE", help="A TOML file, or one of `pbfl list reproductions`.")
    ],
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Run only the blocks on this dataset.")
    ] = None,
    block: Annotated[str, typer.Option("--block", help="Run only these blocks, separated by commas.")] = "",
    scale: Annotated[
        Scale, typer.Option("--scale", help="paper: the full setting. small: minutes on a small machine.")
    ] = Scale.small,
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds",
            help="One run per seed, e.g. 0,1,2 or 0-2; default: the paper's, only the first at small.",
        ),
    ] = "",
    only: Annotated[str, typer.Option("--only", help="Run only these rows, separated by commas.")] = "",
    by: By = "",
    assignments: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            click_type=NON_EMPTY_PATH,
            help="Directory for runs and tables; default runs/<table>-<scale>.",
        ),
    ] = None,
    parallel: Parallel = 1,
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = EngineName.processes,
    ray_address: RayAddress = "",
    app_dir: AppDirectory = None,
    dry_run: DryRun = False,
) -> None:
    """Reproduce a published table and print it next to the paper's values; run again to resume."""
    from pbfl_flwr.config import comma_list
    from pbfl_flwr.experiments.execute import several
    from pbfl_flwr.experiments.plan import comparison, reproduction, reproduction_table

    console = screen()
    try:
        resources = resources_for(engine, ray_address, workers, gpus_per_client)
        directory = expanded(out or Path("runs") / f"{Path(name).stem}-{scale.value}").absolute()
        source, by = app_for(engine, app_dir), predictor(by)
        paper = reproduction.read(name)
        blocks = reproduction.chosen(paper, dataset, comma_list(block))
        numbers = comparison.parse_numbers("--seeds", seeds)
        planned = reproduction.plans(
            paper, blocks, scale.value, assignments or [], numbers, comma_list(only), directory
        )
        missing = reproduction.absent(planned)
        for left_out, why in missing.items():
            say(console, f"block {left_out} is left out: {why}", "yellow")
        planned = {key: runs for key, runs in planned.items() if key not in missing}
        if not planned:
            raise PbflError("no block can be run, for the reasons above")
        runs = [run for of_block in planned.values() for run in of_block]
        for note in comparison.preflight(runs, resources):
            say(console, note, "yellow")
        slots = several.slots_here(parallel, resources, console)
        for line in reproduction.changes(paper, planned):
            say(console, f"scale {scale.value}: {line}")
        if dry_run:
            raise dry_run_exit(runs, console)
    except PbflError as error:
        raise error_exit(error) from None
    say(console, f"{sum(not comparison.finished(run) for run in runs)} of {len(runs)} runs are to be run")

    def table(_: comparison.Planned | None = None) -> str:
        shown = reproduction.with_finished(planned, paper, scale.value, assignments or [], numbers, directory)
        finished = reproduction_table.finished_blocks(paper, shown, by)
        text = reproduction_table.markdown(paper, scale.value, shown, finished, missing, by)
        if not comparison.reason_not_to_write(runs):
            reproduction_table.write(directory, paper, text, finished)
        return text

    with running(INTERRUPTED_NOTE):
        failed = several.run_all(runs, slots, source, resources, console, table)
        text, unwritten = table(), comparison.reason_not_to_write(runs)
    ending = summary_exit(console, text, f"{directory / 'table.md'} and table.csv", failed, unwritten)
    raise typer.Exit(FAILED) if missing else ending
