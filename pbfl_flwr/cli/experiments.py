"""``pbfl run``, ``watch``, ``show``, ``report``, ``new-clients`` and ``list``: runs and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from pbfl_flwr.cli.common import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    NON_EMPTY_PATH,
    Against,
    Allowed,
    AppDirectory,
    Assignments,
    At,
    By,
    Gpus,
    NewRunDir,
    Pairs,
    Preset,
    RayAddress,
    Resumed,
    RunDir,
    WhichEngine,
    Workers,
    engine_for,
    need_resume,
    own_network,
    running,
)
from pbfl_flwr.errors import PbflError, expanded, reading
from pbfl_flwr.experiments.console import document, kilobytes, say, screen

Topic = Literal[
    "methods",
    "rules",
    "models",
    "weights",
    "datasets",
    "presets",
    "comparisons",
    "reproductions",
    "keys",
    "runs",
]
Form = Literal["text", "json", "csv"]
LONGEST_INTERVAL = 3600  # seconds


def run(
    preset: Preset = None,
    assignments: Assignments = None,
    run_dir: NewRunDir = None,
    resume: Resumed = None,
    allowed: Allowed = None,
    gpus_per_client: Gpus = 0.0,
    cpus_per_client: Annotated[int, typer.Option("--cpus-per-client", min=1, help="CPUs per client.")] = 1,
    workers: Workers = None,
    engine: WhichEngine = "processes",
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
    from pbfl_flwr.data import LoadedData
    from pbfl_flwr.experiments.execute.runner import simulate
    from pbfl_flwr.experiments.plan import configuration
    from pbfl_flwr.experiments.show import show_run
    from pbfl_flwr.flower.engines.placement import idle_cards
    from pbfl_flwr.runs.directory import RunDirectory

    console = screen()
    resources, source = engine_for(engine, ray_address, workers, gpus_per_client, app_dir, cpus_per_client)
    need_resume(allowed, resume)
    requested = configuration.gather(preset, assignments or [])
    if resume is None:
        settings = configuration.check(requested)
        directory = configuration.run_directory(settings, run_dir)
        chosen = configuration.chosen_directory(settings, run_dir) is not None
    elif run_dir is None:
        directory, chosen = expanded(resume).absolute(), True
        requested = configuration.resumed(directory, requested, allowed or [])
        settings = configuration.check(requested)
        present = RunDirectory(directory)
        if not dry_run and configuration.is_complete(present, settings, present.finished_rounds()):
            more = (
                "patience=<more>" if present.record().ended_after is not None else "num-server-rounds=<more>"
            )
            say(console, f"all rounds are finished; to run more: --set {more}")
            show_run(directory, console)
            return
    else:
        raise PbflError("--resume and --run-dir: a resumed run stays in its directory; give one of the two")
    if engine == "flower" and not dry_run:
        own_network([settings])
    loaded = LoadedData()
    checked = configuration.preflight(settings, resources, loaded)
    notes = configuration.config_warnings(settings, requested, checked, loaded)
    if dry_run:
        from pbfl_flwr.experiments.plan.preset import as_preset

        document(as_preset(settings, checked.method, requested.values, notes))
        return
    directory = configuration.create_directory(directory, chosen=chosen)
    if note := idle_cards(resources, settings.training.device):
        say(console, f"device: {note}")
    for note in notes:
        say(console, note)
    with running():
        code = simulate(source, directory, requested, resources, console, loaded)
    if code == COMPLETED:
        show_run(directory, console)
    raise typer.Exit(code)


def watch(
    run: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Follow a run of another process until it ends: a line per round, failures, and how it ended."""
    from pbfl_flwr.experiments.execute.progress import Follower, follow
    from pbfl_flwr.experiments.status import DEPTH, is_run, runs_in, show_status, snapshot

    if not interval <= LONGEST_INTERVAL:  # nor is NaN
        raise PbflError(f"--interval {interval:g}: must be at most {LONGEST_INTERVAL}, in seconds")
    console = screen()
    path = expanded(run).absolute()
    try:
        with reading(str(path)):
            if not is_run(path) and (runs := runs_in(path, DEPTH)):
                raise PbflError(f"'{run}' is a directory of runs; must be one of them, e.g. {runs[0]}")
            if once:
                Follower(path, 0, console, from_start=True).update()
                status = snapshot(path)
                show_status(status, console)
                state = status.state
            else:
                state = follow(path, console, interval)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(FAILED if state in ("failed", "stopped") else COMPLETED)


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
    ] = "text",
) -> None:
    """Print the results of a run; for a directory of runs, one line per run."""
    from pbfl_flwr.experiments import run_export, status
    from pbfl_flwr.experiments.show import show_run

    with reading(str(run)):
        if not status.is_run(run) and status.runs_in(run, status.DEPTH):
            _list_runs(run, form)
        elif form == "text":
            show_run(run, screen())
        else:
            document(run_export.as_json(run) if form == "json" else run_export.as_csv(run))


def _list_runs(directory: Path, form: Form = "text") -> None:
    from pbfl_flwr.experiments import status

    runs = status.below(directory)
    if form == "text":
        status.show_list(runs, screen())
    else:
        document(status.as_json(runs) if form == "json" else status.as_csv(runs))


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
    against: Against = "",
    pairs: Pairs = None,
    at: At = "last",
    png: Annotated[bool, typer.Option("--png", help="Also write the pictures as PNG files.")] = False,
    allowed: Allowed = None,
    svg: Annotated[bool, typer.Option("--svg", help="Also write the pictures as SVG files.")] = False,
    pdf: Annotated[bool, typer.Option("--pdf", help="Also write the pictures as PDF files.")] = False,
) -> None:
    """Write a self-contained HTML report of one or several runs: tables, statistics, pictures."""
    from pbfl_flwr.config import PREDICTORS, in_order
    from pbfl_flwr.experiments import report as reporting
    from pbfl_flwr.experiments import results, status
    from pbfl_flwr.experiments.pairs import Asked
    from pbfl_flwr.experiments.plan.planned_runs import check_names

    with reading(", ".join(map(str, runs))):
        paths, left_out = status.for_a_report(runs)
        groups = results.load(paths, allowed or (), by or "", at)
        if by:
            scored = (name for group in groups for run in group.runs for name in run.scores)
            check_names("--by", [by], in_order([*PREDICTORS, *scored]))
        asked = Asked(against, tuple(pairs or ()))
        asked.check([group.label for group in groups])
        formats = [name for name, wanted in (("png", png), ("svg", svg), ("pdf", pdf)) if wanted]
        written = reporting.write(groups, expanded(out).absolute(), asked, formats)
    console = screen()
    for line in left_out:
        say(console, line)
    say(console, f"written to {written[0]} ({kilobytes(written[0].stat().st_size)})")
    if len(written) > 1:
        folder = written[-1].parent
        say(console, f"{len(written) - 1} pictures in {folder}")
        pictures = {file for file in folder.iterdir() if file.suffix in (".png", ".svg", ".pdf")}
        if others := len(pictures.difference(written)):
            say(console, f"{others} other pictures there are not of this report", "yellow")


def new_clients(
    run: RunDir,
    clients: Annotated[int, typer.Option("--clients", min=1, help="How many.")] = 5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of local training.")] = 5,
    allowed: Allowed = None,
) -> None:
    """Let clients that were not in a run train with its last broadcast, and print their accuracies."""
    from pbfl_flwr.experiments.new_clients import new_client_sheet
    from pbfl_flwr.experiments.results import FinishedRun

    with reading(str(run)):
        finished = FinishedRun.load(expanded(run).absolute(), allowed or ())
    new_client_sheet(finished, clients, rounds).show(screen())


def list_(
    topic: Annotated[Topic, typer.Argument(metavar="TOPIC", help=f"One of {', '.join(get_args(Topic))}.")],
    word: Annotated[
        str,
        typer.Argument(
            metavar="[WORD]",
            help="Only names that contain it; for keys also a group, a method, or a word in their descriptions; for "
            "runs a directory.",
        ),
    ] = "",
) -> None:
    """List methods, models, pretrained weights, datasets, presets, comparisons, reproductions, keys, or runs."""
    from pbfl_flwr.experiments import catalogue

    if topic == "runs":
        _list_runs(Path(word or "runs"))
    elif topic == "keys":
        catalogue.show_keys(word, screen())
    else:
        catalogue.show_rows(topic, word, screen())
