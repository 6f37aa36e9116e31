"""Groups of settings, and text values that hold more than one thing: lists, shapes, paths.

Flower's run configuration has only scalars, so lists travel as text. Validators return the text or raise ValueError,
whose message says what the value must be.
"""

from __future__ import annotations

import csv
import re
import tomllib
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from pbfl_flwr.config.toml import parse_toml
from pbfl_flwr.task import MAX_AXES
from pbfl_flwr.util.user_code import is_external

Scalar = bool | int | float | str
"""A value of the run configuration, as in Flower."""

MAX_CLASSES = 10_000
AUGMENTATIONS = ("crop", "flip")
HUB = "hf://"
"""Before the id of a dataset on the Hugging Face hub."""


@dataclass(frozen=True)
class Concerns:
    """What a key concerns; it stands in the key's annotation, where the key is declared.

    A key that sets nothing of this changes results: it cannot change when a run is resumed, and runs that differ in it
    have different configurations. All methods accept it.

    Attributes:
        place: it names files of a run, or says that there are some.
        changeable: it may change when a run is resumed.
        neutral: runs that differ in it are averaged.
        silent: a reproduction does not report it as a change of the paper's setting.
        stage: only methods that name it in ``Method.uses`` have this stage; others refuse all but its default.
        protection: likewise, others refuse values above the default of every protocol, which ask for protection.
    """

    place: bool = False
    changeable: bool = False
    neutral: bool = False
    silent: bool = False
    stage: bool = False
    protection: bool = False


class Group(BaseModel):
    """Keys that belong together; subclasses are immutable and refuse unknown keys.

    Attributes:
        concerns: what the keys concern that do not say it themselves.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
        allow_inf_nan=False,
    )
    concerns: ClassVar[Concerns] = Concerns()

    @model_validator(mode="before")
    @classmethod
    def _numbers_as_text(cls, values: Any) -> Any:
        """Convert numbers that are values of text keys, as in a file with ``label-column = 2024``."""
        texts = cls.text_keys()
        return {
            key: str(value)
            if key.replace("_", "-") in texts
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            else value
            for key, value in dict(values).items()
        }

    @classmethod
    def key_names(cls) -> list[str]:
        """Return the kebab-case keys of this group; a method's own have no prefix here."""
        return [name.replace("_", "-") for name in cls.model_fields]

    @classmethod
    def text_keys(cls) -> set[str]:
        """Return those of :meth:`key_names` whose value may be any text."""
        return {str(field.alias) for field in cls.model_fields.values() if field.annotation is str}

    @classmethod
    def concerns_of(cls, key: str) -> Concerns:
        """Return what a key concerns."""
        declared = cls.model_fields[key.replace("-", "_")].metadata
        return next((one for one in declared if isinstance(one, Concerns)), cls.concerns)


# Lists ------------------------------------------------------------------------------------------------------


def comma_list(text: str) -> list[str]:
    """Return the entries of a comma list."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def class_name(text: str) -> str:
    """Return a class name in canonical form: stripped, and in Unicode's composed form (NFC).

    Unicode has 'ä' as one character or as two (folder names from a Mac), which look the same.
    """
    return unicodedata.normalize("NFC", text.strip())


def class_names(text: str) -> tuple[str, ...]:
    """Return the names in ``labels``: one per line, or, on a single line, separated by commas as in CSV.

    Raises:
        csv.Error: if a name is longer than CSV allows.
    """
    if "\n" in text:
        return tuple(map(class_name, text.strip().split("\n")))
    return tuple(
        class_name(name) for line in csv.reader([text.strip()], skipinitialspace=True) for name in line
    )


def named_values(text: str) -> dict[str, Scalar]:
    """Read ``mu=0.1,base='fedtgp',warm=true``: the content of a TOML inline table of scalars.

    Raises:
        ValueError: saying what the text must be.
    """
    return _inline_table(
        text, "a comma list of name=value, texts in quotes, e.g. mu=0.1,base='fedtgp',warm=true", 0
    )


def named_arguments(text: str) -> dict[str, Any]:
    """Read ``partition-sizes=[150,50],shuffle=true``: as :func:`named_values`, also lists, and lists of lists.

    Raises:
        ValueError: saying what the text must be.
    """
    return _inline_table(
        text,
        "a comma list of name=value, texts in quotes, lists in brackets, e.g. alpha=0.1,sizes=[150,50]",
        2,
    )


def _inline_table(text: str, form: str, depth: int) -> dict[str, Any]:
    try:
        document = parse_toml(f"values = {{{text}}}")
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{form} ({error})") from None
    values: dict[str, Any] = document["values"]
    if len(document) > 1 or not all(_is_scalar(value, depth) for value in values.values()):
        raise ValueError(form)
    return values


def _is_scalar(value: object, depth: int) -> bool:
    """Whether this is a scalar, or scalars in up to so many lists."""
    if isinstance(value, list):
        return depth > 0 and all(_is_scalar(entry, depth - 1) for entry in value)
    return isinstance(value, bool | int | float | str)


# Validators -------------------------------------------------------------------------------------------------


def _text(check: Callable[[str], bool], form: str) -> AfterValidator:
    """Accept the empty text, and texts for which the check holds."""

    def validate(text: str) -> str:
        if text and not check(text):
            raise ValueError(form)
        return text

    return AfterValidator(validate)


def _is_augmentation(text: str) -> bool:
    kinds = comma_list(text)
    return len(set(kinds)) == len(kinds) and set(kinds) <= set(AUGMENTATIONS)


def _is_labels(text: str) -> bool:
    try:
        names = class_names(text)
    except csv.Error:
        return False
    return 2 <= len(names) <= MAX_CLASSES and all(names) and len(set(names)) == len(names)


def _is_shape(text: str) -> bool:
    sides = text.split(",")
    return len(sides) <= MAX_AXES and all(re.fullmatch(r"[1-9]\d{0,5}", side) for side in sides)


def _is_read_by(read: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        read(text)  # raises ValueError
        return True

    return check


def _user_function(text: str) -> str:
    if not is_external(text):
        raise ValueError("my_package.module:function")
    return text


AbsolutePath = Annotated[
    str,
    _text(
        lambda text: Path(text).is_absolute(), "an absolute path (workers run in other directories) or empty"
    ),
]
DataPath = Annotated[
    str,
    _text(
        lambda text: text.startswith(HUB) or Path(text).is_absolute(),
        f"an absolute path (workers run in other directories), {HUB}<id on the hub>, or empty",
    ),
]
Augmentation = Annotated[
    str, _text(_is_augmentation, f"empty, or a comma list of {', '.join(AUGMENTATIONS)}, each once")
]
Labels = Annotated[
    str,
    _text(
        _is_labels,
        f"empty, or 2 to {MAX_CLASSES} different names, separated by commas; a name with a comma in double quotes",
    ),
]
NamedValues = Annotated[str, _text(_is_read_by(named_values), "")]
NamedArguments = Annotated[str, _text(_is_read_by(named_arguments), "")]
UserFunction = Annotated[str, AfterValidator(_user_function)]
UserFunctions = Annotated[
    str,
    _text(
        lambda text: all(map(is_external, comma_list(text))) and bool(comma_list(text)),
        "empty, or a comma list of my_package.module:function",
    ),
]
Shape = Annotated[str, _text(_is_shape, f"empty, or 1 to {MAX_AXES} whole numbers from 1, e.g. '3,64,64'")]
