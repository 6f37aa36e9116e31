"""Several runs on the same data side by side, resumable run by run, and one table of them.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import configuration
from pbfl_flwr.experiments.figures import kilobytes, say
from pbfl_flwr.experiments.records import Group, Record
from pbfl_flwr.experiments.runner import simulate
from pbfl_flwr.experiments.sheets import Sheet, figure
from pbfl_flwr.experiments.summaries import paired_sheet
from pbfl_flwr.experiments.tables import majority_lines, paper_scalars, scores
from pbfl_flwr.flower.engine import Resources
from pbfl_flwr.flower.history import RunDirectory
from pbfl_flwr.flower.store import write_atomically
from pbfl_flwr.method import PREDICTORS

FOLDER = "experiments/comparisons"
INTERRUPTED = 130
PLAIN = ("headline", "seeds", "rounds", "last", "best", "std", "worst", "up", "down", "total")
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
    runs = found.get("runs") if other is None else _runs_of(str(other), name)
    if not runs:
        raise PbflError(f"comparison '{name}': it has no [runs.<label>] table")
    common = configuration.flatten(found.get("common", {}))
    return str(found.get("title", name)), {
        label: {**common, **configuration.flatten(keys)} for label, keys in runs.items()
    }


def _runs_of(other: str, name: str) -> dict[str, Any]:
    """Return the tables of the runs of another comparison, which must have its own."""
    runs = configuration.read_toml("comparison", other, FOLDER).get("runs")
    if not runs:
        raise PbflError(f"comparison '{name}': runs-of = '{other}', which has no runs of its own")
    return dict(runs)


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
    if unknown := [label for label in only if label not in runs]:
        raise PbflError(f"--only {unknown[0]}: allowed are {', '.join(runs)}")
    given = configuration.gather(None, assignments)
    planned, problems = [], []
    for label, keys in runs.items():
        if only and label not in only:
            continue
        for seed in seeds or [int(given.values.get("seed", keys.get("seed", 0)))]:
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


def preflight(planned: Sequence[Planned], resources: Resources) -> None:
    """Load the data and try the networks of every different configuration, before any run starts.

    Raises:
        PbflError: one line on what does not fit.
    """
    for wishes in {str(sorted(run.wishes.values.items())): run.wishes for run in planned}.values():
        configuration.preflight(configuration.check(wishes), resources)


def numbers(option: str, text: str) -> list[int]:
    """Return a comma list of whole numbers from 0.

    Raises:
        PbflError: if it is none.
    """
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1]
    if any(number < 0 for number in found):
        raise PbflError(f"{option} {text}: allowed are whole numbers from 0, separated by commas")
    return found


def finished(run: Planned) -> bool:
    """Whether all rounds of a run are there."""
    if not (run.directory / "run.json").exists():
        return False
    wanted = configuration.check(run.wishes).run.num_server_rounds
    return len(RunDirectory(run.directory).rounds()) >= wanted


def ready(run: Planned) -> bool:
    """Whether a run need not be made, having made sure that what is there was made with its keys.

    Raises:
        PbflError: if it was made with other keys.
    """
    if not (run.directory / "run.json").exists():
        return False
    wanted = configuration.check(run.wishes)
    there = configuration.check(configuration.Wishes(RunDirectory(run.directory).read()["configuration"]))
    if wanted.fingerprint() != there.fingerprint():
        recorded, now = there.as_dict(), wanted.as_dict()
        same = {*configuration.PATHS, "resume", "num-server-rounds"}
        odd = [
            f"{key} = {recorded.get(key)}" for key in now if key not in same and recorded.get(key) != now[key]
        ]
        raise PbflError(
            f"{run.directory} was made with {', '.join(odd)}; allowed are the same keys, or another --out"
        )
    return finished(run)


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

    A run that was interrupted goes on where it stopped; a run that fails does not stop the others.

    Args:
        planned: in the order in which they are made.
        start: makes a run.
        after: called after every run that was made.

    Raises:
        KeyboardInterrupt: if a run was interrupted.
        PbflError: if a run that is there was made with other keys.
    """
    failed = []
    for run in planned:
        if ready(run):
            continue
        goes_on = (run.directory / "run.json").exists()
        wishes = configuration.resumed(run.directory, run.wishes) if goes_on else run.wishes
        code = start(wishes, run.directory)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            failed.append(f"{run.label}, seed {run.seed}")
        after(run)
    return failed


@dataclass(frozen=True)
class Row:
    """One label, all its seeds.

    Attributes:
        label, headline: of the runs.
        seeds, rounds: how many seeds, and how many rounds each.
        last, best: headline accuracies (sample-weighted, %), one a seed.
        others: predictor -> last accuracies.
        chosen: the same at the validation-chosen round; empty without validation data.
        spread: deviation over clients, last round.
        worst: mean of the worst tenth of the clients, last round.
        up, down: bytes a client and round, payload.
        total: bytes a round, all clients and both ways, Flower's objects included.
        paper: scalars by the paper's formula.
        seconds: a round.
        majority: what the skew of the labels alone scores, one a seed; None where it is not known.
    """

    label: str
    headline: str
    seeds: int
    rounds: int
    last: list[float]
    best: list[float]
    chosen: list[float]
    others: dict[str, list[float]]
    spread: list[float]
    worst: list[float]
    up: float
    down: float
    total: float
    paper: str
    seconds: float
    majority: list[float | None] = field(default_factory=list)

    def plain(self) -> list[str]:
        """Return the mean figures in the order of :data:`PLAIN`, as other programs read them."""
        accuracies = [fmean(self.last), fmean(self.best), fmean(self.spread), fmean(self.worst)]
        numbers = [*accuracies, self.up, self.down, self.total]
        return [self.headline, str(self.seeds), str(self.rounds), *(f"{number:.4f}" for number in numbers)]


def rows(planned: Sequence[Planned]) -> list[Row]:
    """Return a row for every label that has a finished run."""
    found = []
    for label in dict.fromkeys(run.label for run in planned):
        done = [RunDirectory(run.directory) for run in planned if run.label == label and finished(run)]
        if done:
            found.append(_row(label, done))
    return found


def _row(label: str, runs: Sequence[RunDirectory]) -> Row:
    abouts, histories = [run.read() for run in runs], [run.rounds() for run in runs]
    headline = str(abouts[0]["headline"])
    all_scores = [scores(history) for history in histories]
    entries: list[Mapping[str, Any]] = [entry for history in histories for entry in history]
    clients = len(abouts[0]["clients"])
    return Row(
        label,
        headline,
        len(runs),
        len(histories[0]),
        [100 * found[headline].last[1]["weighted"] for found in all_scores],
        [100 * found[headline].best[1]["weighted"] for found in all_scores],
        [100 * at[1]["weighted"] for found in all_scores if (at := found[headline].chosen) is not None],
        {
            name: [100 * found[name].last[1]["weighted"] for found in all_scores if name in found]
            for name in PREDICTORS
            if any(name in found for found in all_scores)
        },
        [100 * found[headline].last[1]["std"] for found in all_scores],
        [100 * found[headline].last[1]["worst"] for found in all_scores],
        fmean(entry["bytes_up"]["payload"] for entry in entries) / clients,
        fmean(entry["bytes_down"]["payload"] for entry in entries) / clients,
        fmean(entry["bytes_up"]["total"] + entry["bytes_down"]["total"] for entry in entries),
        paper_scalars(abouts[0], runs[0].partition_counts()),
        fmean(entry["seconds"]["total"] for entry in entries),
        [run.majority() for run in runs],
    )


def table(title: str, found: Sequence[Row]) -> Sheet:
    """Return the table: accuracies in %, sample-weighted over all clients; ± over seeds where there are several."""
    names = [name for name in PREDICTORS if any(name in row.others for row in found)]
    chosen = any(row.chosen for row in found)
    head = ["run", "headline", "last", "best (on test data)", *(["validation-chosen"] if chosen else [])]
    head += ["std over clients", "worst decile", *names]
    head += ["payload up", "payload down", "all bytes a round", "paper's scalars", "s a round"]
    lines = []
    for row in found:
        cells = [row.label, row.headline, figure(row.last), figure(row.best)]
        cells += [figure(row.chosen)] if chosen else []
        cells += [figure(row.spread), figure(row.worst)]
        cells += [figure(row.others.get(name, [])) for name in names]
        cells += [kilobytes(row.up), kilobytes(row.down), kilobytes(row.total), row.paper]
        lines.append((*cells, f"{row.seconds:.1f}"))
    rounds = sorted({row.rounds for row in found})
    note = f"Rounds: {', '.join(map(str, rounds))}. Seeds: {max((row.seeds for row in found), default=0)}. "
    note += "The columns named after predictors are last-round accuracies; payload is a client's mean. "
    note += "± is the sample deviation over seeds."
    notes = (note, *majority_lines(share for row in found for share in row.majority))
    return Sheet(title, tuple(head), tuple(lines), notes, text_columns=2)


def write(out: Path, title: str, found: Sequence[Row], groups: Sequence[Group]) -> None:
    """Write table.md, table.tex and table.csv (plain numbers), and the comparison of pairs as paired.*."""
    sheet = table(title, found)
    write_atomically(out / "table.md", sheet.markdown().encode())
    write_atomically(out / "table.tex", sheet.latex().encode())
    lines = tuple((row.label, *row.plain(), row.paper, f"{row.seconds:.2f}") for row in found)
    plain = Sheet(title, ("run", *PLAIN, "paper", "seconds"), lines)
    write_atomically(out / "table.csv", plain.csv().encode())
    paired_sheet(groups, f"{title}: pairs").write(out / "paired")


def groups(planned: Sequence[Planned]) -> list[Group]:
    """Return the finished runs of every label that has one."""
    found = []
    for label in dict.fromkeys(run.label for run in planned):
        done = [run.directory for run in planned if run.label == label and finished(run)]
        if done:
            found.append(Group(label, tuple(Record.load(directory) for directory in done)))
    return found
