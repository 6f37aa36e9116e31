"""Lists of available methods, models, weights, datasets, presets, comparisons, reproductions and keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.console import Console

from pbfl_flwr.config import GROUPS, Group
from pbfl_flwr.data import DATASETS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.console import print_hanging, say
from pbfl_flwr.experiments.plan import reproduction as reproduce
from pbfl_flwr.experiments.plan.comparison import comparisons, read
from pbfl_flwr.experiments.plan.configuration import presets
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.methods import METHODS, SECTIONS
from pbfl_flwr.models.registry import ARCHITECTURES, CLASSIFIER, FAMILIES
from pbfl_flwr.util.paths import home, stored_weights

Rows = list[tuple[str, str]]
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
SYMBOLS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def methods() -> Rows:
    """Return (name, summary)."""
    return [(name, entry.summary) for name, entry in METHODS.items()]


def models() -> Rows:
    """Return (name, description): families first."""
    families = [(name, f"family, by client id: {', '.join(members)}") for name, members in FAMILIES.items()]
    deeper = (
        CLASSIFIER.example,
        "example of a classifier with hidden layers; their widths can be appended to any model.",
    )
    return [*families, *((name, entry.summary) for name, entry in ARCHITECTURES.items()), deeper]


def weights() -> Rows:
    """Return (model with its label, file) of the pretrained weights stored on this machine."""
    return [(name, str(file)) for name, file in stored_weights().items()]


def datasets() -> Rows:
    """Return (name, description)."""
    return [(name, dataset.description) for name, dataset in DATASETS.items()]


def preset_rows() -> Rows:
    """Return (name, "") of the presets."""
    return [(name, "") for name in presets()]


def comparison_rows() -> Rows:
    """Return (name, title) of the comparisons."""
    return [(name, read(name)[0]) for name in comparisons()]


def reproduction_rows() -> Rows:
    """Return (name, title and blocks) of the reproductions."""
    papers = [(name, reproduce.read(name)) for name in reproduce.reproductions()]
    return [(name, f"{paper.title}: {', '.join(paper.blocks)}") for name, paper in papers]


@dataclass(frozen=True)
class Key:
    """A key of the run configuration: default, meaning, allowed values."""

    name: str
    default: str
    meaning: str
    allowed: str


@dataclass(frozen=True)
class Keys:
    """The keys of a group or method.

    Attributes:
        name: of a configuration group, or of a method with keys of its own.
        title: topic of the keys.
        keys: in definition order.
        by_name: whether they matched a search by name, not by description.
    """

    name: str
    title: str
    keys: tuple[Key, ...]
    by_name: bool = True


def keys(word: str = "") -> Iterator[Keys]:
    """Yield the keys of the run configuration by group, those of methods last because their import takes seconds.

    Args:
        word: a group, a method, or text to search; empty means all keys. Keys whose name contains it come first; then,
            as separate topics, keys whose description or allowed values have a word that starts with it.

    Raises:
        PbflError: if no key matches.
    """
    known = [*GROUPS, *SECTIONS]
    seen: list[str] = []
    explained: list[Keys] = []
    begins = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)  # "early" must not match "nearly"
    for name in [word] if word in known else known:
        every = _group(name)
        if matching := tuple(key for key in every.keys if word in key.name or word == name):
            yield replace(every, keys=matching)
        others = tuple(
            key for key in every.keys if key not in matching and begins.search(f"{key.meaning} {key.allowed}")
        )
        if others:
            explained.append(replace(every, keys=others, by_name=False))
        seen += [key.name for key in every.keys]
    yield from explained
    if word not in known and not explained and not any(word in name for name in seen):
        close = difflib.get_close_matches(word, [*seen, *known], n=1)
        hint = f"did you mean '{close[0]}'? The groups" if close else "the groups"
        raise PbflError(
            f"'{word}': not found in names of keys, groups and methods, nor in descriptions of keys; {hint} are "
            f"{', '.join(GROUPS)}"
        )


def show_keys(word: str, console: Console) -> None:
    """Print the keys as they are found: key and default on a line, below it meaning and allowed values.

    Args:
        word: as in :func:`keys`.
        console: to print to.

    Raises:
        PbflError: as :func:`keys`.
    """
    named = True
    for number, topic in enumerate(keys(word)):
        if number:
            say(console, "")
        if named and not topic.by_name:
            say(console, f"'{word}' in the descriptions of other keys:", "dim")
            say(console, "")
        named = topic.by_name
        print_hanging(console, f"{topic.name}: ", topic.title, 2 + len(topic.name))
        for key in topic.keys:
            say(console, f"  {key.name} = {key.default}", "bold")
            print_hanging(console, "", f"{key.meaning} [{key.allowed}]".lstrip(), 6)


def keys_page() -> str:
    """Return all keys as a Markdown page, the content of docs/keys.md."""
    lines = [
        "# All keys",
        "",
        "Every key of the run configuration, as printed by `pbfl list keys --markdown`. Keys can be set with",
        "`--set KEY=VALUE`, in a preset and with `flwr run --run-config`. `auto` follows the method, the protocol or",
        "the data.",
    ]
    for topic in keys():
        rows = tuple((f"`{key.name}`", f"`{key.default}`", _description_cell(key)) for key in topic.keys)
        table = Sheet("", ("key", "default", "meaning [allowed values]"), rows, text_columns=3).markdown()
        lines += ["", f"## {topic.name}", "", topic.title, "", *table.splitlines()[2:]]
    return "\n".join(lines) + "\n"


def _description_cell(key: Key) -> str:
    """Return a key's meaning and allowed values as Markdown, with "<" and "*" escaped."""
    text = f"{key.meaning} [{key.allowed}]".lstrip()
    return text.replace("<", "&lt;").replace("*", "\\*")


def show_rows(topic: str, word: str, console: Console) -> None:
    """Print names and descriptions.

    Args:
        topic: one of ``ROWS``.
        word: text that the names must contain; empty means all.
        console: to print to.

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


def allowed(field: FieldInfo) -> str:
    """Return the allowed values of a key: its choices, or its type and range."""
    return ", ".join(_alternatives(field.annotation, field.metadata))


def _group(name: str) -> Keys:
    if name in GROUPS:
        title = (GROUPS[name].__doc__ or "").strip().partition("\n")[0].replace("``", "")
        return Keys(name, title, tuple(_keys(GROUPS[name], GROUPS[name].prefix)))
    return Keys(name, METHODS[name].summary, tuple(_keys(SECTIONS[name], f"{name}.")))


def _keys(group: type[Group], prefix: str) -> Iterator[Key]:
    for key, field in zip(group.key_names(), group.model_fields.values(), strict=True):
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        yield Key(prefix + key, default or '""', field.description or "", allowed(field))


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
    "weights": weights,
    "datasets": datasets,
    "presets": preset_rows,
    "comparisons": comparison_rows,
    "reproductions": reproduction_rows,
}
