"""What there is to choose from: methods, models, datasets, presets and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pbfl_flwr.config import GROUPS, Group
from pbfl_flwr.data import DATASETS
from pbfl_flwr.experiments.configuration import presets
from pbfl_flwr.methods import METHODS, SECTIONS
from pbfl_flwr.models import FAMILIES, MODELS, description

Rows = list[tuple[str, ...]]
SYMBOLS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def methods() -> Rows:
    """Return (name, summary)."""
    return [(name, entry.summary) for name, entry in METHODS.items()]


def models() -> Rows:
    """Return (name, description): families first."""
    families = [(name, f"family, by client id: {', '.join(members)}") for name, members in FAMILIES.items()]
    return [*families, *((name, description(name)) for name in MODELS)]


def datasets() -> Rows:
    """Return (name, description)."""
    return [(name, dataset.description) for name, dataset in DATASETS.items()]


def shipped() -> Rows:
    """Return (name,) of the presets."""
    return [(name,) for name in presets()]


def keys() -> Rows:
    """Return (key, default, what is allowed and what it means) of every key of the run configuration."""
    rows: Rows = []
    for group in GROUPS.values():
        rows.extend(_keys(group, ""))
    for name, section in SECTIONS.items():
        rows.extend(_keys(section, f"{name}."))
    return rows


def allowed(field: FieldInfo) -> str:
    """Return what a key takes: its choices, or its type and range."""
    bounds = [f"{SYMBOLS[name]} {limit}" for name, limit in _bounds(field)]
    return ", ".join(_alternatives(field.annotation)) + (f" {' and '.join(bounds)}" if bounds else "")


def _keys(group: type[Group], prefix: str) -> Iterator[tuple[str, ...]]:
    for key, field in zip(group.key_names(), group.model_fields.values(), strict=True):
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        meaning = f"{allowed(field)}: {field.description}" if field.description else allowed(field)
        yield prefix + key, default or '""', meaning


def _bounds(field: FieldInfo) -> Iterator[tuple[str, Any]]:
    for constraint in field.metadata:
        for name in SYMBOLS:
            if (limit := getattr(constraint, name, None)) is not None:
                yield name, limit


def _alternatives(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if parts := get_args(annotation):
        return [name for part in parts for name in _alternatives(part)]
    return [
        {"int": "whole number", "float": "number", "str": "text", "bool": "true, false"}[annotation.__name__]
    ]


ROWS: dict[str, Callable[[], Rows]] = {
    "methods": methods,
    "models": models,
    "datasets": datasets,
    "presets": shipped,
    "keys": keys,
}
