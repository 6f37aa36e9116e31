"""Validators of text values: each returns the text or raises ValueError, saying what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from pbfl_flwr.config.attack import Attack
from pbfl_flwr.config.choices import words
from pbfl_flwr.config.faults import FaultRates
from pbfl_flwr.config.texts import class_names, named_values
from pbfl_flwr.task import MAX_AXES

LAYOUTS = ("channels-last", "contiguous")
PRECISIONS = ("float32", "bfloat16")
PREDICTORS = ("head", "global", "global-local", "local", "etf")
AUGMENTATIONS = ("crop", "flip")
MAX_CLASSES = 10_000


def _absolute(path: str) -> str:
    if path and not Path(path).is_absolute():
        raise ValueError("an absolute path (workers run in other directories) or nothing")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


def check_faults(text: str) -> str:
    """Check injected faults; see :meth:`FaultRates.parse`."""
    FaultRates.parse(text)
    return text


def check_attack(text: str) -> str:
    """Check an attack; see :meth:`Attack.parse`."""
    if text:
        Attack.parse(text)
    return text


def check_augmentation(text: str) -> str:
    """Check a comma list of kinds of augmentation."""
    kinds = words(text)
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(AUGMENTATIONS):
        raise ValueError(f"nothing, or a comma list of {', '.join(AUGMENTATIONS)}, each once")
    return text


def check_named_values(text: str) -> str:
    """Check a comma list of ``name=value``."""
    named_values(text)
    return text


def check_labels(text: str) -> str:
    """Check a comma list of class names."""
    names = class_names(text)
    if text and not (2 <= len(names) <= MAX_CLASSES and all(names) and len(set(names)) == len(names)):
        raise ValueError(f"nothing, or 2 to {MAX_CLASSES} different names, separated by commas")
    return text


def check_shape(text: str) -> str:
    """Check the shape of an input, e.g. ``3,64,64``."""
    sides = text.split(",") if text else []
    if len(sides) > MAX_AXES or not all(re.fullmatch(r"[1-9]\d{0,5}", side) for side in sides):
        raise ValueError(f"nothing, or 1 to {MAX_AXES} whole numbers from 1, e.g. '3,64,64'")
    return text
