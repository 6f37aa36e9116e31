"""Grid sweeps: one run per combination of values, and one table with a column per swept key.

Values are separated by commas, ``cps-dim=25,50``. A value that contains a comma is quoted,
``models="cnn4,resnet8"``, and several of those are a TOML list, ``models=["cnn4,resnet8", "cnn4"]``. ``seed`` can be
swept too, but its runs are repetitions: they share a row, with mean and standard deviation.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pbfl_flwr.config import CHANGEABLE, Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.plan.comparison import Planned, duplicates, finished, plan
from pbfl_flwr.experiments.results import Group
from pbfl_flwr.experiments.summary import Text, comparison_sheet
from pbfl_flwr.experiments.tables import Sheet

Values = dict[str, list[Scalar]]


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep.

    Attributes:
        swept: keys with several values, without ``seed``.
        runs: label -> keys, one label per combination.
        values: label -> values of the swept keys, in the order of ``swept``.
        seeds: one run per label and seed.
        fixed: the other assigned keys, each with its single value.
    """

    swept: list[str]
    runs: dict[str, dict[str, Scalar]]
    values: dict[str, tuple[Scalar, ...]]
    seeds: list[int]
    fixed: dict[str, Scalar]


def read(preset: str | None, assignments: Iterable[str]) -> Sweep:
    """Return every combination of the values.

    Args:
        preset: as ``pbfl run`` takes it; may be None.
        assignments: ``key=value`` or ``key=list``, see the module.

    Raises:
        PbflError: if the preset has an invalid value, an assignment is malformed or repeats a value, a seed is not a
            whole number from 0, or no key has several values.
    """
    requested = configuration.gather(preset, [])
    if requested.problems:
        raise PbflError("\n".join(requested.problems))
    base = requested.values
    requested_values: Values = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise PbflError(f"--set {assignment}: must be key=value or key=value,value")
        requested_values[key.strip()] = listed(key.strip(), text.strip())
        if again := duplicates(requested_values[key.strip()]):
            raise PbflError(f"--set {assignment}: {again[0]} is given twice; give each value once")
    seeds = requested_values.pop("seed", [base.get("seed", 0)])
    if not all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds):
        raise PbflError(f"--set seed={','.join(map(str, seeds))}: must be whole numbers from 0")
    swept = [key for key, values in requested_values.items() if len(values) > 1]
    if not swept and len(seeds) < 2:
        raise PbflError(
            "--set: no key has several values; needed is at least one, e.g. --set cps-dim=25,50,100"
        )
    fixed = {key: values[0] for key, values in requested_values.items() if key not in swept}
    runs: dict[str, dict[str, Scalar]] = {}
    values_of = {}
    for values in itertools.product(*(requested_values[key] for key in swept)):
        label = _label(dict(zip(swept, values, strict=True)), runs)
        runs[label] = {**base, **fixed, **dict(zip(swept, values, strict=True))}
        values_of[label] = values
    return Sweep(swept, runs, values_of, [int(seed) for seed in seeds], fixed)


def listed(key: str, text: str) -> list[Scalar]:
    """Parse the right side of an assignment into a list of values.

    Raises:
        PbflError: if a value is not a number, boolean or text.
    """
    try:
        value: object = tomllib.loads(f"value = {text}").get("value")
    except tomllib.TOMLDecodeError:
        value = [configuration.value(part.strip()) for part in text.split(",")] if "," in text else text
    parsed = value if isinstance(value, list) else [value]
    values = [item for item in parsed if isinstance(item, bool | int | float | str)]
    if not values or len(values) < len(parsed):
        raise PbflError(f"--set {key}={text}: must be a value, or values separated by commas")
    return values


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


def plans(sweep: Sweep, out: Path) -> list[Planned]:
    """Return every run with its checked keys, before any of them starts.

    Raises:
        PbflError: one line for every bad key.
    """
    return plan(sweep.runs, [], sweep.seeds, [], out)


def value_columns(sweep: Sweep) -> list[Text]:
    """Return a column of each swept key, which name a row."""

    def cell(key: str) -> Callable[[Group], str]:
        position = sweep.swept.index(key)
        return lambda group: _text(sweep.values[group.label][position])

    return [Text(key, key, cell(key)) for key in sweep.swept]


def table(sweep: Sweep, groups: Sequence[Group], planned: Sequence[Planned], title: str) -> Sheet:
    """Return the table: a column per swept key, accuracies in %, ± over seeds if there are several.

    Args:
        sweep: the sweep.
        groups: the finished runs of each combination.
        planned: all runs, including those not finished.
        title: of the table.
    """
    sheet = comparison_sheet(title, groups, value_columns(sweep))
    missing = sum(not finished(run) for run in planned)
    notes = [f"{missing} of {len(planned)} runs are not finished."] if missing else []
    return replace(sheet, notes=(*notes, *sheet.notes))


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
