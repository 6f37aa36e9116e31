"""A published table made again: its columns as blocks, its rows as runs, what the paper prints beside what we get.

A reproduction is a comparison (see :mod:`pbfl_flwr.experiments.compare`) with the paper's side of it. A run's keys are
those of ``common``, its block, the run, the run within the block, and at scale ``small`` those of ``small``; later ones
win.

::

    title = "FedCPD, Table 1"
    paper = "Jin et al., IJCAI 2025"
    table = "Table 1: test accuracy ..."
    hardware = "not stated"
    accuracy = "weighted"               # over all test samples, or the "mean" over clients
    round = "best"                      # which round the paper reports: "best" (chosen on test data) or "last"
    spread = "clients"                  # what its ± is: over "clients", over "seeds", or "none" is printed
    seeds = [0]
    deviations = ["..."]                # what differs from the paper, and why
    [common]
    learning-rate = 0.01
    [small]
    num-server-rounds = 5
    [blocks.cifar10]
    dataset = "cifar10"
    remark = "..."                      # optional
    runs.FedCPD.feature-dim = 512       # optional
    [runs.FedCPD]
    method = "fedcpd"
    [published]                         # a row a run; an entry a block, in their order: [accuracy, ±], [] for "-"
    FedCPD = [[91.78, 7.87]]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.data import check_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import configuration
from pbfl_flwr.experiments.compare import Planned, finished, plan
from pbfl_flwr.experiments.sheets import Sheet, figure
from pbfl_flwr.experiments.statistics import spread as deviation
from pbfl_flwr.experiments.tables import Scores, scores
from pbfl_flwr.flower.history import RunDirectory
from pbfl_flwr.flower.store import write_atomically
from pbfl_flwr.method import PREDICTORS

FOLDER = "experiments/reproductions"
SILENT = {
    *configuration.PATHS,
    "download",
    "device",
    "threads",
    "eval-batch-size",
    "seed",
}  # change no setting
Scale = Literal["small", "paper"]
Keys = dict[str, Scalar]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Cell = Annotated[list[Percent], Field(max_length=2)]
"""[accuracy, ±], [accuracy], or [] where the paper prints "-"; in %."""


class _File(BaseModel):
    """The parts of the TOML file, named as there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    paper: str
    table: str
    hardware: str
    accuracy: Literal["weighted", "mean"]
    round: Literal["best", "last"]
    spread: Literal["clients", "seeds", "none"]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    deviations: Annotated[list[str], Field(min_length=1)]
    common: dict[str, Any]
    small: dict[str, Any]
    blocks: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    runs: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    published: dict[str, list[Cell]]


@dataclass(frozen=True)
class Block:
    """One column of the table.

    Attributes:
        runs: label -> keys at the paper's scale.
        published: label -> what the paper prints, see :data:`Cell`.
        remark: what is to be known about these figures; may be empty.
    """

    runs: Mapping[str, Keys]
    published: Mapping[str, list[float]]
    remark: str


@dataclass(frozen=True)
class Reproduction:
    """One published table.

    Attributes:
        title, paper, table, hardware, accuracy, round, spread, seeds, deviations: see the module.
        small: the keys that scale "small" changes.
        blocks: name -> block, in the table's order.
    """

    title: str
    paper: str
    table: str
    hardware: str
    accuracy: str
    round: str
    spread: str
    seeds: Sequence[int]
    deviations: Sequence[str]
    small: Keys
    blocks: Mapping[str, Block]


def reproductions() -> list[str]:
    """Return the names of the reproductions that come with the package."""
    return configuration.shipped(FOLDER)


def read(name: str) -> Reproduction:
    """Return a reproduction.

    Args:
        name: a TOML file, or one of :func:`reproductions`.

    Raises:
        PbflError: if there is none, or it is not of the form above.
    """
    found = configuration.read_toml("reproduction", name, FOLDER)
    try:
        file = _File.model_validate(found)
    except ValidationError as error:
        raise PbflError(
            "\n".join(
                f"reproduction '{name}': {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            )
        ) from None
    if set(file.published) != set(file.runs):
        odd = min(set(file.published) ^ set(file.runs))
        raise PbflError(f"reproduction '{name}': '{odd}' must be both in runs and in published")
    for label, row in file.published.items():
        if len(row) != len(file.blocks):
            raise PbflError(
                f"reproduction '{name}': published.{label} has {len(row)} entries; the blocks are {len(file.blocks)}"
            )
    blocks = {
        block: _block(file, keys, name, block, number)
        for number, (block, keys) in enumerate(file.blocks.items())
    }
    kept = file.model_dump(exclude={"common", "small", "blocks", "runs", "published"})
    return Reproduction(**kept, small=configuration.flatten(file.small), blocks=blocks)


def _block(file: _File, keys: Mapping[str, Any], name: str, block: str, number: int) -> Block:
    own = {key: value for key, value in keys.items() if key not in ("remark", "runs")}
    within: Mapping[str, Any] = keys.get("runs", {})
    if unknown := set(within) - set(file.runs):
        raise PbflError(f"reproduction '{name}': blocks.{block}.runs.{min(unknown)} is no run")
    runs = {
        label: {
            **configuration.flatten(file.common),
            **configuration.flatten(own),
            **configuration.flatten(run),
            **configuration.flatten(within.get(label, {})),
        }
        for label, run in file.runs.items()
    }
    published = {label: row[number] for label, row in file.published.items()}
    return Block(runs, published, str(keys.get("remark", "")))


def chosen(paper: Reproduction, dataset: str | None, names: Sequence[str]) -> list[str]:
    """Return the blocks that were asked for; all without a wish.

    Args:
        paper: the reproduction.
        dataset: keep the blocks on this dataset.
        names: keep these blocks.

    Raises:
        PbflError: if there is none.
    """
    if unknown := [name for name in names if name not in paper.blocks]:
        raise PbflError(f"--block {unknown[0]}: allowed are {', '.join(paper.blocks)}")
    datasets = {name: str(next(iter(block.runs.values()))["dataset"]) for name, block in paper.blocks.items()}
    if dataset is not None and dataset not in datasets.values():
        raise PbflError(f"--dataset {dataset}: allowed are {', '.join(dict.fromkeys(datasets.values()))}")
    kept = [
        name
        for name in paper.blocks
        if (not names or name in names) and (dataset is None or datasets[name] == dataset)
    ]
    if not kept:
        raise PbflError(f"--dataset {dataset}: none of the blocks {', '.join(names)} is on it")
    return kept


def plans(
    paper: Reproduction,
    names: Iterable[str],
    scale: Scale,
    assignments: Sequence[str],
    seeds: Sequence[int],
    only: Sequence[str],
    out: Path,
) -> dict[str, list[Planned]]:
    """Return block -> its runs with checked keys, before any of them starts.

    Args:
        paper: the reproduction.
        names: of the blocks.
        scale: "paper" is the full setting, "small" what a small machine does in minutes.
        assignments: ``key=value`` for all runs.
        seeds: one run a row and seed; without any, the paper's at its scale, the first of them at "small".
        only: labels; empty is all.
        out: directory of the reproduction.

    Raises:
        PbflError: one line for every bad key, and for labels that do not exist.
    """
    taken = seeds or (paper.seeds if scale == "paper" else paper.seeds[:1])
    changed = paper.small if scale == "small" else {}
    return {
        name: plan(
            {label: {**keys, **changed} for label, keys in paper.blocks[name].runs.items()},
            assignments,
            taken,
            only,
            out / name,
        )
        for name in names
    }


def absent(planned: Mapping[str, Sequence[Planned]]) -> dict[str, str]:
    """Return block -> why it cannot be run here: which files its data wants, and where.

    The data of a block is decoded and dealt once for that.
    """
    found = {}
    for name, runs in planned.items():
        settings = configuration.check(runs[0].wishes)
        try:
            check_data(settings.data, settings.run.num_clients)
        except PbflError as error:
            found[name] = str(error)
    return found


def changes(paper: Reproduction, planned: Mapping[str, Sequence[Planned]]) -> list[str]:
    """Return what is run otherwise than at the paper's scale, a line a key; seeds included."""
    found: dict[str, dict[Scalar, set[Scalar]]] = {}
    defaults = Settings().as_dict()
    for name, runs in planned.items():
        for run in runs:
            full = {**defaults, **paper.blocks[name].runs[run.label]}
            for key, value in run.wishes.values.items():
                if key not in SILENT and value != full.get(key):
                    found.setdefault(key, {}).setdefault(value, set()).add(full.get(key, "none"))
    lines = [
        f"{key} = {value}, the full setting has {', '.join(sorted(str(item) for item in instead))}"
        for key, values in found.items()
        for value, instead in values.items()
    ]
    seeds = sorted({run.seed for runs in planned.values() for run in runs})
    if seeds != sorted(paper.seeds):
        lines.append(f"seeds {_listed(seeds)}, the full setting has {_listed(paper.seeds)}")
    return lines


@dataclass(frozen=True)
class Row:
    """One row of a block: what the paper prints, and what the finished runs gave, one value a seed, in %.

    Attributes:
        block, label: where it stands.
        published: see :data:`Cell`.
        rule: the predictor that is compared.
        best, best_spread: accuracy of the best round, and deviation over clients there.
        last, last_spread: the same of the last round.
        others: predictor -> last accuracies.
        rounds: how many were made.
        seconds: a round.
    """

    block: str
    label: str
    published: list[float]
    rule: str
    best: list[float]
    best_spread: list[float]
    last: list[float]
    last_spread: list[float]
    others: Mapping[str, list[float]]
    rounds: int
    seconds: float

    def compared(self, paper: Reproduction) -> list[float]:
        """Return the values that are compared with the paper's."""
        return self.best if paper.round == "best" else self.last

    def difference(self, paper: Reproduction) -> float | None:
        """Return ours minus the paper's, percentage points; None where one of the two is missing."""
        values = self.compared(paper)
        return fmean(values) - self.published[0] if values and self.published else None


def rows(paper: Reproduction, planned: Mapping[str, Sequence[Planned]]) -> list[Row]:
    """Return a row for every block and label that has a finished run."""
    found = []
    for name, runs in planned.items():
        for label in dict.fromkeys(run.label for run in runs):
            done = [RunDirectory(run.directory) for run in runs if run.label == label and finished(run)]
            if done:
                found.append(_row(paper, name, label, done))
    return found


def _row(paper: Reproduction, block: str, label: str, runs: Sequence[RunDirectory]) -> Row:
    histories = [run.rounds() for run in runs]
    found: list[dict[str, Scores]] = [scores(history, by=paper.accuracy) for history in histories]
    rule = str(runs[0].read()["headline"])

    def column(which: Literal["best", "last"], statistic: str, name: str = rule) -> list[float]:
        return [100 * getattr(score[name], which)[1][statistic] for score in found if name in score]

    return Row(
        block,
        label,
        paper.blocks[block].published[label],
        rule,
        column("best", paper.accuracy),
        column("best", "std"),
        column("last", paper.accuracy),
        column("last", "std"),
        {name: column("last", paper.accuracy, name) for name in PREDICTORS if name in found[0]},
        len(histories[0]),
        fmean(line["seconds"]["total"] for history in histories for line in history),
    )


def markdown(
    paper: Reproduction,
    scale: Scale,
    planned: Mapping[str, Sequence[Planned]],
    found: Sequence[Row],
    missing: Mapping[str, str],
) -> str:
    """Return the tables of all blocks and the list of what differs from the paper."""
    over = "over samples" if paper.accuracy == "weighted" else "mean over clients"
    spread = {
        "clients": "± over clients",
        "seeds": "± is the sample deviation over seeds",
        "none": "no ± is printed",
    }[paper.spread]
    lines = [f"**{paper.title}**, scale {scale}", "", f"{paper.paper}. {paper.table}", ""]
    lines += [f"Accuracy in %, {over}, {paper.round} round is compared, {spread}.", ""]
    for name, runs in planned.items():
        lines += [_table(paper, name, [row for row in found if row.block == name], runs).markdown()]
    lines += [f"**{name}** was left out: {why}" for name, why in missing.items()] + [""] * bool(missing)
    if different := changes(paper, planned):
        lines += ["Otherwise than the full setting:", "", *(f"* {line}" for line in different), ""]
    lines += ["Otherwise than in the paper:", "", *(f"* {line}" for line in paper.deviations)]
    lines += ["", f"The paper's hardware: {paper.hardware}."]
    return "\n".join(lines) + "\n"


def _table(paper: Reproduction, block: str, found: Sequence[Row], runs: Sequence[Planned]) -> Sheet:
    names = [name for name in PREDICTORS if any(name in row.others for row in found)]
    head = ["run", "compared by", "paper", "here, best round", "here, last round", "difference", *names]
    lines = []
    for row in found:
        gap = row.difference(paper)
        cells = [row.label, row.rule, " ± ".join(f"{value:.2f}" for value in row.published) or "-"]
        cells += [_cell(row.best, row.best_spread, paper), _cell(row.last, row.last_spread, paper)]
        cells += [
            "-" if gap is None else f"{gap:+.2f}",
            *(figure(row.others.get(name, [])) for name in names),
        ]
        lines.append((*cells, str(row.rounds), str(len(row.best)), f"{row.seconds:.1f}"))
    notes = ["Columns named after predictors are accuracies of the last round."] if found else []
    done = {row.label for row in found}
    if to_do := [label for label in dict.fromkeys(run.label for run in runs) if label not in done]:
        notes.append(f"Not finished: {', '.join(to_do)}.")
    notes += [paper.blocks[block].remark] if paper.blocks[block].remark else []
    columns = (*head, "rounds", "seeds", "s a round")
    return Sheet(f"{paper.title}, {block}", columns, tuple(lines), tuple(notes), text_columns=2)


def _cell(values: Sequence[float], spreads: Sequence[float], paper: Reproduction) -> str:
    if not values or paper.spread != "clients":
        return figure(values)
    return f"{fmean(values):.2f} ± {fmean(spreads):.2f}"


def write(out: Path, paper: Reproduction, text: str, found: Sequence[Row]) -> None:
    """Write table.md (the text) and table.csv (a line a row, plain numbers)."""
    write_atomically(out / "table.md", text.encode())
    head = (
        "block run rule paper paper_spread best best_spread last last_spread difference rounds seeds seconds"
    )
    lines = []
    for row in found:
        gap = row.difference(paper)
        printed = ([f"{value:.2f}" for value in row.published] + ["", ""])[:2]
        figures = [*_plain(paper, row.best, row.best_spread), *_plain(paper, row.last, row.last_spread)]
        rest = [
            "" if gap is None else f"{gap:.4f}",
            str(row.rounds),
            str(len(row.best)),
            f"{row.seconds:.2f}",
        ]
        lines.append((row.block, row.label, row.rule, *printed, *figures, *rest))
    plain = Sheet(paper.title, tuple(head.split()), tuple(lines))
    write_atomically(out / "table.csv", plain.csv().encode())


def _plain(paper: Reproduction, values: Sequence[float], spreads: Sequence[float]) -> tuple[str, str]:
    """Return mean and deviation, over clients or over seeds as the paper's are."""
    if not values:
        return "", ""
    over = fmean(spreads) if paper.spread == "clients" else deviation(values).deviation
    return f"{fmean(values):.4f}", f"{over:.4f}"


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))
