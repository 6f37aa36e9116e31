"""Reproductions of published tables: columns as blocks, rows as runs, with the published values.

A reproduction is a comparison (see :mod:`pbfl_flwr.experiments.plan.comparison`) with the paper's results. A run's
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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.data import check_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan import comparison, configuration
from pbfl_flwr.experiments.plan.comparison import Planned, check_names, duplicates, plan

FOLDER = "experiments/reproductions"
SILENT = {
    *configuration.PATHS,
    "download",
    "device",
    "threads",
    "eval-batch-size",
    "seed",
}  # keys that :func:`changes` does not report as changes of the setting
Scale = Literal["small", "paper"]
Keys = dict[str, Scalar]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Cell = Annotated[list[Percent], Field(max_length=2)]
"""[accuracy, ±], [accuracy], or [] for a "-" in the paper; in %."""


def _each_once(seeds: list[int]) -> list[int]:
    if again := duplicates(seeds):
        raise ValueError(f"{again[0]} is given twice; give each seed once")
    return seeds


class _File(BaseModel):
    """Schema of the TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    paper: str
    table: str
    hardware: str
    accuracy: Literal["weighted", "mean"]
    round: Literal["best", "last"]
    spread: Literal["clients", "seeds", "none"]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), AfterValidator(_each_once)]
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
        published: label -> published values, see :data:`Cell`.
        remark: note on these values; may be empty.
    """

    runs: Mapping[str, Keys]
    published: Mapping[str, list[float]]
    remark: str


@dataclass(frozen=True)
class Reproduction:
    """A published table.

    Attributes:
        title, paper, table, hardware, accuracy, round, spread, seeds, deviations: see the module.
        small: keys that override all others at scale "small".
        blocks: name -> block, in the table's order.
    """

    title: str
    paper: str
    table: str
    hardware: str
    accuracy: Literal["weighted", "mean"]
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
        PbflError: if it does not exist or is not of the form above.
    """
    content = configuration.read_toml("reproduction", name, FOLDER)
    try:
        file = _File.model_validate(content)
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
                f"reproduction '{name}': published.{label} has {len(row)} entries; needed are {len(file.blocks)}, "
                "one per block"
            )
    blocks = {
        block: _block(file, keys, name, block, number)
        for number, (block, keys) in enumerate(file.blocks.items())
    }
    fields = file.model_dump(exclude={"common", "small", "blocks", "runs", "published"})
    return Reproduction(**fields, small=configuration.flatten(file.small), blocks=blocks)


def _block(file: _File, keys: Mapping[str, Any], name: str, block: str, number: int) -> Block:
    own = {key: value for key, value in keys.items() if key not in ("remark", "runs")}
    within: Mapping[str, Any] = keys.get("runs", {})
    if unknown := set(within) - set(file.runs):
        raise PbflError(
            f"reproduction '{name}': blocks.{block}.runs.{min(unknown)}: unknown run; "
            f"must be one of {', '.join(file.runs)}"
        )
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
    """Return the names of the selected blocks; all if nothing is selected.

    Args:
        paper: the reproduction.
        dataset: select the blocks on this dataset; None means all.
        names: select these blocks; empty means all.

    Raises:
        PbflError: if a name or the dataset is unknown, or no block has both.
    """
    check_names("--block", names, paper.blocks)
    datasets = {name: str(next(iter(block.runs.values()))["dataset"]) for name, block in paper.blocks.items()}
    if dataset is not None and dataset not in datasets.values():
        raise PbflError(f"--dataset {dataset}: must be one of {', '.join(dict.fromkeys(datasets.values()))}")
    chosen = [
        name
        for name in paper.blocks
        if (not names or name in names) and (dataset is None or datasets[name] == dataset)
    ]
    if not chosen:
        raise PbflError(f"--dataset {dataset}: none of the blocks {', '.join(names)} uses it")
    return chosen


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
        scale: "paper" is the full setting, "small" takes minutes on a small machine.
        assignments: ``key=value`` for all runs.
        seeds: one run per row and seed; if empty, the paper's seeds, at "small" only the first of them.
        only: labels to run; empty means all.
        out: directory of the reproduction.

    Raises:
        PbflError: one line for every bad key, and for unknown labels.
    """
    taken = _seeds(paper, scale, seeds)
    return {name: plan(_runs(paper, name, scale), assignments, taken, only, out / name) for name in names}


def with_finished(
    planned: Mapping[str, Sequence[Planned]],
    paper: Reproduction,
    scale: Scale,
    assignments: Sequence[str],
    seeds: Sequence[int],
    out: Path,
) -> dict[str, list[Planned]]:
    """Return block -> runs of its table: planned runs, and finished runs that were not selected this time.

    Args:
        planned: result of :func:`plans`.
        paper: as for :func:`plans`.
        scale: as for :func:`plans`.
        assignments: as for :func:`plans`.
        seeds: as for :func:`plans`.
        out: as for :func:`plans`.
    """
    taken = _seeds(paper, scale, seeds)
    by_block = {
        name: comparison.with_finished(
            planned.get(name, []), _runs(paper, name, scale), assignments, taken, out / name
        )
        for name in paper.blocks
    }
    return {name: runs for name, runs in by_block.items() if runs}


def _seeds(paper: Reproduction, scale: Scale, seeds: Sequence[int]) -> Sequence[int]:
    return seeds or (paper.seeds if scale == "paper" else paper.seeds[:1])


def _runs(paper: Reproduction, block: str, scale: Scale) -> dict[str, Keys]:
    """Return label -> keys of a block at a scale."""
    changed = paper.small if scale == "small" else {}
    return {label: {**keys, **changed} for label, keys in paper.blocks[block].runs.items()}


def absent(planned: Mapping[str, Sequence[Planned]]) -> dict[str, str]:
    """Return block -> why it cannot be run here, e.g. which data files are missing and where.

    The data of each block is decoded and partitioned once for this check.
    """
    refusals = {}
    for name, runs in planned.items():
        settings = configuration.check(runs[0].requested)
        try:
            check_data(settings.data, settings.run.num_clients)
        except PbflError as error:
            refusals[name] = str(error)
    return refusals


def changes(paper: Reproduction, planned: Mapping[str, Sequence[Planned]]) -> list[str]:
    """Return how keys and seeds of the planned runs differ from the paper's scale, one line per key and value."""
    differences: dict[str, dict[Scalar, set[Scalar]]] = {}
    defaults = Settings().as_dict()
    for name, runs in planned.items():
        for run in runs:
            full = {**defaults, **paper.blocks[name].runs[run.label]}
            for key, value in run.requested.values.items():
                if key not in SILENT and value != full.get(key):
                    differences.setdefault(key, {}).setdefault(value, set()).add(full.get(key, "none"))
    lines = [
        f"{key} = {value}, the full setting has {', '.join(sorted(str(item) for item in instead))}"
        for key, values in differences.items()
        for value, instead in values.items()
    ]
    seeds = sorted({run.seed for runs in planned.values() for run in runs})
    if seeds != sorted(paper.seeds):
        lines.append(f"seeds {_listed(seeds)}, the full setting has {_listed(paper.seeds)}")
    return lines


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))
