"""The ``pbfl`` command. A module a topic; the table below is the order of ``pbfl --help``.

The commands import what they need when they run: torch and Flower take seconds, ``--help`` should not.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from pbfl_flwr.cli import cleaning, deployment, devices, experiments, reports, reproductions, sweeps, watching
from pbfl_flwr.cli.privacy import privacy

app = typer.Typer(
    help="Prototype-based federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "run": experiments.run,
    "compare": experiments.compare,
    "reproduce": reproductions.reproduce,
    "sweep": sweeps.sweep,
    "watch": watching.watch,
    "show": experiments.show,
    "report": reports.report,
    "list": experiments.list_,
    "clean": cleaning.clean,
    "privacy": privacy,
    "certs": deployment.certs,
    "keys": deployment.keys,
    "doctor": deployment.doctor,
    "check-data": devices.check_data,
    "vocabulary": devices.vocabulary,
    "export": devices.export,
    "predict": devices.predict,
}

for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(deployment.deploy, name="deploy")


def main() -> None:
    """Run the command line."""
    app()
