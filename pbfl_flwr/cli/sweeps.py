"""``pbfl sweep``: every combination of lists of values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import (
    KEPT,
    AppDirectory,
    EngineName,
    Gpus,
    Preset,
    WhichEngine,
    Workers,
    app_for,
    concluded,
    ended,
    running,
)
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.figures import say, screen


def sweep(
    preset: Preset = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,VALUE",
            help="A key and its values; may be repeated. A value with a comma is quoted: 'models=\"cnn4,resnet8\"'.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where runs and table go; default runs/sweep-<preset>-<keys>."),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="Runs at once, as far as memory and CPUs allow.")
    ] = 1,
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = EngineName.flower,
    app_dir: AppDirectory = None,
) -> None:
    """Run every combination of the values and print one table; started again, it goes on where it stopped."""
    import joblib

    from pbfl_flwr.experiments import compare, comparison_table, side_by_side
    from pbfl_flwr.experiments import sweep as sweeping
    from pbfl_flwr.flower.engine import Resources
    from pbfl_flwr.flower.memory import available_memory

    console = screen()
    try:
        source = app_for(engine, app_dir)
        swept = sweeping.read(preset, assignments or [])
        directory = (out or sweeping.directory(preset, swept)).expanduser().absolute()
        planned = sweeping.plans(swept, directory)
        compare.preflight(planned, Resources(1, gpus_per_client, workers, engine is EngineName.processes))
    except PbflError as error:
        raise ended(error) from None
    title = f"Sweep over {', '.join(swept.swept) or 'seeds'}"
    cpus = int(joblib.cpu_count())  # those of the container, where there is one
    processes = engine is EngineName.processes
    slots = side_by_side.room(parallel, available_memory(), cpus, processes=processes)
    if slots < parallel:
        say(console, f"--parallel {parallel}: memory and CPUs have room for {slots}", "yellow")
    say(console, f"{sum(not compare.finished(run) for run in planned)} of {len(planned)} runs are to be made")

    def table(_: compare.Planned | None = None) -> str:
        found = comparison_table.rows(planned)
        sheet = sweeping.table(swept, found, planned, title)
        sweeping.write(directory, swept, found, sheet)
        return sheet.markdown()

    with running(KEPT):
        if slots == 1:
            resources = Resources(1, gpus_per_client, workers, processes)
            failed = compare.make(planned, compare.starter(source, resources, console), table)
        else:
            resources = Resources(1, gpus_per_client, workers or side_by_side.workers(slots, cpus), processes)
            failed = side_by_side.make_side_by_side(
                planned,
                slots,
                lambda run: side_by_side.command(run, source, resources),
                lambda line: say(console, line),
                table,
            )
        text = table()
    raise concluded(console, text, f"{directory}: table as .md, .csv and .tex", failed)
