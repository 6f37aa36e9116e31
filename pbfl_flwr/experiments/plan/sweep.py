"""Grid sweeps: one run per combination of values, and one table with a column per swept key.

Values are separated by commas, ``cps-dim=25,50``. A value that contains a comma is quoted,
``models="cnn4,resnet8"``, and several of those are a TOML list, ``models=["cnn4,resnet8", "cnn4"]``. ``seed`` can be
swept too, but its runs are repetitions: they share a row, with mean and standard deviation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from pbfl_flwr.config import CHANGEABLE, Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.notes import titled
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, finished_groups
from pbfl_flwr.experiments.results import RunGroup
from pbfl_flwr.experiments.summary import VALIDATION, Text, comparison_sheet, table_files
from pbfl_flwr.experiments.tables import Tables


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep.

    Attributes:
        swept: keys with several values, without ``seed``.
        runs: label -> keys, one label per combination.
        seeds: one run per label and seed.
        fixed: the other assigned keys, each with its single value.
    """

    swept: list[str]
    runs: dict[str, dict[str, Scalar]]
    seeds: list[Scalar]
    fixed: dict[str, Scalar]

    @property
    def warning(self) -> str:
        """A line if not every row has validation data, by which to choose one; empty if there is no choice."""
        if len(self.runs) == 1 or all(keys.get("validation-share") for keys in self.runs.values()):
            return ""
        return "validation-share = 0: a row chosen by these accuracies is chosen on test data; set e.g. 0.2"


def read(preset: str | None, assignments: Iterable[str]) -> Sweep:
    """Return every combination of the values.

    Args:
        preset: as ``pbfl run`` takes it; may be None.
        assignments: ``key=value`` or ``key=list``, see the module; a repeated value counts once.

    Raises:
        PbflError: if the preset has an invalid value, an assignment is malformed, or no key has several values.
    """
    requested = configuration.gather(preset, [])
    if requested.problems:
        raise PbflError("\n".join(requested.problems))
    lists: dict[str, list[Scalar]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise PbflError(f"--set {assignment}: must be key=value or key=value,value")
        lists[key.strip()] = listed(key.strip(), text.strip())
    base = requested.values
    seeds = lists.pop("seed", [base.get("seed", 0)])
    swept = [key for key, values in lists.items() if len(values) > 1]
    if not swept and len(seeds) < 2:
        raise PbflError(
            "--set: no key has several values; needed is at least one, e.g. --set cps-dim=25,50,100"
        )
    fixed = {key: values[0] for key, values in lists.items() if key not in swept}
    runs: dict[str, dict[str, Scalar]] = {}
    for values in itertools.product(*(lists[key] for key in swept)):
        combination = dict(zip(swept, values, strict=True))
        runs[_label(combination, runs)] = {**base, **fixed, **combination}
    return Sweep(swept, runs, seeds, fixed)


def listed(key: str, text: str) -> list[Scalar]:
    """Parse the right side of an assignment into a list of different values.

    Raises:
        PbflError: if a value is not a number, boolean or text.
    """
    value = configuration.value(key, text)
    if value == text and "," in text:  # it is not TOML
        value = [configuration.value(key, part.strip()) for part in text.split(",")]
    parsed = value if isinstance(value, list) else [value]
    values = [item for item in parsed if isinstance(item, bool | int | float | str)]
    if not values or len(values) < len(parsed):
        raise PbflError(f"--set {key}={text}: must be a value, or values separated by commas")
    return list(dict.fromkeys(values))


def _label(values: Mapping[str, Scalar], taken: Iterable[str]) -> str:
    """Return a label that is unique and valid as a directory name."""
    label = _words(values) or "all"
    while label in taken:
        label += "_"
    return label


def _words(values: Mapping[str, Scalar]) -> str:
    return re.sub(r"[^A-Za-z0-9.=+,-]", "_", ",".join(f"{key}={_text(v)}" for key, v in values.items()))[:150]


def directory(preset: str | None, sweep: Sweep) -> Path:
    """Return the default directory of a sweep: the same for the same sweep, also with other CHANGEABLE keys."""
    fixed = _words({key: sweep.fixed[key] for key in sorted(sweep.fixed) if key not in CHANGEABLE})
    names = ["sweep", *([Path(preset).stem] if preset else []), *(sweep.swept or ["seed"])]
    return Path("runs") / "-".join([*names, *([fixed] if fixed else [])])


def tables(sweep: Sweep, planned: Sequence[PlannedRun], by: str = "") -> Tables:
    """Return the table: a column per swept key, accuracies in %, ± over seeds if there are several."""

    def column(key: str) -> Text:
        return Text(key, key, lambda group: _text(sweep.runs[group.label][key]))

    groups, lead = finished_groups(planned, by), [column(key) for key in sweep.swept]
    title = titled(f"Sweep over {', '.join(sweep.swept) or 'seeds'}", by)
    sheet = comparison_sheet(title, groups, lead)
    choice = sweep.warning or _best(groups, lead)
    sheet = replace(sheet, notes=(*([choice] if choice else []), *sheet.notes))
    if missing := len(planned) - sum(len(group.runs) for group in groups):
        note = f"{missing} of {len(planned)} runs are not finished."
        sheet = replace(sheet, notes=(note, *sheet.notes))
    return Tables([sheet], table_files(sheet, groups, lead))


def _best(groups: Sequence[RunGroup], lead: Sequence[Text]) -> str:
    """Return the line that names the best rows by their mean accuracy on validation data."""
    means = {group.label: fmean(values) for group in groups if (values := VALIDATION.values(group))}
    if len(means) < 2:
        return ""
    best = [group for group in groups if means.get(group.label) == max(means.values())]
    rows = (", ".join(f"{column.title} = {column.cell(group)}" for column in lead) for group in best)
    return f"Best on validation data: {'; '.join(rows)} ({max(means.values()):.2f} %)."


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
