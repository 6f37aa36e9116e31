"""Every key is declared once; what else lists keys agrees with the declaration."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import (
    CHANGEABLE,
    GROUPS,
    NEUTRAL,
    PROTECTIONS,
    SILENT,
    STAGES,
    Group,
    completed,
    parse,
)
from pbfl_flwr.config.keys import PLACES
from pbfl_flwr.config.toml import flatten
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import SECTIONS

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
TABLES: list[tuple[str, type[Group]]] = [
    *(("", group) for group in GROUPS.values()),
    *((f"{method}.", group) for method, group in SECTIONS.items()),
]
FIELDS = {
    prefix + name.replace("_", "-"): field
    for prefix, group in TABLES
    for name, field in group.model_fields.items()
}


def config_block() -> dict[str, Any]:
    """Return the keys and defaults that pyproject.toml tells Flower."""
    return flatten(tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"])


def test_a_key_is_in_one_group() -> None:
    assert len(FIELDS) == sum(len(group.model_fields) for _, group in TABLES)


def test_pyproject_tells_flower_every_key_and_default_in_order() -> None:
    declared = config_block()
    assert list(declared) == list(FIELDS)
    assert declared.pop("num-clients") == 0  # all nodes of a simulation
    declared["num-clients"] = FIELDS["num-clients"].default
    for key, field in FIELDS.items():
        assert (type(declared[key]), declared[key]) == (type(field.default), field.default), key


def test_values_beyond_the_bounds_of_a_key_are_rejected() -> None:
    tried = 0
    for key, field in FIELDS.items():
        for constraint in field.metadata:
            for bound, beyond in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
                if (limit := getattr(constraint, bound, None)) is not None:
                    value = type(field.default)(limit + beyond)
                    with pytest.raises(PbflError, match=rf"{key} = .*: must be (greater|less) than") as error:
                        parse({key: value}, SECTIONS)
                    assert "\n" not in str(error.value)
                    tried += 1
    assert tried > 120


# of the numbers among methods' own keys: what is just accepted, what is just refused
RANGES: list[tuple[list[float], list[float], str]] = [
    (
        [0.0],
        [-1e-9],
        "fedprox.mu fedala.rate feduv.variance-weight feduv.uniformity-weight fedfa.anchor-weight "
        "fedfa.calibration-rate fedpa.server-weight-decay fedpa.adversarial-weight "
        "feddistill.distillation-weight fml.max-grad-norm fedkd.max-grad-norm fedcpd.align-weight "
        "fedcpd.contrast-weight fedcpd.distill-weight gfpl.threshold gfpl.dot-weight",
    ),
    (
        [1e-9],
        [0.0],
        "fedala.threshold fedgen.server-learning-rate fedpa.server-learning-rate fedgh.server-learning-rate "
        "fedkd.auxiliary-learning-rate fedl2g.server-learning-rate fedtgp.server-learning-rate "
        "fedtgp.margin-cap tinyproto.server-learning-rate tinyproto.margin-cap fedcpd.temperature",
    ),
    ([0.0, 1.0], [-1e-9, 1 + 1e-9], "fednh.smoothing fedfa.anchor-momentum fml.alpha fml.beta"),
    (
        [1e-9, 1.0],
        [0.0, 1 + 1e-9],
        "fedala.sample-share fedpa.server-rate-decay fedpa.client-rate-decay fedkd.energy-start "
        "fedkd.energy-end",
    ),
    ([1e-9, 1e6], [0.0, 1e6 + 1], "fednh.scale"),
    (
        [0],
        [-1],
        "fedrep.head-epochs fedala.tensors fedpa.local-steps fedl2g.warm-up-rounds fedcpd.head-epochs",
    ),
    (
        [1],
        [0],
        "fedala.max-epochs fedgh.server-batch-size fedkd.schedule-rounds fedmrl.width fedl2g.study-batches "
        "fedl2g.quiz-batches fedtgp.server-batch-size tinyproto.server-batch-size gfpl.start gfpl.interval",
    ),
    ([2], [1], "fedala.window"),
    ([1, 256], [0, 257], "gfpl.components"),
    ([1, 1000], [0, 1001], "fesem.centres"),
    ([1, 4096], [0, 4097], "fedcpd.fusion-width"),
    ([1, 65_536], [0, 65_537], "fedgen.noise-dim fedgen.hidden-dim fedpa.noise-dim fedpa.hidden-dim"),
    (
        [1, 100_000],
        [0, 100_001],
        "fedgh.server-epochs fedtgp.server-epochs tinyproto.server-epochs gfpl.samples",
    ),
    ([1, 1_000_000], [0, 1_000_001], "fedgen.server-steps fedpa.server-steps"),
]


def test_numbers_of_methods_are_accepted_up_to_the_ends_of_their_ranges() -> None:
    for accepted, refused, keys in RANGES:
        for key in keys.split():
            for value in accepted:
                parse({key: value}, SECTIONS)
            for value in refused:
                with pytest.raises(PbflError, match=rf"^{key} = .*: must be (greater|less) than.*$"):
                    parse({key: value}, SECTIONS)
    numbers = [
        key
        for key, field in FIELDS.items()
        if "." in key and re.search(r"\b(int|float)\b", str(field.annotation))
    ]
    assert sorted(key for *_, keys in RANGES for key in keys.split()) == sorted(numbers)


def test_what_a_key_concerns_is_declared_with_it() -> None:
    course = {
        "round-timeout",
        "join-timeout",
        "failure-policy",
        "min-clients",
        "max-upload-mb",
    }
    course |= {"threads", "sinks", "new-code", "download"}
    assert {*PLACES} == {"run-dir", "state-dir", "resume"}
    assert {*CHANGEABLE} == {"num-server-rounds", "patience", "patience-on", *course}
    assert {*NEUTRAL} == {"seed", "device", "client-states", *PLACES, *course}
    assert {*SILENT} == {*PLACES, "data-dir", "download", "device", "threads", "eval-batch-size", "seed"}
    assert {*STAGES} == {*GROUPS["prototypes"].key_names()} - {"wire-dtype"}
    assert {*PROTECTIONS} == {"min-class-count", "dp-clip", "dp-noise"}


def test_a_record_lacks_only_keys_that_are_newer_and_at_their_defaults() -> None:
    whole = parse({"method": "fedtgp", "protocol": "htfl", "seed": 3}, SECTIONS).as_dict()
    newer = ("min-class-count", "feature-dim", "fedtgp.margin-cap")
    recorded = {key: value for key, value in whole.items() if key not in newer}
    assert completed(recorded, SECTIONS) == whole
    assert completed({**recorded, "feature-dim": 7}, SECTIONS) == {**whole, "feature-dim": 7}


def test_tables_in_tables_are_flat_keys_in_order_however_many() -> None:
    assert [*flatten({"b": 1, "a": {"d": {"x": 2}, "c": 3}, "e": {}}).items()] == [
        ("b", 1),
        ("a.d.x", 2),
        ("a.c", 3),
    ]
    deep: dict[str, object] = {"a": 0}
    for _ in range(5000):
        deep = {"a": deep}
    assert [key.count(".") for key in flatten(deep)] == [5000]
