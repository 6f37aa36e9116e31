"""``pbfl privacy``: what a configuration reveals."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pbfl_flwr.cli.common import Assignments, Preset
from pbfl_flwr.experiments.console import screen


def privacy(
    preset: Preset = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Show what each message of a configuration reveals, and which settings hide it."""
    from pbfl_flwr.experiments.plan import configuration

    settings = configuration.check(configuration.gather(preset, assignments or []))
    # Imported here because it loads torch and Flower, which a configuration error should not wait for.
    from pbfl_flwr.experiments import disclosure

    answer = disclosure.about(settings)
    if as_json:
        typer.echo(json.dumps(answer, ensure_ascii=False, indent=1))
        return
    disclosure.show(answer, screen())
