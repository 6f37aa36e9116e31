"""Reproductions of published tables: columns as blocks, rows as runs, our results beside the published ones.

Every block is a comparison (see :mod:`pbfl_flwr.experiments.plan.comparison`) of the same runs. A run's
keys are merged from ``common``, its block, the run, the run within the block, and at scale ``small`` from ``small``;
later ones take precedence.

::

    title = "FedCPD, Table 1"
    paper = "Jin et al., IJCAI 2025"
    table = "Table 1: test accuracy ..."
    hardware = "not stated"
    accuracy = "weighted"               # over all test samples, or the "mean" over clients
    round = "best"                      # round the paper reports: "best" (chosen on test data) or "last"
    spread = "clients"                  # what its ± is over: "clients" or "seeds"; "none" if the paper has no ±
    seeds = [0]
    deviations = ["..."]                # differences from the paper, with reasons
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
    [published]                         # one row per run, one entry per block in order: [accuracy, ±], [] for "-"
    FedCPD = [[91.78, 7.87]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pbfl_flwr.config import SILENT, DataSettings, Scalar, Settings
from pbfl_flwr.data import check_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.notes import titled
from pbfl_flwr.experiments.plan import configuration, planned_runs
from pbfl_flwr.experiments.plan.configuration import DirectoryName, merged
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, check_names, finished_groups, unfinished_lines
from pbfl_flwr.experiments.results import RunGroup
from pbfl_flwr.experiments.summary import (
    BEST,
    BEST_STD,
    BY_PREDICTOR,
    LAST,
    ROUNDS,
    RUN,
    SECONDS,
    SEEDS,
    STD,
    Column,
    Figures,
    Text,
    moment_column,
    own_predictors,
    summary_csv,
    summary_sheet,
)
from pbfl_flwr.experiments.tables import Sheet, Tables

FOLDER = "experiments/reproductions"
Scale = Literal["small", "paper"]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Cell = Annotated[list[Percent], Field(max_length=2)]
"""[accuracy, ±], [accuracy], or [] for a "-" in the paper; in %."""


class Block(BaseModel):
    """One column of the table; its other keys are those of all its runs.

    Attributes:
        remark: note on the published values; may be empty.
        runs: label -> keys of this run in this block.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    remark: str = ""
    runs: dict[str, dict[str, Any]] = {}


class Reproduction(BaseModel):
    """A published table; the attributes are described in the module."""

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
    blocks: Annotated[dict[DirectoryName, Block], Field(min_length=1)]
    runs: Annotated[dict[DirectoryName, dict[str, Any]], Field(min_length=1)]
    published: dict[str, list[Cell]]

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if odd := set(self.published) ^ set(self.runs):
            raise ValueError(f"'{min(odd)}' must be both in runs and in published")
        for label, row in self.published.items():
            if len(row) != len(self.blocks):
                raise ValueError(
                    f"published.{label} has {len(row)} entries; needed are {len(self.blocks)}, one per block"
                )
        for name, block in self.blocks.items():
            if unknown := set(block.runs) - set(self.runs):
                raise ValueError(
                    f"blocks.{name}.runs.{min(unknown)}: unknown run; must be one of {', '.join(self.runs)}"
                )
        return self

    def runs_of(self, block: str, scale: Scale = "paper") -> dict[str, dict[str, Scalar]]:
        """Return label -> keys of the runs of a block."""
        own, after = self.blocks[block], self.small if scale == "small" else {}
        return {
            label: merged(self.common, own.model_extra or {}, keys, own.runs.get(label, {}), after)
            for label, keys in self.runs.items()
        }

    def published_cell(self, block: str, label: str) -> list[float]:
        """Return the published value of a run in a block, see :data:`Cell`."""
        return self.published[label][list(self.blocks).index(block)]

    def difference(self, block: str, group: RunGroup) -> float | None:
        """Return our mean minus the published value in percentage points; None if either is missing."""
        values = (BEST if self.round == "best" else LAST).values(group)
        published = self.published_cell(block, group.label)
        return fmean(values) - published[0] if values and published else None


def reproductions() -> list[str]:
    """Return the names of the reproductions that come with the package."""
    return configuration.shipped(FOLDER)


def read(name: str) -> Reproduction:
    """Return a reproduction: a TOML file, or one of :func:`reproductions`.

    Raises:
        PbflError: if it does not exist or is not of the form above.
    """
    return configuration.read_file("reproduction", name, FOLDER, Reproduction)


def chosen(paper: Reproduction, dataset: str, names: Sequence[str]) -> list[str]:
    """Return the names of the blocks on this dataset and with these names; an empty choice selects all.

    Raises:
        PbflError: if a name or the dataset is unknown, or no block has both.
    """
    check_names("--block", names, paper.blocks)
    datasets = {
        name: str(next(iter(paper.runs_of(name).values())).get("dataset", DataSettings().dataset))
        for name in paper.blocks
    }
    check_names("--dataset", [dataset] if dataset else [], dict.fromkeys(datasets.values()))
    blocks = [
        name for name in paper.blocks if name in (names or datasets) and dataset in ("", datasets[name])
    ]
    if not blocks:
        raise PbflError(f"--dataset {dataset}: none of the blocks {', '.join(names)} uses it")
    return blocks


def plan(
    paper: Reproduction, scale: Scale, assignments: Sequence[str], seeds: Sequence[int], out: Path
) -> list[PlannedRun]:
    """Return the runs of all blocks, not checked yet.

    Args:
        paper: the reproduction.
        scale: "paper" is the full setting, "small" takes minutes on a small machine.
        assignments: ``key=value`` for all runs.
        seeds: one run per row and seed; if empty, the paper's seeds, at "small" only the first of them.
        out: directory of the reproduction.
    """
    numbers = seeds or (paper.seeds if scale == "paper" else paper.seeds[:1])
    return [
        run
        for block in paper.blocks
        for run in planned_runs.plan(paper.runs_of(block, scale), assignments, numbers, out / block, block)
    ]


def absent(planned: Iterable[PlannedRun]) -> dict[str, str]:
    """Return block -> why it cannot be run here, e.g. which data files are missing and where.

    The data of each block is decoded and partitioned once for this check.
    """
    first: dict[str, PlannedRun] = {}
    for run in planned:
        first.setdefault(run.block, run)
    refusals = {}
    for block, run in first.items():
        settings = configuration.check(run.requested)
        try:
            check_data(settings.data, settings.run.num_clients)
        except PbflError as error:
            refusals[block] = str(error)
    return refusals


def changes(paper: Reproduction, planned: Iterable[PlannedRun]) -> list[str]:
    """Return how keys and seeds of the planned runs differ from the paper's scale, one line per key and value."""
    runs = list(planned)
    differences: dict[str, dict[Scalar, set[Scalar]]] = {}
    full = {block: paper.runs_of(block) for block in paper.blocks}
    defaults = Settings().as_dict()
    for run in runs:
        keys = {**defaults, **full[run.block][run.label]}
        for key, value in run.requested.values.items():
            if key not in SILENT and value != keys.get(key):
                differences.setdefault(key, {}).setdefault(value, set()).add(keys.get(key, "none"))
    lines = [
        f"{key} = {value}, the full setting has {', '.join(sorted(str(item) for item in instead))}"
        for key, values in differences.items()
        for value, instead in values.items()
    ]
    seeds = sorted({run.seed for run in runs})
    if seeds != sorted(set(paper.seeds)):
        lines.append(f"seeds {_listed(seeds)}, the full setting has {_listed(paper.seeds)}")
    return lines


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))


def tables(
    paper: Reproduction, scale: Scale, planned: Iterable[PlannedRun], missing: Mapping[str, str], by: str = ""
) -> Tables:
    """Return the tables of all blocks, with what differs from the paper.

    ``missing`` are the blocks that were left out, with the reason; ``by`` is as in :class:`FinishedRun`.
    """
    runs: dict[str, list[PlannedRun]] = {}
    for run in planned:
        runs.setdefault(run.block, []).append(run)
    blocks = {block: finished_groups(of_block, by, paper.accuracy) for block, of_block in runs.items()}
    over = "sample-weighted" if paper.accuracy == "weighted" else "mean over clients"
    spread = {
        "clients": "± over clients",
        "seeds": "± is the sample standard deviation over seeds",
        "none": "the paper has no ±, ours is the sample standard deviation over seeds",
    }[paper.spread]
    shown: list[Sheet | str] = [
        f"**{paper.title}**, {titled(f'scale {scale}', by)}",
        "",
        f"{paper.paper}. {paper.table}",
        "",
        f"Accuracy in %, {over}; the {paper.round} round is compared; {spread}.",
        "",
    ]
    if scale == "small":
        shown += ["At scale small our results are not comparable with the paper's.", ""]
    if by:
        shown += [f"Our results are all by {by}, the paper's by each method's own predictor.", ""]
    for block, groups in blocks.items():
        shown += [_sheet(paper, block, groups, runs[block]), ""]
    shown += [f"**{block}** was left out: {why}" for block, why in missing.items()] + [""] * bool(missing)
    if different := changes(paper, [run for of_block in runs.values() for run in of_block]):
        shown += ["Differs from the full setting:", "", *(f"* {line}" for line in different), ""]
    shown += ["Differs from the paper:", "", *(f"* {line}" for line in paper.deviations)]
    shown += ["", f"The paper's hardware: {paper.hardware}."]
    text = "\n".join(part if isinstance(part, str) else part.markdown().rstrip("\n") for part in shown)
    block_of = {group: block for block, groups in blocks.items() for group in groups}
    lead = [Text("", "block", block_of.__getitem__), RUN, *_columns(paper, block_of)]
    return Tables(shown, {"table.md": f"{text}\n", "table.csv": summary_csv([*block_of], lead)})


def _columns(paper: Reproduction, block_of: Mapping[RunGroup, str]) -> tuple[Text, Text, Text]:
    """Return the columns of the published accuracy, of its ±, and of our difference."""

    def published(group: RunGroup) -> list[str]:
        return [f"{value:.2f}" for value in paper.published_cell(block_of[group], group.label)]

    def gap(form: str, missing: str) -> Callable[[RunGroup], str]:
        def cell(group: RunGroup) -> str:
            points = paper.difference(block_of[group], group)
            return missing if points is None else format(points, form)

        return cell

    def both(group: RunGroup) -> str:
        return " ± ".join(published(group)) or "-"

    return (
        Text("paper", "published", both, lambda group: "".join(published(group)[:1])),
        Text("±", "published_spread", lambda group: "".join(published(group)[1:])),
        Text("difference", "difference", gap("+.2f", "-"), gap(".4f", "")),
    )


def _sheet(
    paper: Reproduction, block: str, groups: Sequence[RunGroup], planned: Sequence[PlannedRun]
) -> Sheet:
    def ours(title: str, accuracy: Figures, over_clients: Figures) -> Column:
        """Return the column whose ± is over clients if the paper's is, else over seeds."""

        def cell(group: RunGroup) -> str:
            means = [
                f"{fmean(column.values(group)):.2f}" for column in (accuracy, over_clients) if group.scores
            ]
            return " ± ".join(means) or "-"

        if paper.spread == "clients":
            return Text(title, accuracy.key, cell)
        return replace(accuracy, title=title, note="")

    published, _, difference = _columns(paper, dict.fromkeys(groups, block))
    columns: list[Column] = [
        published,
        ours("ours, best round", BEST, BEST_STD),
        ours("ours, last round", LAST, STD),
        difference,
        *BY_PREDICTOR,
        *own_predictors(groups),
        ROUNDS,
        SEEDS,
        SECONDS,
    ]
    repeated = paper.spread == "clients" and any(
        len(column.values(group)) > 1 for column in BY_PREDICTOR for group in groups
    )
    over_seeds = ", ± over seeds" if repeated else ""
    notes = [
        *([f"Columns named after predictors are last-round accuracies{over_seeds}."] if groups else []),
        *unfinished_lines(planned, groups),
        *filter(None, [paper.blocks[block].remark]),
    ]
    lead = [
        RUN,
        Text("compared by", "predictor", lambda group: group.first.predictor),
        *moment_column(groups),
    ]
    return summary_sheet(f"{paper.title}, {block}", groups, lead, columns, notes)
