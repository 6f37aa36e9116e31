"""``pbfl run``, ``compare``, ``show`` and ``list``: experiments on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import (
    COMPLETED,
    INTERRUPTED_NOTE,
    NON_EMPTY_PATH,
    REFUSED,
    AppDirectory,
    Assignments,
    By,
    DryRun,
    EngineName,
    Gpus,
    NewRunDir,
    Parallel,
    Preset,
    RayAddress,
    Resumed,
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
from pbfl_flwr.errors import PbflError, expanded, reading
from pbfl_flwr.experiments.console import document, say, screen


class Topic(StrEnum):
    """What ``pbfl list`` can list."""

    methods = "methods"
    models = "models"
    weights = "weights"
    datasets = "datasets"
    presets = "presets"
    comparisons = "comparisons"
    reproductions = "reproductions"
    keys = "keys"
    runs = "runs"


class Form(StrEnum):
    """Output formats of ``pbfl show``."""

    text = "text"
    json = "json"
    csv = "csv"


def run(
    preset: Preset = None,
    assignments: Assignments = None,
    run_dir: NewRunDir = None,
    resume: Resumed = None,
    gpus_per_client: Gpus = 0.0,
    cpus_per_client: Annotated[int, typer.Option("--cpus-per-client", min=1, help="CPUs per client.")] = 1,
    workers: Workers = None,
    engine: WhichEngine = EngineName.processes,
    ray_address: RayAddress = "",
    app_dir: AppDirectory = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and print the configuration as a preset, without starting the run.",
        ),
    ] = False,
) -> None:
    """Run a simulated federation."""
    from pbfl_flwr.experiments.execute.runner import simulate
    from pbfl_flwr.experiments.plan import configuration
    from pbfl_flwr.experiments.show import show_run
    from pbfl_flwr.flower.engines.placement import idle_cards
    from pbfl_flwr.runs.directory import RunDirectory

    console = screen()
    try:
        resources = resources_for(engine, ray_address, workers, gpus_per_client, cpus_per_client)
        source = app_for(engine, app_dir)
        requested = configuration.gather(preset, assignments or [])
        if resume is None:
            settings = configuration.check(requested)
            directory = configuration.run_directory(settings, run_dir)
            chosen = configuration.chosen_directory(settings, run_dir) is not None
        elif run_dir is None:
            directory, chosen = expanded(resume).absolute(), True
            requested = configuration.resumed(directory, requested)
            settings = configuration.check(requested)
            if not dry_run and configuration.is_complete(directory, settings):
                more = (
                    "patience=<more>"
                    if RunDirectory(directory).record().ended_after is not None
                    else "num-server-rounds=<more>"
                )
                say(console, f"all rounds are finished; to run more: --set {more}")
                show_run(directory, console)
                return
        else:
            raise PbflError(
                "--resume and --run-dir: a resumed run stays in its directory; give one of the two"
            )
        partition = configuration.preflight(settings, resources)
        notes = configuration.config_warnings(settings, requested, partition)
        if dry_run:
            from pbfl_flwr.experiments.plan.preset import as_preset

            document(as_preset(settings, requested.values, notes))
            return
        directory = configuration.create_directory(directory, chosen=chosen)
    except PbflError as error:
        raise error_exit(error, REFUSED) from None
    if note := idle_cards(resources, settings.training.device):
        say(console, f"device: {note}")
    for note in notes:
        say(console, note)
    num_clients, num_rounds = settings.run.num_clients, settings.run.num_server_rounds
    with running():
        code = simulate(source, directory, requested.values, num_clients, num_rounds, resources, console)
    if code == COMPLETED:
        show_run(directory, console)
    raise typer.Exit(code)


def show(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", click_type=NON_EMPTY_PATH, help="A run directory, or a directory of runs."
        ),
    ],
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="text: tables. json: one document. csv: one line per client, round and predictor.",
        ),
    ] = Form.text,
) -> None:
    """Print the results of a run; for a directory of runs, one line per run."""
    from pbfl_flwr.experiments import run_export, status
    from pbfl_flwr.experiments.show import show_run

    try:
        with reading(str(run)):
            if not status.is_run(run) and status.runs_in(run, status.DEPTH):
                _list_runs(run, form)
            elif form is Form.text:
                show_run(run, screen())
            else:
                document(run_export.as_json(run) if form is Form.json else run_export.as_csv(run))
    except PbflError as error:
        raise error_exit(error, REFUSED) from None


def _list_runs(directory: Path, form: Form = Form.text) -> None:
    from pbfl_flwr.experiments import status

    runs = status.below(directory)
    if form is Form.text:
        status.show_list(runs, screen())
    else:
        document(status.as_json(runs) if form is Form.json else status.as_csv(runs))


def compare(
    name: Annotated[
        str, typer.Argument(metavar="COMPARISON", help="A TOML file, or one of `pbfl list comparisons`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", click_type=NON_EMPTY_PATH, help="Directory for runs and tables; default runs/<name>."
        ),
    ] = None,
    assignments: Assignments = None,
    seeds: Annotated[str, typer.Option("--seeds", help="One run per seed, e.g. 0,1,2 or 0-2.")] = "",
    only: Annotated[str, typer.Option("--only", help="Run only these labels, separated by commas.")] = "",
    by: By = "",
    parallel: Parallel = 1,
    gpus_per_client: Gpus = 0.0,
    workers: Workers = None,
    engine: WhichEngine = EngineName.processes,
    ray_address: RayAddress = "",
    app_dir: AppDirectory = None,
    dry_run: DryRun = False,
) -> None:
    """Run several configurations on the same data and print one table; run again to resume."""
    from pbfl_flwr.config import comma_list
    from pbfl_flwr.experiments import summary
    from pbfl_flwr.experiments.execute import several
    from pbfl_flwr.experiments.notes import titled
    from pbfl_flwr.experiments.pairs import paired_sheet
    from pbfl_flwr.experiments.plan import comparison

    console = screen()
    try:
        resources = resources_for(engine, ray_address, workers, gpus_per_client)
        source, by = app_for(engine, app_dir), predictor(by)
        title, runs = comparison.read(name)
        directory = expanded(out or Path("runs") / Path(name).stem).absolute()
        chosen = comparison.parse_numbers("--seeds", seeds)
        planned = comparison.plan(runs, assignments or [], chosen, comma_list(only), directory)
        for note in comparison.preflight(planned, resources):
            say(console, note, "yellow")
        slots = several.slots_here(parallel, resources, console)
        if dry_run:
            raise dry_run_exit(planned, console)
    except PbflError as error:
        raise error_exit(error, REFUSED) from None

    with running(INTERRUPTED_NOTE):
        failed = several.run_all(planned, slots, source, resources, console)
        shown = comparison.with_finished(planned, runs, assignments or [], chosen, directory)
        groups = comparison.finished_groups(shown, by)
        sheet = summary.comparison_sheet(titled(title, by), groups)
        pairs = paired_sheet(groups, titled(f"{title}: pairs", by))
        if not (unwritten := comparison.reason_not_to_write(planned)):
            summary.write(directory, sheet, groups)
            pairs.write(directory / "paired")
        table = sheet.markdown() if groups else ""
        table += f"\n{pairs.markdown()}" if len(groups) > 1 else ""
    written = f"{directory}: table and paired, each as .md, .csv and .tex"
    raise summary_exit(console, table, written, failed, unwritten)


def list_(
    topic: Annotated[Topic, typer.Argument(metavar="TOPIC", help=f"One of {', '.join(Topic)}.")],
    word: Annotated[
        str,
        typer.Argument(
            metavar="[WORD]",
            help="Only names that contain it; for keys also a group, a method, or a word in their descriptions; for "
            "runs a directory.",
        ),
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all keys as a Markdown page; only with TOPIC keys.")
    ] = False,
) -> None:
    """List methods, models, pretrained weights, datasets, presets, comparisons, reproductions, keys, or runs."""
    from pbfl_flwr.experiments import catalogue

    try:
        if markdown and (topic is not Topic.keys or word):
            raise PbflError("--markdown: allowed only as pbfl list keys --markdown, without WORD")
        if markdown:
            document(catalogue.keys_page())
        elif topic is Topic.runs:
            _list_runs(Path(word or "runs"))
        elif topic is Topic.keys:
            catalogue.show_keys(word, screen())
        else:
            catalogue.show_rows(topic.value, word, screen())
    except PbflError as error:
        raise error_exit(error) from None
