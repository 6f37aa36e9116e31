"""What there is to choose from: methods, models, datasets, presets and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pbfl_flwr.architectures import ARCHITECTURES, FAMILIES
from pbfl_flwr.config import GROUPS, Group
from pbfl_flwr.data import DATASETS
from pbfl_flwr.experiments import reproduce
from pbfl_flwr.experiments.compare import comparisons, read
from pbfl_flwr.experiments.configuration import presets
from pbfl_flwr.methods import METHODS, SECTIONS

Rows = list[tuple[str, ...]]
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
SYMBOLS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def methods() -> Rows:
    """Return (name, summary)."""
    return [(name, entry.summary) for name, entry in METHODS.items()]


def models() -> Rows:
    """Return (name, description): families first."""
    families = [(name, f"family, by client id: {', '.join(members)}") for name, members in FAMILIES.items()]
    return [*families, *ARCHITECTURES.items()]


def datasets() -> Rows:
    """Return (name, description)."""
    return [(name, dataset.description) for name, dataset in DATASETS.items()]


def shipped() -> Rows:
    """Return (name,) of the presets."""
    return [(name,) for name in presets()]


def side_by_side() -> Rows:
    """Return (name, title) of the comparisons."""
    return [(name, read(name)[0]) for name in comparisons()]


def published_tables() -> Rows:
    """Return (name, title, blocks) of the reproductions."""
    found = [(name, reproduce.read(name)) for name in reproduce.reproductions()]
    return [(name, paper.title, ", ".join(paper.blocks)) for name, paper in found]


def keys() -> Rows:
    """Return (key, default, what it means and what is allowed) of every key of the run configuration."""
    rows: Rows = []
    for group in GROUPS.values():
        rows.extend(_keys(group, ""))
    for name, section in SECTIONS.items():
        rows.extend(_keys(section, f"{name}."))
    return rows


def allowed(field: FieldInfo) -> str:
    """Return what a key takes: its choices, or its type and range."""
    return ", ".join(_alternatives(field.annotation, field.metadata))


def _keys(group: type[Group], prefix: str) -> Iterator[tuple[str, ...]]:
    for key, field in zip(group.key_names(), group.model_fields.values(), strict=True):
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        yield (
            prefix + key,
            default or '""',
            "\n".join(filter(None, [field.description, f"  {allowed(field)}"])),
        )


def _alternatives(annotation: Any, constraints: Iterable[Any]) -> list[str]:
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        inner = [
            item for extra in extras for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])
        ]
        return _alternatives(base, [*constraints, *inner])
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if parts := get_args(annotation):
        return [name for part in parts for name in _alternatives(part, constraints)]
    bounds = " and ".join(_bounds(constraints))
    return [f"{TYPES[annotation]} {bounds}".rstrip()]


def _bounds(constraints: Iterable[Any]) -> Iterator[str]:
    for constraint in constraints:
        for name, symbol in SYMBOLS.items():
            if (limit := getattr(constraint, name, None)) is not None:
                yield f"{symbol} {limit}"


ROWS: dict[str, Callable[[], Rows]] = {
    "methods": methods,
    "models": models,
    "datasets": datasets,
    "presets": shipped,
    "comparisons": side_by_side,
    "reproductions": published_tables,
    "keys": keys,
}
