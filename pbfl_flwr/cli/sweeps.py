"""``pbfl sweep``: run all combinations of lists of values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import (
    INTERRUPTED_NOTE,
    NON_EMPTY_PATH,
    AppDirectory,
    By,
    DryRun,
    EngineName,
    Gpus,
    Parallel,
    Preset,
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


def sweep(
    preset: Preset = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,VALUE",
            help="A key and its values; may be repeated. Quote a value with a comma: 'models=\"cnn4,resnet8\"'.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            click_type=NON_EMPTY_PATH,
            help="Directory for runs and tables; default runs/sweep-<preset>-<keys>-<fixed values>.",
        ),
    ] = None,
    parallel: Parallel = 1,
    by: By = "",
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = EngineName.processes,
    ray_address: RayAddress = "",
    app_dir: AppDirectory = None,
    dry_run: DryRun = False,
) -> None:
    """Run every combination of values and print one table; run again to resume."""
    from pbfl_flwr.experiments import summary
    from pbfl_flwr.experiments.execute import several
    from pbfl_flwr.experiments.notes import titled
    from pbfl_flwr.experiments.plan import comparison
    from pbfl_flwr.experiments.plan import sweep as sweeping

    console = screen()
    try:
        resources = resources_for(engine, ray_address, workers, gpus_per_client)
        source, by = app_for(engine, app_dir), predictor(by)
        swept = sweeping.read(preset, assignments or [])
        directory = expanded(out or sweeping.directory(preset, swept)).absolute()
        planned = sweeping.plans(swept, directory)
        for note in comparison.preflight(planned, resources):
            say(console, note, "yellow")
        slots = several.slots_here(parallel, resources, console)
        if dry_run:
            raise dry_run_exit(planned, console)
    except PbflError as error:
        raise error_exit(error) from None
    title = f"Sweep over {', '.join(swept.swept) or 'seeds'}"
    say(
        console,
        f"{sum(not comparison.finished(run) for run in planned)} of {len(planned)} runs are to be run",
    )

    def table(_: comparison.Planned | None = None) -> str:
        groups = comparison.finished_groups(planned, by)
        sheet = sweeping.table(swept, groups, planned, titled(title, by))
        if not comparison.reason_not_to_write(planned):
            summary.write(directory, sheet, groups, sweeping.value_columns(swept))
        return sheet.markdown() if groups else ""

    with running(INTERRUPTED_NOTE):
        failed = several.run_all(planned, slots, source, resources, console, table)
        text, unwritten = table(), comparison.reason_not_to_write(planned)
    raise summary_exit(console, text, f"{directory}: table as .md, .csv and .tex", failed, unwritten)
