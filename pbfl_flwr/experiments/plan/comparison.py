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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.notes import titled
from pbfl_flwr.experiments.pairs import EVERY_AGAINST_ONE, Asked, paired_sheet
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.plan.configuration import DirectoryName
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, finished_groups, unfinished_lines
from pbfl_flwr.experiments.results import Round
from pbfl_flwr.experiments.summary import comparison_sheet, table_files
from pbfl_flwr.experiments.tables import Tables

FOLDER = "experiments/comparisons"


class _File(BaseModel):
    """Schema of the TOML file."""

    model_config = ConfigDict(extra="forbid")

    title: str = ""
    common: dict[str, Any] = {}
    runs: dict[DirectoryName, dict[str, Any]] = {}
    runs_of: str = Field("", alias="runs-of")


def comparisons() -> list[str]:
    """Return the names of the comparisons that come with the package."""
    return configuration.shipped(FOLDER)


def read(name: str) -> tuple[str, dict[str, dict[str, Scalar]]]:
    """Return (title, label -> keys) of a TOML file, or of one of :func:`comparisons`.

    Raises:
        PbflError: if it does not exist or is not of the form above.
    """
    file = configuration.read_file("comparison", name, FOLDER, _File)
    if bool(file.runs) == bool(file.runs_of):
        raise PbflError(f"comparison '{name}': needed are either [runs.<label>] tables or runs-of")
    runs = file.runs
    if file.runs_of:
        runs = configuration.read_file("comparison", file.runs_of, FOLDER, _File).runs
        if not runs:
            raise PbflError(
                f"comparison '{name}': runs-of = '{file.runs_of}', which has no [runs.<label>] tables"
            )
    return file.title or name, {
        label: configuration.merged(file.common, keys) for label, keys in runs.items()
    }


def tables(
    title: str,
    planned: Sequence[PlannedRun],
    by: str = "",
    at: Round = "last",
    asked: Asked = EVERY_AGAINST_ONE,
) -> Tables:
    """Return the table of the finished runs, and that of the pairs asked for; ``by`` is a predictor."""
    groups = finished_groups(planned, by, at=at)
    sheets = (
        comparison_sheet(titled(title, by), groups),
        paired_sheet(groups, titled(f"{title}: pairs", by), asked),
    )
    missing = unfinished_lines(planned, groups)
    sheet, pairs = (replace(made, notes=(*missing, *made.notes)) for made in sheets)
    shown = [sheet, pairs] if len(groups) > 1 else [sheet]
    return Tables(shown, {**table_files(sheet, groups), **pairs.files("paired")})
