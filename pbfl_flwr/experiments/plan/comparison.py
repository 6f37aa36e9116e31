"""Comparisons: several runs on the same data.

A comparison is a TOML file with the keys common to all runs, and one table per run with its own keys.

::

    title = "The prototype family on CIFAR-10"
    [common]
    dataset = "cifar10"
    [runs.FedProto]
    method = "fedproto"
    [runs.TinyProto-FT]
    method = "tinyproto"
    tinyproto.base = "fedtgp"

``runs-of = "<another comparison>"`` instead of these tables takes the runs of that comparison without its ``common``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.results import FinishedRun, Group
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.runs.directory import RunDirectory

FOLDER = "experiments/comparisons"
LONGEST_RANGE = 1000  # of seeds; a longer one is taken for a typing error


@dataclass(frozen=True)
class Planned:
    """One run of a comparison.

    Attributes:
        label: its row in the table.
        seed: of the run.
        requested: its requested keys.
        directory: where it is written.
    """

    label: str
    seed: int
    requested: configuration.RequestedKeys
    directory: Path

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.label}, seed {self.seed}"


def comparisons() -> list[str]:
    """Return the names of the comparisons that come with the package."""
    return configuration.shipped(FOLDER)


def read(name: str) -> tuple[str, dict[str, dict[str, Scalar]]]:
    """Return (title, label -> keys) of a comparison.

    Args:
        name: a TOML file, or one of :func:`comparisons`.

    Raises:
        PbflError: if it does not exist or is not of the form above.
    """
    content = configuration.read_toml("comparison", name, FOLDER)
    if unknown := set(content) - {"title", "common", "runs", "runs-of"}:
        raise PbflError(
            f"comparison '{name}': unknown key '{min(unknown)}'; must be title, common, runs or runs-of"
        )
    if "runs" in content and "runs-of" in content:
        raise PbflError(f"comparison '{name}': has runs and runs-of; give one of the two")
    other = content.get("runs-of")
    runs = _labelled(content, name) if other is None else _runs_of(str(other), name)
    if not runs:
        raise PbflError(f"comparison '{name}': has no [runs.<label>] table; needed is at least one")
    common = configuration.flatten(_tables(content, "common", name))
    return str(content.get("title", name)), {
        label: {**common, **configuration.flatten(keys)} for label, keys in runs.items()
    }


def _runs_of(other: str, name: str) -> dict[str, Any]:
    """Return the run tables of another comparison, which must not use ``runs-of`` itself."""
    runs = _labelled(configuration.read_toml("comparison", other, FOLDER), other)
    if not runs:
        raise PbflError(f"comparison '{name}': runs-of = '{other}', which has no [runs.<label>] tables")
    return runs


def _tables(content: Mapping[str, Any], part: str, name: str) -> dict[str, Any]:
    """Return the value of a key that must be a table; an empty one if the key is missing."""
    table = content.get(part, {})
    if not isinstance(table, dict):
        raise PbflError(f"comparison '{name}': {part} = {table!r}: must be a table")
    return table


def _labelled(content: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the run tables by label, after checking that each label can be part of a directory name."""
    runs = _tables(content, "runs", name)
    for label in runs:
        if not label or label in (".", "..") or set(label) & set("/\\\0"):
            raise PbflError(
                f"comparison '{name}': label {label!r}: must be a directory name, without / and \\"
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
        seeds: one run per label and seed; if empty, the seed in the keys.
        only: labels to run; empty means all.
        out: directory of the comparison.

    Raises:
        PbflError: one line for every bad key of every run, and for unknown labels.
    """
    check_names("--only", only, runs)
    assigned = configuration.gather(None, assignments)
    planned, problems = [], []
    for label, keys in runs.items():
        if only and label not in only:
            continue
        own_seed = assigned.values.get("seed", keys.get("seed", 0))
        if not seeds and (isinstance(own_seed, bool) or not isinstance(own_seed, int)):
            problems.append(f"{label}: seed = {own_seed!r}: must be a whole number from 0")
            continue
        for seed in seeds or [int(own_seed)]:
            values = configuration.absolute({**keys, **assigned.values, "seed": seed})
            requested = configuration.RequestedKeys(values, assigned.problems)
            try:
                configuration.check(requested)
            except PbflError as error:
                problems += [f"{label}: {line}" for line in str(error).splitlines()]
            planned.append(Planned(label, seed, requested, out / f"{label}-seed{seed}"))
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
    """Return the runs of a table: planned runs, and the finished runs of labels that were not selected this time.

    Args:
        planned: result of :func:`plan` for the selected labels.
        runs: as for :func:`plan`.
        assignments: as for :func:`plan`.
        seeds: as for :func:`plan`.
        out: as for :func:`plan`.
    """
    known: list[Planned] = []
    for label in runs:
        of_label = [run for run in planned if run.label == label]
        if not of_label:
            with suppress(PbflError):  # this time's assignments are invalid for this label
                of_label = [run for run in plan(runs, assignments, seeds, [label], out) if finished(run)]
        known += of_label
    return known


def preflight(planned: Sequence[Planned], resources: Resources) -> list[str]:
    """Load the data and try the models of every different configuration, before any run starts.

    Returns:
        Warnings about data, training and methods, one line each.

    Raises:
        PbflError: one line on the first problem.
    """
    unique: dict[str, None] = {}
    for requested in {str(sorted(run.requested.values.items())): run.requested for run in planned}.values():
        settings = configuration.check(requested)
        configuration.preflight(settings, resources)
        notes = [*configuration.data_warnings(settings), *configuration.training_warnings(settings)]
        unique.update(dict.fromkeys(notes))
    return list(unique)


def check_names(option: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise PbflError for the first name that is unknown.

    Args:
        option: command-line option, for the message.
        names: requested names.
        known: all names.
    """
    if unknown := [name for name in names if name not in known]:
        raise PbflError(f"{option} {unknown[0]}: must be one of {', '.join(known)}")


def parse_numbers(option: str, text: str) -> list[int]:
    """Parse a comma-separated list of different whole numbers from 0; ``0-2`` stands for 0, 1 and 2.

    Raises:
        PbflError: if it is not such a list.
    """
    numbers: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if (ends := re.fullmatch(r"(\d{1,15})(?:\s*-\s*(\d{1,15}))?", part)) is None:
            raise PbflError(
                f"{option} {text}: must be whole numbers from 0, separated by commas, or a range like 0-2"
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < first + LONGEST_RANGE:
            raise PbflError(
                f"{option} {text}: must be a range of up to {LONGEST_RANGE} numbers, in ascending order"
            )
        numbers += range(first, last + 1)
    if again := duplicates(numbers):
        raise PbflError(f"{option} {text}: {again[0]} is given twice; give each number once")
    return numbers


def duplicates(values: Sequence[Scalar]) -> list[Scalar]:
    """Return the values that repeat an earlier one in the list; such a run would be counted twice."""
    return [value for number, value in enumerate(values) if value in values[:number]]


def finished(run: Planned) -> bool:
    """Whether a run is finished with its keys; False if it cannot be read or has other keys."""
    try:
        return check_finished(run)
    except PbflError:
        return False


def check_finished(run: Planned) -> bool:
    """Whether a run is finished, after checking that existing rounds were run with its keys.

    Raises:
        PbflError: if it was run with other keys or for more rounds, or is damaged.
    """
    directory = RunDirectory(run.directory)
    if not directory.taken:
        return False
    wanted = configuration.check(run.requested)
    about = directory.record()
    made = configuration.check(configuration.RequestedKeys(about.configuration))
    now = wanted.relevant() | {"patience": wanted.run.patience}
    then = made.relevant() | {"patience": made.run.patience}
    if odd := [f"{key} = {value}" for key, value in then.items() if now.get(key) != value]:
        raise PbflError(
            f"{run.directory} was run with {', '.join(odd)}; give the same keys, or another --out"
        )
    rounds, until = wanted.run.num_server_rounds, made.run.num_server_rounds
    if about.ended_after is not None and about.ended_after <= rounds:
        rounds = until = about.ended_after
    # Its first rounds are not the shorter run: the final scoring, new clients and schedules depend on the last round.
    done = len(directory.round_records())
    if done >= rounds and until > rounds:
        raise PbflError(
            f"{run.directory} was run with num-server-rounds = {until}, not {rounds}; give at least as many "
            "rounds, or another --out"
        )
    new_client_rounds = wanted.run.new_client_rounds if wanted.run.new_clients else 0
    return done >= rounds and len(directory.new_client_records(rounds)) >= new_client_rounds


def pending_keys(run: Planned) -> configuration.RequestedKeys | None:
    """Return the keys with which to start or resume a run, None if it is finished.

    Raises:
        PbflError: if it is refused, see :func:`check_finished` and
            :func:`pbfl_flwr.experiments.plan.configuration.resumed`.
    """
    if check_finished(run):
        return None
    taken = RunDirectory(run.directory).taken
    return configuration.resumed(run.directory, run.requested) if taken else run.requested


def reason_not_to_write(planned: Iterable[Planned]) -> str:
    """Return why existing tables must not be overwritten; empty if new ones can be written."""
    runs = list(planned)
    for run in runs:
        try:
            pending_keys(run)
        except PbflError:
            return "a run is refused"
    return "" if any(map(finished, runs)) else "no run is finished"


def finished_groups(
    planned: Iterable[Planned], by: str = "", statistic: Literal["weighted", "mean"] = "weighted"
) -> list[Group]:
    """Return the finished runs of every label that has any.

    Args:
        planned: the runs.
        by: the predictor of all rows; empty means each run's primary predictor.
        statistic: the accuracy to tabulate.
    """
    by_label: dict[str, list[FinishedRun]] = {}
    for run in planned:
        if finished(run):
            by_label.setdefault(run.label, []).append(FinishedRun.load(run.directory, by=by))
    return [Group(label, tuple(runs), statistic) for label, runs in by_label.items()]
