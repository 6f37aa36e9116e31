"""``pbfl compare``, ``sweep`` and ``reproduce``: several runs and one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pbfl_flwr.cli.common import (
    COMPLETED,
    FAILED,
    INTERRUPTED_NOTE,
    REFUSED,
    Against,
    AppDirectory,
    Assignments,
    At,
    By,
    DryRun,
    Gpus,
    Only,
    Out,
    Pairs,
    Parallel,
    Preset,
    RayAddress,
    Seeds,
    WhichEngine,
    Workers,
    engine_for,
    own_network,
    running,
)
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.console import say, screen

if TYPE_CHECKING:
    from pbfl_flwr.experiments.plan.planned_runs import PlannedRun
    from pbfl_flwr.experiments.tables import Tables
    from pbfl_flwr.flower.engines.placement import Resources


def compare(
    name: Annotated[
        str, typer.Argument(metavar="COMPARISON", help="A TOML file, or one of `pbfl list comparisons`.")
    ],
    out: Out = None,
    assignments: Assignments = None,
    seeds: Seeds = "",
    deal_anew: Annotated[
        bool, typer.Option("--deal-anew", help="Each seed also deals the data anew: partition-seed = seed.")
    ] = False,
    only: Only = "",
    by: By = None,
    against: Against = "",
    pairs: Pairs = None,
    at: At = "last",
    parallel: Parallel = 1,
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = "processes",
    ray_address: RayAddress = "",
    app_dir: AppDirectory = None,
    dry_run: DryRun = False,
) -> None:
    """Run several configurations on the same data and print one table; run again to resume."""
    from pbfl_flwr.config import comma_list
    from pbfl_flwr.experiments.pairs import Asked
    from pbfl_flwr.experiments.plan import comparison, configuration
    from pbfl_flwr.experiments.plan.planned_runs import check_predictor, parse_seeds, plan, selected

    resources, app = engine_for(engine, ray_address, workers, gpus_per_client, app_dir)
    title, runs = comparison.read(name)
    directory = expanded(out or Path("runs") / Path(name).stem).absolute()
    numbers = parse_seeds(seeds)
    if deal_anew and not numbers:
        raise PbflError("--deal-anew: needs --seeds, e.g. --seeds 0-4")
    planned = plan(runs, assignments or [], numbers, directory, deal_anew=deal_anew)
    chosen = selected(planned, comma_list(only))
    check_predictor(by, chosen)
    rows = {run.label: run.requested for run in chosen}
    methods = {label: configuration.check(requested).run.method for label, requested in rows.items()}
    asked = Asked(against, tuple(pairs or ()), methods)
    asked.check([*methods])
    tables = partial(comparison.tables, title, by=by or "", at=at, asked=asked)
    raise typer.Exit(_execute(planned, chosen, tables, directory, resources, app, parallel, dry_run))


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
    out: Out = None,
    parallel: Parallel = 1,
    by: By = None,
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = "processes",
    ray_address: RayAddress = "",
    app_dir: AppDirectory = None,
    dry_run: DryRun = False,
) -> None:
    """Run every combination of values and print one table; run again to resume."""
    from pbfl_flwr.experiments.plan import sweep as sweeping
    from pbfl_flwr.experiments.plan.planned_runs import check_predictor, plan, selected

    resources, app = engine_for(engine, ray_address, workers, gpus_per_client, app_dir)
    swept = sweeping.read(preset, assignments or [])
    if swept.warning:
        say(screen(), swept.warning, "yellow")
    directory = expanded(out or sweeping.directory(preset, swept)).absolute()
    planned = selected(plan(swept.runs, [], swept.seeds, directory), [])
    check_predictor(by, planned)
    tables = partial(sweeping.tables, swept, by=by or "")
    raise typer.Exit(_execute(planned, planned, tables, directory, resources, app, parallel, dry_run))


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="TABLE", help="A TOML file, or one of `pbfl list reproductions`.")
    ],
    dataset: Annotated[str, typer.Option("--dataset", help="Run only the blocks on this dataset.")] = "",
    block: Annotated[str, typer.Option("--block", help="Run only these blocks, separated by commas.")] = "",
    scale: Annotated[
        Literal["small", "paper"],
        typer.Option("--scale", help="paper: the full setting. small: minutes on a small machine."),
    ] = "small",
    seeds: Seeds = "",
    only: Only = "",
    by: By = None,
    assignments: Assignments = None,
    out: Out = None,
    parallel: Parallel = 1,
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = "processes",
    ray_address: RayAddress = "",
    app_dir: AppDirectory = None,
    dry_run: DryRun = False,
) -> None:
    """Reproduce a published table and print it next to the paper's values; run again to resume."""
    from pbfl_flwr.config import comma_list
    from pbfl_flwr.experiments.plan import reproduction
    from pbfl_flwr.experiments.plan.planned_runs import check_predictor, parse_seeds, selected

    console = screen()
    resources, app = engine_for(engine, ray_address, workers, gpus_per_client, app_dir)
    paper = reproduction.read(name)
    directory = expanded(out or Path("runs") / f"{Path(name).stem}-{scale}").absolute()
    planned = reproduction.plan(paper, scale, assignments or [], parse_seeds(seeds), directory)
    blocks = reproduction.chosen(paper, dataset, comma_list(block))
    chosen = selected([run for run in planned if run.block in blocks], comma_list(only))
    missing = reproduction.absent(chosen)
    for left_out, why in missing.items():
        say(console, f"block {left_out} is left out: {why}", "yellow")
    chosen = [run for run in chosen if run.block not in missing]
    if not chosen:
        raise PbflError("no block can be run, for the reasons above")
    for line in reproduction.changes(paper, chosen):
        say(console, f"scale {scale}: {line}")
    check_predictor(by, chosen)
    tables = partial(reproduction.tables, paper, scale, missing=missing, by=by or "")
    code = _execute(planned, chosen, tables, directory, resources, app, parallel, dry_run)
    raise typer.Exit(code or (FAILED if missing else COMPLETED))


def _execute(
    planned: Sequence[PlannedRun],
    chosen: Sequence[PlannedRun],
    tables: Callable[[Sequence[PlannedRun]], Tables],
    directory: Path,
    resources: Resources,
    app: Path,
    parallel: int,
    dry_run: bool,
) -> int:
    """Execute the chosen runs, write the tables after each of them, and return the exit code.

    Of the runs that are not chosen, the finished ones stay in the tables. A dry run lists the runs instead.

    Raises:
        PbflError: if a run's directory is a file, the data or a network does not fit a run, or the resources do not.
    """
    from pbfl_flwr.data import LoadedData
    from pbfl_flwr.experiments.execute import several
    from pbfl_flwr.experiments.plan import configuration
    from pbfl_flwr.experiments.plan.planned_runs import (
        edited_line,
        finished,
        left_out_line,
        preflight,
        reason_not_to_write,
    )
    from pbfl_flwr.experiments.tables import Sheet
    from pbfl_flwr.util.atomic_files import write_atomically

    console = screen()
    for run in chosen:
        configuration.check_no_file(f"--out {directory}", run.directory)
    loaded = LoadedData()
    for note in preflight(chosen, resources, loaded):
        say(console, note, "yellow")
    slots = several.slots_here(parallel, resources, console)
    if dry_run:
        return COMPLETED if several.show_plan(chosen, console) else REFUSED
    if resources.engine == "flower":
        own_network(configuration.check(run.requested) for run in chosen)
    for line in (edited_line(chosen), left_out_line(run for run in planned if run not in chosen)):
        if line:
            say(console, line, "yellow")
    pending = sum(not finished(run) for run in chosen)
    say(console, f"{pending} of {len(chosen)} runs are to be run")

    def update() -> tuple[Tables, str]:
        made = tables([run for run in planned if run in chosen or finished(run)])
        if not (unwritten := reason_not_to_write(chosen)):
            for name, content in made.files.items():
                write_atomically(directory / name, content.encode())
        return made, unwritten

    def after(_: PlannedRun) -> None:
        try:
            update()
        except PbflError as error:  # the runs go on, and at their end it is an error
            say(console, f"no tables: {error}", "yellow")

    with running(INTERRUPTED_NOTE):
        failed = several.run_all(chosen, slots, app, resources, console, after, loaded)
        made, unwritten = update()
    if any(map(finished, chosen)):
        for part in made.shown:
            if isinstance(part, Sheet):
                part.show(console)
            else:
                say(console, part)
    files = f"{directory}: {', '.join(made.files)}"
    if unwritten:
        say(console, f"not written, because {unwritten}; existing files are unchanged: {files}", "yellow")
    else:
        say(console, f"written to {files}")
    for label in failed:
        say(console, f"failed: {label}", "red")
    return FAILED if failed else COMPLETED
