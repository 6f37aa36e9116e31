"""Shared by the commands: exit codes, common options, error messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer

import pbfl_flwr
from pbfl_flwr.config import Settings
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.console import say, screen
from pbfl_flwr.flower.deploy.bundle import top_level
from pbfl_flwr.flower.engines.placement import EngineName
from pbfl_flwr.flower.flower_version import refuse_older
from pbfl_flwr.util.extras import require

if TYPE_CHECKING:
    from pbfl_flwr.flower.engines.placement import Resources

COMPLETED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def need_resume(allowed: list[str] | None, resume: Path | None) -> None:
    """Refuse ``--import`` for a new run, which has no files yet that could name code."""
    if allowed and resume is None:
        raise PbflError("--import: allows code that a run's files name, so it needs --resume")


def error_exit(error: PbflError, code: int = REFUSED) -> typer.Exit:
    """Print an error line by line, and return the exit to raise."""
    for line in str(error).splitlines():
        say(screen(stderr=True), f"error: {line}")
    return typer.Exit(code)


class _NonEmptyPath(click.Path):
    """A non-empty path: Python would treat an empty one, e.g. from an unset variable, as the current directory."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value):
            option = f"{param.opts[0]} " if isinstance(param, click.Option) else ""
            raise PbflError(f"{option}'': must be a path, . for the current directory")
        path = Path(os.fspath(value))
        if os.fspath(value).startswith("~"):  # no shell expands it in --option=~/x
            value = expanded(path)
        elif str(path).startswith("~"):  # ./~x, which pathlib makes ~x
            value = path.absolute()
        return super().convert(value, param, ctx)


NON_EMPTY_PATH = _NonEmptyPath()
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the run configuration; may be repeated."),
]
Gpus = Annotated[
    float,
    typer.Option(
        "--gpus-per-client", min=0, help="GPUs per client: a fraction of one, e.g. 0.25, or whole ones."
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Worker processes of a run; default one per CPU.")
]

Parallel = Annotated[
    int,
    typer.Option("--parallel", min=1, help="Parallel runs, fewer if memory, CPUs or GPUs do not suffice."),
]


WhichEngine = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="processes: local processes; with --workers 1 a single one, for debugging. ray: Ray, on this machine or "
        "on a cluster. flower: Flower's simulation engine, through flwr run. The results are the same.",
    ),
]
RayAddress = Annotated[
    str,
    typer.Option(
        "--ray-address",
        help="Of the cluster for --engine ray, HOST:6379 or auto; default: RAY_ADDRESS, if set.",
    ),
]
AppDirectory = Annotated[
    Path | None,
    typer.Option(
        "--app",
        click_type=NON_EMPTY_PATH,
        help="Directory of the Flower app; default: this package's checkout.",
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", click_type=NON_EMPTY_PATH, help="A run directory.")]
NewRunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        click_type=NON_EMPTY_PATH,
        help="Directory of the new run; default runs/<date>-<method>-<dataset>.",
    ),
]
Resumed = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="RUN", click_type=NON_EMPTY_PATH, help="Resume the run in this directory."
    ),
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE:FUNCTION",
        help="Code named by a run's files that may be imported: a model, method, rule, dataset or partition; may be "
        "repeated.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Argument(metavar="[PRESET.toml]", help="A TOML file, or one of `pbfl list presets`."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        click_type=NON_EMPTY_PATH,
        help="Directory for runs and tables; default runs/<name>, a reproduction's with scale, a sweep's with keys.",
    ),
]
Seeds = Annotated[
    str, typer.Option("--seeds", help="One run per seed, e.g. 0,1,2 or 0-2; default: those of the file.")
]
Only = Annotated[str, typer.Option("--only", help="Run only these rows, separated by commas.")]
By = Annotated[
    str | None,
    typer.Option("--by", help="Predictor for all rows; default: each run's primary predictor."),
]
Against = Annotated[
    str,
    typer.Option(
        "--against",
        metavar="ROW",
        help="The row that each other one is compared with; default: the one of method local, else the first.",
    ),
]
Pairs = Annotated[
    list[str] | None,
    typer.Option("--pair", metavar="FIRST/SECOND", help="Compare these two rows instead; may be repeated."),
]
At = Annotated[
    Literal["last", "best", "window"],
    typer.Option(
        "--round",
        help="Accuracy that is compared: of the last round, of the best one (on test data), or the mean of the last "
        "ten that were scored.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything and list the state of every run, without starting any."),
]
OWN_PROCESS = "own process"  # the object of a command's context if nothing else runs in its process
INTERRUPTED_NOTE = "finished runs are kept; run the same command to continue"


@contextmanager
def running(interrupted: str = "") -> Iterator[None]:
    """Turn an error, Ctrl-C, SIGTERM or SIGHUP during runs into messages (``interrupted``) and an exit code."""
    from pbfl_flwr.experiments.execute.runner import interruptible
    from pbfl_flwr.runs.directory import RunRefused

    try:
        with interruptible():  # also between runs and while tables are written
            yield
    except PbflError as error:
        raise error_exit(error, REFUSED if isinstance(error, RunRefused) else FAILED) from None
    except KeyboardInterrupt:
        if interrupted:
            say(screen(), interrupted)
        raise typer.Exit(INTERRUPTED) from None


def engine_for(
    engine: EngineName,
    ray_address: str,
    workers: int | None,
    gpus_per_client: float,
    app_dir: Path | None,
    cpus_per_client: int = 1,
) -> tuple[Resources, Path]:
    """Return the resources of a run's workers, and the directory of the Flower app, which only ``flower`` needs.

    Raises:
        PbflError: if the engine does not use an option, needs Ray and there is none, or as :func:`checkout`.
    """
    from pbfl_flwr.flower.engines.placement import Resources

    if ray_address and engine != "ray":
        raise PbflError(f"--ray-address: only with --engine ray, not {engine}")
    if engine != "processes":
        require(f"--engine {engine}", "ray")
    if app_dir is not None and engine != "flower":
        raise PbflError(
            f"--app: not used with --engine {engine}, whose clients run the installed package; add --engine flower"
        )
    if engine == "ray":
        ray_address = ray_address or os.environ.get("RAY_ADDRESS", "")
    refuse_older()
    resources = Resources(cpus_per_client, gpus_per_client, workers, engine, ray_address)
    return resources, checkout(app_dir) if engine == "flower" else Path()


def own_network(runs: Iterable[Settings]) -> None:
    """Start this command again in a network of its own, since Flower's Control API asks nobody who he is.

    Where that cannot be, say in one line who can reach that API. A command that shares its process is left as it is.

    Args:
        runs: settings of the runs that will be started through Flower.
    """
    from pbfl_flwr.flower.deploy import private_network

    if private_network.inside():
        return
    needs = next((need for settings in runs if (need := private_network.needs_network(settings))), "")
    reason = f"{needs} needs the machine's" if needs else private_network.refusal()
    if reason:
        say(screen(), f"warning: {private_network.warning(reason)}", "yellow")
    elif click.get_current_context().find_root().obj == OWN_PROCESS:
        private_network.enter(sys.argv[1:])


def checkout(app_dir: Path | None) -> Path:
    """Return the directory of the Flower app, which holds pyproject.toml and the packages.

    Raises:
        PbflError: if there is none, or if Flower is too old to run it.
    """
    refuse_older()
    path = expanded(app_dir or Path(pbfl_flwr.__file__).parent.parent).absolute()
    for part in ("pyproject.toml", "pbfl_flwr", "client_app", "server_app"):
        if not top_level(path, part).exists():
            raise PbflError(
                f"'{path}' is not a checkout of this project, '{part}' is missing; give the directory of one with --app"
            )
    return path
