"""``pbfl clean``: remove files left behind by runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import NON_EMPTY_PATH, error_exit
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.console import kilobytes, print_hanging, say, screen


def clean(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR...]",
            click_type=NON_EMPTY_PATH,
            help="Runs, directories of runs, state directories of devices; default: runs, <home>/runs, <home>/state.",
        ),
    ] = None,
    states: Annotated[
        bool,
        typer.Option(
            "--states", help="Clients' states of finished runs; on a device, of all runs except the newest."
        ),
    ] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Runs that never finished a round.")
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="Decoded data in <home>/cache; it is decoded again when needed.")
    ] = False,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="AGE", help="Minimum time since the last change: 30d, 12h, 0d."),
    ] = "1d",
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the files; otherwise they are only listed.")
    ] = False,
) -> None:
    """List files left behind by runs, and remove them with --yes; without options only torn temporary files."""
    from pbfl_flwr.experiments import cleanup

    console = screen()
    asked: dict[cleanup.Kind, bool] = {"states": states, "unfinished": unfinished, "cache": cache}
    kinds: list[cleanup.Kind] = ["torn", *(kind for kind, wanted in asked.items() if wanted)]
    try:
        seconds = cleanup.parse_age(older_than)
        candidates = list(cleanup.scan(directories or cleanup.default_directories()))
        if cache or not directories:
            candidates += cleanup.scan_cache()
        to_remove, retained = cleanup.select(candidates, kinds, seconds, time.time())
        freed = 0
        for item in to_remove:
            size = item.size
            if yes and (left := cleanup.remove(item)) is not None:
                retained.append(left)
                continue
            freed += size
            print_hanging(console, f"{kilobytes(size):>9}  ", f"{item.path}: {item.description}", 11)
    except PbflError as error:
        raise error_exit(error) from None
    except OSError as error:
        raise error_exit(PbflError(f"{error.filename} cannot be read ({error.strerror})")) from None
    if any(item.kind == "states" for item in to_remove):
        say(
            console,
            "a run without its clients' states can be shown, compared and reported, but not resumed or exported",
        )
    for line in cleanup.reason_lines(retained):
        say(console, f"left {line}")
    if not freed:
        say(console, "nothing to remove")
    elif yes:
        say(console, f"removed {kilobytes(freed)}")
    else:
        say(console, f"would remove {kilobytes(freed)}; remove with --yes")
