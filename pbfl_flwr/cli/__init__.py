"""The ``pbfl`` command: one module per topic; ``COMMANDS`` has the order of ``pbfl --help``.

Commands import their dependencies when they run: torch and Flower take seconds, ``--help`` should not.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from pbfl_flwr.cli import deployment, devices, experiments, tables
from pbfl_flwr.cli.common import OWN_PROCESS, error_exit
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.console import discard_output, document
from pbfl_flwr.flower.deploy import private_network


class Commands(TyperGroup):
    """The commands; an error that the user can fix is printed, one line per problem, and gives exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        """Invoke the command of a command line."""
        try:
            return super().invoke(ctx)
        except PbflError as error:
            raise error_exit(error) from None


app = typer.Typer(
    cls=Commands,
    help="Prototype-based federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "run": experiments.run,
    "compare": tables.compare,
    "reproduce": tables.reproduce,
    "sweep": tables.sweep,
    "watch": experiments.watch,
    "show": experiments.show,
    "report": experiments.report,
    "new-clients": experiments.new_clients,
    "list": experiments.list_,
    "certs": deployment.certs,
    "keys": deployment.keys,
    "doctor": deployment.doctor,
    "app": deployment.app,
    "check-data": devices.check_data,
    "weights": devices.weights,
    "export": devices.export,
    "predict": devices.predict,
}


def version(wanted: bool) -> None:
    """Print the versions that a bug report needs, and exit."""
    if wanted:
        from importlib.metadata import version as of
        from platform import python_version

        versions = ", ".join(f"{package} {of(package)}" for package in ("pbfl-flwr", "flwr", "torch"))
        document(f"{versions}, Python {python_version()}\n")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=version,
            is_eager=True,
            help="Print versions: of this package, flwr, torch, Python.",
        ),
    ] = False,
) -> None:
    """Prototype-based federated learning on Flower."""


REFUSALS = (  # errors of the system, not of this program
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
)

for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(deployment.deploy, name="deploy")


def main() -> None:
    """Run the command line.

    Errors of the system, such as a full disk (also when printing) or missing permissions, give a line and exit code 1.
    """
    if sys.stdout is None:  # it was closed
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115, as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that cannot be encoded must not end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except FileNotFoundError:  # torch ends the process with a word about oneMKL
        sys.exit("error: the current directory was removed; must be one that exists")
    if private_network.inside():
        private_network.bring_up()
    try:
        try:
            app(obj=OWN_PROCESS)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        discard_output(sys.stdout)
        where = error.filename or "a file or what is printed"  # a failed write does not say which
        sys.exit(f"error: {where}: {error.strerror}")
