"""``pbfl clean``: remove what runs left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import GIVEN, ended
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.text.numbers import hang, kilobytes, say, screen


def clean(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR...]",
            click_type=GIVEN,
            help="Runs, directories of runs, a device's state directory; default runs, and <home>/runs and /state.",
        ),
    ] = None,
    states: Annotated[
        bool,
        typer.Option(
            "--states", help="Clients' states: of finished runs, on a device of all runs but the newest."
        ),
    ] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Runs that never finished a round.")
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="Decoded data in <home>/cache; it is decoded anew when wanted.")
    ] = False,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Leave what changed since: 30d, 12h, 0d.")
    ] = "1d",
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; otherwise it is only shown.")] = False,
) -> None:
    """Show what runs left behind and could go, and with --yes remove it; without options torn files alone."""
    from pbfl_flwr.experiments import cleanup

    console = screen()
    asked: dict[cleanup.Kind, bool] = {"states": states, "unfinished": unfinished, "cache": cache}
    kinds: list[cleanup.Kind] = ["torn", *(kind for kind, wanted in asked.items() if wanted)]
    try:
        seconds = cleanup.age(older_than)
        found = list(cleanup.look(directories or cleanup.places()))
        if cache or not directories:
            found += cleanup.cached()
        go, stay = cleanup.choose(found, kinds, seconds, time.time())
        freed = 0
        for find in go:
            size = find.size
            if yes and (left := cleanup.remove(find)) is not None:
                stay.append(left)
                continue
            freed += size
            hang(console, f"{kilobytes(size):>9}  ", f"{find.place}: {find.what}", 11)
    except PbflError as error:
        raise ended(error) from None
    except OSError as error:
        raise ended(PbflError(f"{error.filename} cannot be read ({error.strerror})")) from None
    if any(find.kind == "states" for find in go):
        say(
            console,
            "a run without its clients' states can be shown, compared and reported, not resumed or exported",
        )
    for line in cleanup.reasons(stay):
        say(console, f"left {line}")
    if not freed:
        say(console, "nothing to remove")
    elif yes:
        say(console, f"removed {kilobytes(freed)}")
    else:
        say(console, f"would remove {kilobytes(freed)}; --yes does")
