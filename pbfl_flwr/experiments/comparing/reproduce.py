"""A published table made again: its columns as blocks, its rows as runs, and what the paper prints of them.

A reproduction is a comparison (see :mod:`pbfl_flwr.experiments.comparing.compare`) with the paper's side of it. A run's
keys are those of ``common``, its block, the run, the run within the block, and at scale ``small`` those of ``small``;
later ones win.

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
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.data import check_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.comparing import compare
from pbfl_flwr.experiments.comparing.compare import Planned, named, plan, repeated
from pbfl_flwr.experiments.running import configuration

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


def _each_once(seeds: list[int]) -> list[int]:
    if again := repeated(seeds):
        raise ValueError(f"{again[0]} stands there twice; allowed is each seed once")
    return seeds


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
    names = named("--block", names, paper.blocks)
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
    """Return what the tables are of: planned runs, and finished ones that were not asked for this time.

    Args:
        planned: what :func:`plans` returned.
        paper: as there.
        scale: as there.
        assignments: as there.
        seeds: as there.
        out: as there.
    """
    taken = _seeds(paper, scale, seeds)
    found = {
        name: compare.with_finished(
            planned.get(name, []), _runs(paper, name, scale), assignments, taken, out / name
        )
        for name in paper.blocks
    }
    return {name: runs for name, runs in found.items() if runs}


def _seeds(paper: Reproduction, scale: Scale, seeds: Sequence[int]) -> Sequence[int]:
    return seeds or (paper.seeds if scale == "paper" else paper.seeds[:1])


def _runs(paper: Reproduction, block: str, scale: Scale) -> dict[str, Keys]:
    """Return label -> keys of a block at a scale."""
    changed = paper.small if scale == "small" else {}
    return {label: {**keys, **changed} for label, keys in paper.blocks[block].runs.items()}


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


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))
