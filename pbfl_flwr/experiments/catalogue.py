"""What there is to choose from: methods, models, datasets, presets and keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.console import Console

from pbfl_flwr.architectures import ARCHITECTURES, CLASSIFIER, FAMILIES
from pbfl_flwr.config import GROUPS, Group
from pbfl_flwr.data import DATASETS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.comparing import reproduce
from pbfl_flwr.experiments.comparing.compare import comparisons, read
from pbfl_flwr.experiments.running.configuration import presets
from pbfl_flwr.experiments.text.numbers import hang, say
from pbfl_flwr.experiments.text.table_formats import Sheet
from pbfl_flwr.methods import METHODS, SECTIONS
from pbfl_flwr.places import home, kept_weights

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
        "example of a classifier with hidden layers, whose widths may follow any model.",
    )
    return [*families, *ARCHITECTURES.items(), deeper]


def weights() -> Rows:
    """Return (model with its label, file) of the pretrained weights that are kept here."""
    return [(name, str(file)) for name, file in kept_weights().items()]


def datasets() -> Rows:
    """Return (name, description)."""
    return [(name, dataset.description) for name, dataset in DATASETS.items()]


def shipped() -> Rows:
    """Return (name, "") of the presets."""
    return [(name, "") for name in presets()]


def side_by_side() -> Rows:
    """Return (name, title) of the comparisons."""
    return [(name, read(name)[0]) for name in comparisons()]


def published_tables() -> Rows:
    """Return (name, title and blocks) of the reproductions."""
    found = [(name, reproduce.read(name)) for name in reproduce.reproductions()]
    return [(name, f"{paper.title}: {', '.join(paper.blocks)}") for name, paper in found]


@dataclass(frozen=True)
class Key:
    """A key of the run configuration: its default, what it means, what is allowed."""

    name: str
    default: str
    meaning: str
    allowed: str


@dataclass(frozen=True)
class Keys:
    """Keys that belong together.

    Attributes:
        name: of a group of the configuration, or of a method with keys of its own.
        title: what they are about.
        keys: in their order.
        by_name: whether they were found by their names, not by what is said of them.
    """

    name: str
    title: str
    keys: tuple[Key, ...]
    by_name: bool = True


def keys(word: str = "") -> Iterator[Keys]:
    """Yield the keys of the run configuration, group by group; those of methods last, whose pages take seconds.

    Args:
        word: a group, a method, or what the names of the keys shall contain; nothing is everything. Keys with a name
            of which this is a part come first; behind them, as topics of their own, those that are explained with it.

    Raises:
        PbflError: if there is no such key.
    """
    known = [*GROUPS, *SECTIONS]
    seen: list[str] = []
    explained: list[Keys] = []
    begins = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)  # "early" is no part of "nearly"
    for name in [word] if word in known else known:
        every = _group(name)
        if found := tuple(key for key in every.keys if word in key.name or word == name):
            yield replace(every, keys=found)
        others = tuple(
            key for key in every.keys if key not in found and begins.search(f"{key.meaning} {key.allowed}")
        )
        if others:
            explained.append(replace(every, keys=others, by_name=False))
        seen += [key.name for key in every.keys]
    yield from explained
    if word not in known and not explained and not any(word in name for name in seen):
        close = difflib.get_close_matches(word, [*seen, *known], n=1)
        hint = f"did you mean '{close[0]}'? The groups" if close else "the groups"
        raise PbflError(
            f"'{word}': no key, group or method has it in its name, and no key is explained with it; {hint} are "
            f"{', '.join(GROUPS)}"
        )


def show_keys(word: str, console: Console) -> None:
    """Print the keys as they are found: key and default on a line, below it the meaning and what is allowed.

    Args:
        word: as in :func:`keys`.
        console: where.

    Raises:
        PbflError: as :func:`keys`.
    """
    named = True
    for number, topic in enumerate(keys(word)):
        if number:
            say(console, "")
        if named and not topic.by_name:
            say(console, f"'{word}' in what is said of other keys:", "dim")
            say(console, "")
        named = topic.by_name
        hang(console, f"{topic.name}: ", topic.title, 2 + len(topic.name))
        for key in topic.keys:
            say(console, f"  {key.name} = {key.default}", "bold")
            hang(console, "", f"{key.meaning} [{key.allowed}]".lstrip(), 6)


def keys_page() -> str:
    """Return all keys as a Markdown page, what docs/keys.md holds."""
    lines = [
        "# All keys",
        "",
        "Every key of the run configuration, as `pbfl list keys --markdown` prints them; `--set KEY=VALUE`, a preset",
        "and `flwr run --run-config` take them alike. `auto` follows the method, the protocol or the data.",
    ]
    for topic in keys():
        rows = tuple((f"`{key.name}`", f"`{key.default}`", _whole(key)) for key in topic.keys)
        table = Sheet(
            "", ("key", "default", "what it says [what is allowed]"), rows, text_columns=3
        ).markdown()
        lines += ["", f"## {topic.name}", "", topic.title, "", *table.splitlines()[2:]]
    return "\n".join(lines) + "\n"


def _whole(key: Key) -> str:
    """Return a key's meaning and what it takes, as Markdown that no part of is taken for a tag or for emphasis."""
    said = f"{key.meaning} [{key.allowed}]".lstrip()
    return said.replace("<", "&lt;").replace("*", "\\*")


def show_rows(topic: str, word: str, console: Console) -> None:
    """Print names and what they are.

    Args:
        topic: one of ``ROWS``.
        word: what the names shall contain; nothing is everything.
        console: where.

    Raises:
        PbflError: if no name does.
    """
    every = ROWS[topic]()
    if topic == "weights" and not every:
        said = f"no pretrained weights in {home() / 'weights'}; 'pbfl weights LABEL MODEL FILE' keeps some"
        hang(console, "", said, 0)
        return
    found = [(name, said) for name, said in every if word in name]
    if not found:
        raise PbflError(
            f"'{word}': none of the {topic} contains it; they are {', '.join(name for name, _ in every)}"
        )
    indent = max(len(name) for name, _ in found) + 2
    for name, said in found:
        hang(console, name, said, indent)


def allowed(field: FieldInfo) -> str:
    """Return what a key takes: its choices, or its type and range."""
    return ", ".join(_alternatives(field.annotation, field.metadata))


def _group(name: str) -> Keys:
    if name in GROUPS:
        title = (GROUPS[name].__doc__ or "").strip().partition("\n")[0].replace("``", "")
        return Keys(name, title, tuple(_keys(GROUPS[name], "")))
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
    "presets": shipped,
    "comparisons": side_by_side,
    "reproductions": published_tables,
}
