"""The run configuration: every invalid key at once, strict types, protocols, fingerprint."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from pbfl_flwr.config import (
    PROTOCOLS,
    Auto,
    Group,
    Scalar,
    Settings,
    TrainingSettings,
    named_arguments,
    parse,
)
from pbfl_flwr.config.toml import flatten, parse_toml
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.prototypes.pipeline import Pipeline


class Own(Group):
    batch_size: int | Auto = Field("auto")
    rate: float = Field(0.5, gt=0)
    kind: Literal["a", "b"] = "a"


def error_lines(config: dict[str, Any]) -> list[str]:
    with pytest.raises(PbflError) as error:
        parse(config, {"fedtgp": Own})
    return str(error.value).splitlines()


def test_all_invalid_keys_are_reported_at_once() -> None:
    wrong = {
        "num-clients": 0,
        "learning-rate": "fast",
        "batchsize": 8,
        "momentun": 0.5,
        "rounds": 3,
        "partition": "random",
    }
    lines = error_lines(
        {**wrong, "fedtgp.rate": -1.0, "fedtgp.knd": "a", "fedtgx.rate": 1.0, "alignment": "off"}
    )
    assert lines == [
        "unknown key 'batchsize'; did you mean 'batch-size'?",
        "unknown key 'momentun'; did you mean 'momentum'?",
        "unknown key 'rounds'; did you mean 'num-server-rounds'?",
        "unknown key 'fedtgp.knd'; did you mean 'fedtgp.kind'?",
        "unknown section 'fedtgx.'; sections are 'fedtgp'",
        "num-clients = 0: must be greater than or equal to 1",
        "partition = 'random': must be 'dirichlet', 'pathological', 'way-shot', 'natural' or 'iid' or "
        "my_package.module:function",
        "learning-rate = 'fast': must be a number",
        "fedtgp.rate = -1.0: must be greater than 0",
    ]


def test_values_that_cannot_be_sent_or_recorded_are_refused_in_keys_of_an_app_too() -> None:
    app = {"app.a": math.nan, "app.b": -math.inf, "app.c": 2**63, "app.d": "a\ud800", "app.e": -(2**63)}
    assert error_lines({**app, "data-dir": "/a\udcff", "app.f": 1e300}) == [
        "app.a = nan: must be a finite number",
        "app.b = -inf: must be a finite number",
        f"app.c = {2**63}: must be a number of at most 64 bits",
        r"app.d = 'a\ud800': must be text in UTF-8; rename what has this name",
        r"data-dir = '/a\udcff': must be text in UTF-8; rename what has this name",
    ]


def test_numbers_with_which_nothing_can_be_computed_are_refused() -> None:
    assert error_lines({"learning-rate": 1e300, "patience": 2**70, "fedtgp.rate": 3e38}) == [
        f"patience = {2**70}: must be at most 1e+18",
        "learning-rate = 1e+300: must be at most 1e+18",
        "fedtgp.rate = 3e+38: must be at most 1e+18",
    ]


def test_a_common_key_in_a_table_is_told_where_it_belongs() -> None:
    preset = tomllib.loads("[fedtgp]\nlocal-epochs = 2\nbatch-size = 4\n[training]\nmomentum = 0.5\nfoo = 1")
    lines = error_lines(flatten(preset))
    assert lines[0] == (
        "unknown key 'fedtgp.local-epochs'; 'local-epochs' is a common key: in a file move it above the first "
        "[table], with --set omit 'fedtgp.'"
    )
    assert lines[1].startswith("unknown key 'training.momentum'; 'momentum' is a common key")
    # a method may have a section of the same name
    assert lines[2:] == ["unknown section 'training.'; sections are 'fedtgp'"]


def test_numbers_are_accepted_as_text_but_text_not_as_numbers() -> None:
    """--set label-column=2020 cannot be written otherwise."""
    settings = parse({"label-column": 2020, "input-shape": 2, "learning-rate": 1})
    assert (settings.data.label_column, settings.data.input_shape) == ("2020", "2")
    assert settings.training.learning_rate == 1


NAMES = "empty, or 2 to 10000 different names, separated by commas; a name with a comma in double quotes"
LISTS = "a comma list of name=value, texts in quotes, lists in brackets, e.g. alpha=0.1,sizes=[150,50]"


@pytest.mark.parametrize(
    ("key", "value", "form"),
    [
        ("num-clients", 5.0, "a whole number"),
        ("num-clients", True, "a whole number"),
        ("num-clients", "5", "a whole number"),
        ("momentum", "0.5", "a number"),
        ("momentum", True, "a number"),
        ("download", 1, "true or false"),
        ("download", "true", "true or false"),
        ("method", True, "a valid string"),
        ("learning-rate", float("nan"), "a finite number"),
        ("learning-rate", float("inf"), "a finite number"),
        ("cps-dim", 1.5, "a whole number or 'auto'"),
        ("cps-dim", "all", "a whole number or 'auto'"),
        ("cps-dim", -1, "greater than or equal to 0 or 'auto'"),
        ("regularizer-weight", -1.0, "greater than or equal to 0 or 'auto'"),
        ("regularizer-weight", float("nan"), "a finite number or 'auto'"),
        ("aps-scale", 0.0, "greater than 0 or 'auto'"),
        ("stale", "never", "'keep' or 'drop'"),
        ("optimizer", "lion", "'sgd', 'adam' or 'adamw'"),
        ("run-dir", "runs/a", "an absolute path (workers run in other directories) or empty"),
        ("augmentation", "flip,flip", "empty, or a comma list of crop, flip, each once"),
        ("labels", "cat", NAMES),
        ("labels", "cat,cat", NAMES),
        ("labels", '"cat,dog"', NAMES),
        ("labels", f"{'c' * 2**18},dog", NAMES),
        ("partitioner-settings", "sizes=[[[1]]]", LISTS),
        ("partitioner-settings", "sizes={a=1}", LISTS),
        (
            "method-settings",
            "sizes=[1]",
            "a comma list of name=value, texts in quotes, e.g. mu=0.1,base='fedtgp',warm=true",
        ),
        ("input-shape", "3,0", "empty, or 1 to 4 whole numbers from 1, e.g. '3,64,64'"),
        ("layout", "cnn4=contiguous", "'auto', 'channels-last' or 'contiguous'"),
    ],
)
def test_invalid_values_are_rejected_with_what_they_must_be(key: str, value: Scalar, form: str) -> None:
    assert error_lines({key: value}) == [f"{key} = {value!r}: must be {form}"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cat, dog", ("cat", "dog")),
        ('"cat, big", dog', ("cat, big", "dog")),
        ('dog, "cat, ""big"""', ("dog", 'cat, "big"')),
        ('5" disk,dog', ('5" disk', "dog")),
        ('cat, big\n"dog"\n', ("cat, big", '"dog"')),
        ("", ()),
    ],
)
def test_names_of_classes_may_have_commas(text: str, names: tuple[str, ...]) -> None:
    assert parse({"labels": text}).data.classes == names


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-3, 300),
    st.floats(-2, 2),
    st.sampled_from(["auto", "", "off", "cnn4", "/tmp/x", "a,b"]),
)


@given(
    st.dictionaries(st.sampled_from([*parse({}).as_dict(), "fedtgp.rate", "nonsense", "momentun"]), SCALARS)
)
def test_a_configuration_is_either_rejected_in_lines_or_equals_its_flat_form(
    config: dict[str, Scalar],
) -> None:
    sections = {"fedtgp": Own}
    try:
        settings = parse(config, sections)
    except PbflError as error:
        lines = str(error).splitlines()
        assert lines
        assert all(any(key in line for key in config) for line in lines)
    else:
        assert parse(settings.as_dict(), sections) == settings


def test_momentum_needs_sgd() -> None:
    (line,) = error_lines({"optimizer": "adamw", "momentum": 0.9})
    assert line == "momentum = 0.9: optimizer = 'adamw' has no such setting; must be 0, or optimizer = 'sgd'"
    assert parse({"optimizer": "sgd", "momentum": 0.9}).training.momentum == 0.9


def test_a_high_learning_rate_for_adam_gives_a_warning() -> None:
    warnings = ["learning-rate = 0.01: 0.001 or less is usual for adam"]
    assert parse({"optimizer": "adam"}).training.config_warnings() == warnings
    assert parse({"optimizer": "adam", "learning-rate": 0.003}).training.config_warnings() == []
    assert parse({"learning-rate": 0.1}).training.config_warnings() == []


def test_a_cosine_of_one_round_gives_a_warning() -> None:
    (warning,) = parse({"learning-rate-cosine": 1}).training.config_warnings()
    assert warning.startswith("learning-rate-cosine = 1: without effect")
    assert parse({"learning-rate-cosine": 2}).training.config_warnings() == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (".1", 0.1),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("+2.", 2.0),
        (".5e-3", 0.0005),
        ("1.e3", 1000.0),
        ("[.1, 2.]", [0.1, 2.0]),
    ],
)
def test_a_number_may_begin_or_end_with_its_point(text: str, number: object) -> None:
    assert parse_toml(f"a = {text}") == {"a": number}
    assert parse_toml(f"a = {text} # it's .5\nb.c = '.1 of 3.'") == {"a": number, "b": {"c": ".1 of 3."}}
    assert named_arguments(f"mu={text},name='x.1'") == {"mu": number, "name": "x.1"}


NO_NUMBERS = [".", "..", "a.1", ".1.2", "1.2.3", "./.1", "007.", "1._5", ".1x", "1" * 5000, "[" * 5000]


@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: text[:5])
def test_what_is_no_number_stays_text(text: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_toml(f"a = {text}")


def test_the_server_uses_the_learning_rate_of_sgd_only() -> None:
    def rate(keys: Mapping[str, Scalar]) -> float:
        method = build_method(parse({"method": "fedtgp", **keys}, SECTIONS))
        assert isinstance(method, Pipeline)
        assert method.server_training is not None
        return method.server_training.learning_rate

    assert rate({"learning-rate": 0.03}) == 0.03
    assert rate({"optimizer": "adam", "learning-rate": 0.001}) == 0.01
    assert rate({"optimizer": "adam", "fedtgp.server-learning-rate": 0.2}) == 0.2


@pytest.mark.parametrize("key", ["num_clients", "fedtgp.batch_size"])
def test_keys_are_kebab_case_only(key: str) -> None:
    (line,) = error_lines({key: 5})
    assert line.startswith(f"unknown key '{key}'; did you mean '{key.replace('_', '-')}'?")


def test_sections_of_other_methods_are_checked_but_dropped() -> None:
    settings = parse({"method": "local", "fedtgp.rate": 0.25}, {"fedtgp": Own})
    assert settings.method_section == {}
    assert error_lines({"method": "local", "fedtgp.rate": 0.0}) == [
        "fedtgp.rate = 0.0: must be greater than 0"
    ]
    chosen = parse({"method": "fedtgp", "fedtgp.rate": 0.25}, {"fedtgp": Own})
    assert chosen.method_section == {"batch-size": "auto", "rate": 0.25, "kind": "a"}
    assert parse({"method": "fedtgp"}, {"fedtgp": Own}).method_section["rate"] == 0.5


# Protocols --------------------------------------------------------------------------------------------------


def test_protocol_table_is_complete_and_valid() -> None:
    protocols = {"clean", "htfl", "pfl", "fedproto"}
    for name, row in PROTOCOLS.items():
        method, _, key = name.rpartition(".")
        assert set(row) == protocols
        for protocol, value in row.items():
            if value != "auto":
                parse({key: value})
            flat = parse({"protocol": protocol, "method": method or "local"}).as_dict()
            assert flat[key] == value


def test_explicit_values_override_the_protocol() -> None:
    settings = parse({"protocol": "htfl", "batch-order": "shuffled", "min-class-count": 5})
    assert settings.privacy.min_class_count == 5
    assert settings.training.batch_order == "shuffled"
    assert settings.training.drop_last == "always"
    assert settings.evaluation.evaluate_moment == "before"
    assert settings.prototypes.collect == "trajectory"


# Fingerprint ------------------------------------------------------------------------------------------------


def test_fingerprint_depends_on_keys_that_change_results_only(tmp_path: Path) -> None:
    base = parse({}).fingerprint()
    places: dict[str, Scalar] = {
        "run-dir": str(tmp_path),
        "state-dir": str(tmp_path),
        "resume": True,
        "threads": 2,
    }
    times: dict[str, Scalar] = {"num-server-rounds": 99, "round-timeout": 5.0, "join-timeout": 5.0}
    for key, value in {**places, **times}.items():
        assert parse({key: value}).fingerprint() == base, key
    results: dict[str, Scalar] = {
        "seed": 1,
        "learning-rate": 0.02,
        "method": "fedtgp",
        "wire-dtype": "float16",
    }
    others = [{key: value} for key, value in {**results, "num-clients": 21, "protocol": "pfl"}.items()]
    others += [{"method": "fedtgp", "fedtgp.margin-cap": cap} for cap in (1.0, 2.0)]
    assert len({base, *(parse(other, SECTIONS).fingerprint() for other in others)}) == 1 + len(others)


def test_flat_form_of_every_method_parses_to_the_same_settings() -> None:
    for name in METHODS:
        settings = parse({"method": name, "momentum": 0.9}, SECTIONS)
        assert parse(settings.as_dict(), SECTIONS) == settings


def test_settings_are_frozen() -> None:
    training: Any = Settings().training
    with pytest.raises(ValueError, match="frozen"):
        training.batch_size = 3
    assert TrainingSettings(batch_size=3).batch_size == 3


def test_unknown_method_names_the_closest_one() -> None:
    with pytest.raises(
        PbflError, match=r"method = 'fedprot': must be one of .*did you mean 'fedproto'"
    ) as error:
        build_method(parse({"method": "fedprot"}, SECTIONS))
    assert "\n" not in str(error.value)
