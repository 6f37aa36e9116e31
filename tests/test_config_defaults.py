"""pyproject.toml tells Flower which keys there are; config/keys.py says what they mean. Both must agree."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import GROUPS, parse
from pbfl_flwr.experiments.running.configuration import flatten
from pbfl_flwr.methods import METHODS, SECTIONS, build_method

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
DECLARED: dict[str, Any] = flatten(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"])
KNOWN: dict[str, Any] = {}
for prefix, group in [("", g) for g in GROUPS.values()] + [(f"{n}.", g) for n, g in SECTIONS.items()]:
    KNOWN |= {
        prefix + key: field.default
        for key, field in zip(group.key_names(), group.model_fields.values(), strict=True)
    }


def test_flower_knows_every_key() -> None:
    assert sorted(KNOWN.keys() - DECLARED.keys()) == []


def test_every_key_that_flower_knows_is_ours() -> None:
    assert sorted(DECLARED.keys() - KNOWN.keys()) == []


@pytest.mark.parametrize("key", sorted(KNOWN.keys() & DECLARED.keys()))
def test_defaults_agree(key: str) -> None:
    assert (type(DECLARED[key]), DECLARED[key]) == (type(KNOWN[key]), KNOWN[key])


@pytest.mark.parametrize("method", METHODS)
def test_the_declared_defaults_build_every_method(method: str) -> None:
    one_network = {"models": "cnn4"} if method == "fedavg" else {}
    assert build_method(parse({**DECLARED, "method": method, **one_network}, SECTIONS)).name == method
