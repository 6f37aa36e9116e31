"""Lists of available methods, models, weights, datasets, presets, comparisons, reproductions and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from pbfl_flwr.config import GROUPS, Group
from pbfl_flwr.data import DATASETS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.console import print_hanging, say
from pbfl_flwr.experiments.plan import comparison, reproduction
from pbfl_flwr.experiments.plan.configuration import presets
from pbfl_flwr.methods import METHODS, SECTIONS
from pbfl_flwr.models.registry import ARCHITECTURES, CLASSIFIER, FAMILIES
from pbfl_flwr.util.paths import home, stored_weights

Rows = list[tuple[str, str]]
TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
SYMBOLS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _rules() -> Rows:
    from pbfl_flwr.prototypes.rules import RULES  # loads torch

    own = ("my_package.module:rule", "a rule of your own: a function of the rows of a class, or a Rule")
    return [*((name, rule.summary) for name, rule in RULES.items()), own]


ROWS: dict[str, Callable[[], Rows]] = {  # topic -> names with descriptions
    "methods": lambda: [(name, entry.summary) for name, entry in METHODS.items()],
    "rules": _rules,
    "models": lambda: [
        *((name, f"family, by client id: {', '.join(members)}") for name, members in FAMILIES.items()),
        *((name, entry.summary) for name, entry in ARCHITECTURES.items()),
        (
            CLASSIFIER.example,
            "example of a classifier with hidden layers; their widths can be appended to any model.",
        ),
    ],
    "weights": lambda: [(name, str(file)) for name, file in stored_weights().items()],
    "datasets": lambda: [
        *((name, dataset.description) for name, dataset in DATASETS.items()),
        ("my_package.module:load", "arrays of your own: a function of the settings that returns x and y"),
    ],
    "presets": lambda: [(name, "") for name in presets()],
    "comparisons": lambda: [(name, comparison.read(name)[0]) for name in comparison.comparisons()],
    "reproductions": lambda: [
        (name, f"{paper.title}: {', '.join(paper.blocks)}")
        for name, paper in ((name, reproduction.read(name)) for name in reproduction.reproductions())
    ],
}


@dataclass(frozen=True)
class Key:
    """A key of the run configuration: default, meaning, allowed values."""

    name: str
    default: str
    meaning: str
    allowed: str


def keys(word: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """Yield (name, title, keys) of the groups of the configuration, then of the methods with keys of their own.

    The methods come last because their import takes seconds.

    Args:
        word: a group, a method, or text in a key's name, meaning or allowed values; empty means all keys.

    Raises:
        PbflError: if no key matches.
    """
    known = [*GROUPS, *SECTIONS]
    matched = False
    for name in [word] if word in known else known:
        title, every = _group(name)
        matching = [
            key
            for key in every
            if word == name or word.lower() in f"{key.name} {key.meaning} {key.allowed}".lower()
        ]
        if matching:
            matched = True
            yield name, title, matching
    if not matched:
        raise PbflError(f"'{word}': in no key's name or description; the groups are {', '.join(GROUPS)}")


def show_keys(word: str, console: Console) -> None:
    """Print :func:`keys` as they are found: key and default on a line, below it meaning and allowed values.

    Raises:
        PbflError: as :func:`keys`.
    """
    for number, (name, title, matching) in enumerate(keys(word)):
        if number:
            say(console, "")
        print_hanging(console, f"{name}: ", title, 2 + len(name))
        for key in matching:
            say(console, f"  {key.name} = {key.default}", "bold")
            print_hanging(console, "", f"{key.meaning} [{key.allowed}]".lstrip(), 6)


def show_rows(topic: str, word: str, console: Console) -> None:
    """Print names and descriptions of a topic of ``ROWS``, of the names that contain the word.

    Raises:
        PbflError: if no name contains it.
    """
    every = ROWS[topic]()
    if topic == "weights" and not every:
        text = (
            f"no pretrained weights in {home() / 'weights'}; store some with 'pbfl weights LABEL MODEL FILE'"
        )
        print_hanging(console, "", text, 0)
        return
    matching = [(name, description) for name, description in every if word in name]
    if not matching:
        raise PbflError(
            f"'{word}': not found in {topic}; must be one of {', '.join(name for name, _ in every)}"
        )
    indent = max(len(name) for name, _ in matching) + 2
    for name, description in matching:
        print_hanging(console, name, description, indent)


def _group(name: str) -> tuple[str, list[Key]]:
    """Return the title and the keys of a configuration group, or of a method with keys of its own."""
    if name in GROUPS:
        title = (GROUPS[name].__doc__ or "").strip().partition("\n")[0].replace("``", "")
        return title, list(_keys(GROUPS[name], ""))
    return METHODS[name].summary, list(_keys(SECTIONS[name], f"{name}."))


def _keys(group: type[Group], prefix: str) -> Iterator[Key]:
    for name, key in group.model_json_schema()["properties"].items():
        default = str(key["default"]).lower() if isinstance(key["default"], bool) else str(key["default"])
        yield Key(prefix + name, default or '""', key.get("description", ""), ", ".join(_allowed(key)))


def _allowed(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the allowed values of a key by its JSON schema: its choices, or its type and range."""
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        yield from map(str, choices)
    elif "anyOf" in schema:
        for alternative in schema["anyOf"]:
            yield from _allowed(alternative)
    else:
        bounds = " and ".join(
            f"{symbol} {schema[name]}" for name, symbol in SYMBOLS.items() if name in schema
        )
        yield f"{TYPES[schema['type']]} {bounds}".rstrip()
