"""Several runs on the same data side by side, resumable run by run; :mod:`.comparison_table` tells what came of them.

A comparison is a TOML file: what all runs share, and a table a run with what it changes.

::

    title = "The prototype family on CIFAR-10"
    [common]
    dataset = "cifar10"
    [runs.FedProto]
    method = "fedproto"
    [runs.TinyProto-FT]
    method = "tinyproto"
    tinyproto.base = "fedtgp"

``runs-of = "<another comparison>"`` instead of the tables takes that one's runs, without what they have in common.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.running import configuration
from pbfl_flwr.experiments.running.runner import simulate
from pbfl_flwr.experiments.text.numbers import say
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.flower.storage.history import ENDED, RunDirectory

FOLDER = "experiments/comparisons"
INTERRUPTED = 130
LONGEST_RANGE = 1000  # of seeds; a longer one is a slip of the finger
Start = Callable[[configuration.Wishes, Path], int]
"""(keys, run directory) -> exit code of the run."""


@dataclass(frozen=True)
class Planned:
    """One run of a comparison.

    Attributes:
        label: its row in the table.
        seed: of the run.
        wishes: its keys.
        directory: where it is written.
    """

    label: str
    seed: int
    wishes: configuration.Wishes
    directory: Path

    @property
    def name(self) -> str:
        """How a person calls it."""
        return f"{self.label}, seed {self.seed}"


def comparisons() -> list[str]:
    """Return the names of the comparisons that come with the package."""
    return configuration.shipped(FOLDER)


def read(name: str) -> tuple[str, dict[str, dict[str, Scalar]]]:
    """Return (title, label -> keys) of a comparison.

    Args:
        name: a TOML file, or one of :func:`comparisons`.

    Raises:
        PbflError: if there is none, or it is not of the form above.
    """
    found = configuration.read_toml("comparison", name, FOLDER)
    if unknown := set(found) - {"title", "common", "runs", "runs-of"}:
        raise PbflError(
            f"comparison '{name}': unknown part '{min(unknown)}'; allowed are title, common, runs and runs-of"
        )
    if "runs" in found and "runs-of" in found:
        raise PbflError(f"comparison '{name}': it has runs and runs-of; allowed is one of the two")
    other = found.get("runs-of")
    runs = _labelled(found, name) if other is None else _runs_of(str(other), name)
    if not runs:
        raise PbflError(f"comparison '{name}': it has no [runs.<label>] table")
    common = configuration.flatten(_tables(found, "common", name))
    return str(found.get("title", name)), {
        label: {**common, **configuration.flatten(keys)} for label, keys in runs.items()
    }


def _runs_of(other: str, name: str) -> dict[str, Any]:
    """Return the tables of the runs of another comparison, which must have its own."""
    runs = _labelled(configuration.read_toml("comparison", other, FOLDER), other)
    if not runs:
        raise PbflError(f"comparison '{name}': runs-of = '{other}', which has no runs of its own")
    return runs


def _tables(found: Mapping[str, Any], part: str, name: str) -> dict[str, Any]:
    """Return a part of a comparison that must be a table; an empty one if it is not there."""
    table = found.get(part, {})
    if not isinstance(table, dict):
        raise PbflError(f"comparison '{name}': {part} = {table!r}: allowed is a table")
    return table


def _labelled(found: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the tables of the runs; a label is part of a directory's name."""
    runs = _tables(found, "runs", name)
    for label in runs:
        if not label or label in (".", "..") or set(label) & set("/\\\0"):
            raise PbflError(
                f"comparison '{name}': label {label!r}: allowed is a name without / and \\, since a directory has it"
            )
    return {label: _tables(runs, label, name) for label in runs}


def plan(
    runs: Mapping[str, Mapping[str, Scalar]],
    assignments: Iterable[str],
    seeds: Sequence[int],
    only: Sequence[str],
    out: Path,
) -> list[Planned]:
    """Return every run with its checked keys, before any of them starts.

    Args:
        runs: label -> keys.
        assignments: ``key=value`` for all runs.
        seeds: one run a label and seed; without any, the seed that the keys give.
        only: labels; empty is all.
        out: directory of the comparison.

    Raises:
        PbflError: one line for every bad key of every run, and for labels that do not exist.
    """
    only = named("--only", only, runs)
    given = configuration.gather(None, assignments)
    planned, problems = [], []
    for label, keys in runs.items():
        if only and label not in only:
            continue
        own = given.values.get("seed", keys.get("seed", 0))
        if not seeds and (isinstance(own, bool) or not isinstance(own, int)):
            problems.append(f"{label}: seed = {own!r}: allowed is a whole number from 0")
            continue
        for seed in seeds or [int(own)]:
            values = configuration.absolute({**keys, **given.values, "seed": seed})
            wishes = configuration.Wishes(values, given.problems)
            try:
                configuration.check(wishes)
            except PbflError as error:
                problems += [f"{label}: {line}" for line in str(error).splitlines()]
            planned.append(Planned(label, seed, wishes, out / f"{label}-seed{seed}"))
    if problems:
        raise PbflError("\n".join(dict.fromkeys(problems)))
    return planned


def with_finished(
    planned: Sequence[Planned],
    runs: Mapping[str, Mapping[str, Scalar]],
    assignments: Sequence[str],
    seeds: Sequence[int],
    out: Path,
) -> list[Planned]:
    """Return what a table is of: planned runs, and the finished ones of labels that were not asked for this time.

    Args:
        planned: what :func:`plan` returned for the labels that were asked for.
        runs: as there.
        assignments: as there.
        seeds: as there.
        out: as there.
    """
    found: list[Planned] = []
    for label in runs:
        own = [run for run in planned if run.label == label]
        if not own:
            with suppress(PbflError):  # the keys of this time do not fit it
                own = [run for run in plan(runs, assignments, seeds, [label], out) if finished(run)]
        found += own
    return found


def preflight(planned: Sequence[Planned], resources: Resources) -> list[str]:
    """Load the data and try the networks of every different configuration, before any run starts.

    Returns:
        What looks wrong with the data, and what is said of training and methods before they start, a line each.

    Raises:
        PbflError: one line on what does not fit.
    """
    found: dict[str, None] = {}
    for wishes in {str(sorted(run.wishes.values.items())): run.wishes for run in planned}.values():
        settings = configuration.check(wishes)
        configuration.preflight(settings, resources)
        notes = [*configuration.suspicions(settings), *configuration.of_training(settings)]
        found.update(dict.fromkeys(notes))
    return list(found)


def named(option: str, words: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the names that were asked for, as they are spelt; capitals need not be, where no two names differ in them.

    Args:
        option: of the command line, for messages.
        words: what was asked for.
        known: all names.

    Raises:
        PbflError: for a word that is no name, or several.
    """
    names = list(known)
    found = []
    for word in words:
        alike = [name for name in names if name.casefold() == word.casefold()]
        if word not in names and len(alike) != 1:
            folded = {name.casefold(): name for name in names}
            close = alike or [
                folded[name] for name in difflib.get_close_matches(word.casefold(), folded, n=1)
            ]
            hint = f"did you mean {' or '.join(close)}? Allowed" if close else "allowed"
            raise PbflError(f"{option} {word}: {hint} are {', '.join(names)}")
        found.append(word if word in names else alike[0])
    return found


def numbers(option: str, text: str) -> list[int]:
    """Return the whole numbers from 0 of a comma list, each once; ``0-2`` in it are 0, 1 and 2.

    Raises:
        PbflError: if it is none.
    """
    found: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if (ends := re.fullmatch(r"(\d{1,15})(?:\s*-\s*(\d{1,15}))?", part)) is None:
            raise PbflError(
                f"{option} {text}: allowed are whole numbers from 0, separated by commas, or a range like 0-2"
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < first + LONGEST_RANGE:
            raise PbflError(
                f"{option} {text}: allowed in a range are up to {LONGEST_RANGE} numbers, the smaller end first"
            )
        found += range(first, last + 1)
    if again := repeated(found):
        raise PbflError(f"{option} {text}: {again[0]} stands there twice; allowed is each number once")
    return found


def repeated(values: Sequence[Scalar]) -> list[Scalar]:
    """Return what stands in a list a second time: such a run would count as two."""
    return [value for number, value in enumerate(values) if value in values[:number]]


def finished(run: Planned) -> bool:
    """Whether all rounds of a run are there, made with its keys; what cannot be read is not."""
    try:
        return ready(run)
    except PbflError:
        return False


def ready(run: Planned) -> bool:
    """Whether a run need not be made, having made sure that what is there was made with its keys.

    Raises:
        PbflError: if it was made with other keys or for more rounds, or is damaged.
    """
    there = RunDirectory(run.directory)
    if not there.taken:
        return False
    wanted = configuration.check(run.wishes)
    about = there.read()
    made = configuration.check(configuration.Wishes(about["configuration"]))
    now = wanted.relevant() | {"patience": wanted.run.patience}
    then = made.relevant() | {"patience": made.run.patience}
    if odd := [f"{key} = {value}" for key, value in then.items() if now.get(key) != value]:
        raise PbflError(
            f"{run.directory} was made with {', '.join(odd)}; allowed are the same keys, or another --out"
        )
    rounds, until = wanted.run.num_server_rounds, made.run.num_server_rounds
    if (ended := about.get(ENDED, rounds + 1)) <= rounds:
        rounds = until = ended
    # Its first rounds are not the shorter run: a last scoring, new clients and schedules belong to the last round.
    if len(there.rounds()) >= rounds and until > rounds:
        raise PbflError(
            f"{run.directory} was made with num-server-rounds = {until}, not {rounds}; allowed are at least as many "
            "rounds, or another --out"
        )
    newcomers = wanted.run.new_client_rounds if wanted.run.new_clients else 0
    return len(there.rounds()) >= rounds and len(there.newcomers(rounds)) >= newcomers


def to_make(run: Planned) -> configuration.Wishes | None:
    """Return the keys with which a run is made or goes on, None if it need not be made.

    Raises:
        PbflError: if it is refused, see :func:`ready` and :func:`pbfl_flwr.experiments.running.configuration.resumed`.
    """
    if ready(run):
        return None
    taken = RunDirectory(run.directory).taken
    return configuration.resumed(run.directory, run.wishes) if taken else run.wishes


def no_tables(planned: Iterable[Planned]) -> str:
    """Return why the tables of an earlier start stay as they are, nothing where new ones are to be written."""
    runs = list(planned)
    for run in runs:
        try:
            to_make(run)
        except PbflError:
            return "a run is refused"
    return "" if any(map(finished, runs)) else "no run is finished"


def starter(app: Path, resources: Resources, console: Console) -> Start:
    """Return what starts a run on the simulation engine.

    Args:
        app: directory of the Flower app.
        resources: of the workers.
        console: where the run's lines go.
    """

    def start(wishes: configuration.Wishes, run_dir: Path) -> int:
        run = configuration.check(wishes).run
        say(console, f"{run_dir.name}: {run.method}")
        return simulate(
            app, run_dir, wishes.values, run.num_clients, run.num_server_rounds, resources, console
        )

    return start


def make(
    planned: Sequence[Planned], start: Start, after: Callable[[Planned], object] = lambda run: None
) -> list[str]:
    """Make the runs that are not finished, one after the other, and return what failed.

    A run that was interrupted goes on where it stopped; a run that fails or is refused does not stop the others.

    Args:
        planned: in the order in which they are made.
        start: makes a run.
        after: called after every run that was made.

    Raises:
        KeyboardInterrupt: if a run was interrupted.
    """
    failed = []
    for run in planned:
        try:
            if (wishes := to_make(run)) is None:
                continue
            code = start(wishes, run.directory)
        except PbflError as error:
            failed.append(refused(run, error))
            continue
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            failed.append(run.name)
        after(run)
    return failed


def refused(run: Planned, error: PbflError) -> str:
    """Return what is said of a run that could not be made, and why."""
    return f"{run.name}: {error}"
