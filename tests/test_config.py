"""The run configuration: every bad key at once, strict types, ranges, protocols, fingerprint."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from pbfl_flwr.config import GROUPS, PROTOCOLS, Auto, Group, Scalar, Settings, TrainingSettings, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.running.configuration import flatten
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.prototypes.pipeline import Pipeline


class Own(Group):
    batch_size: int | Auto = Field("auto")
    rate: float = Field(0.5, gt=0)
    kind: Literal["a", "b"] = "a"


def refused(config: dict[str, Any]) -> list[str]:
    with pytest.raises(PbflError) as error:
        parse(config, {"fedtgp": Own})
    return str(error.value).splitlines()


def test_every_bad_key_is_named_at_once() -> None:
    found = refused(
        {
            "num-clients": 0,
            "learning-rate": "fast",
            "batchsize": 8,
            "partition": "random",
            "fedtgp.rate": -1.0,
            "fedtgp.knd": "a",
            "fedtgx.rate": 1.0,
            "alignment": "off",
        }
    )
    assert found == [
        "unknown key 'batchsize'; did you mean 'batch-size'?",
        "num-clients = 0: allowed is greater than or equal to 1",
        "partition = 'random': allowed is 'dirichlet', 'pathological', 'way-shot', 'natural' or 'iid'",
        "learning-rate = 'fast': allowed is a number",
        "unknown key 'fedtgp.knd'; did you mean 'fedtgp.kind'?",
        "fedtgp.rate = -1.0: allowed is greater than 0",
        "unknown section 'fedtgx.'; sections are 'fedtgp'",
    ]


def test_a_shared_key_below_a_table_is_told_where_it_belongs() -> None:
    preset = tomllib.loads("[fedtgp]\nlocal-epochs = 2\nbatch-size = 4\n[training]\nmomentum = 0.5\nfoo = 1")
    found = refused(flatten(preset))
    assert found[0] == (
        "unknown key 'fedtgp.local-epochs'; 'local-epochs' is a common key: in a file move it above the first "
        "[table], with --set omit 'fedtgp.'"
    )
    assert found[1].startswith("unknown key 'training.momentum'; 'momentum' is a common key")
    assert (
        found[2] == "unknown section 'training.'; sections are 'fedtgp'"
    )  # a method may have one of the same name
    assert len(found) == 3


def test_a_number_is_text_where_text_is_wanted() -> None:
    """--set label-column=2020 cannot be said otherwise; a text is never a number."""
    settings = parse({"label-column": 2020, "input-shape": 2, "initial-weights": "own"})
    assert (settings.data.label_column, settings.data.input_shape) == ("2020", "2")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num-clients", 5.0),
        ("num-clients", True),
        ("num-clients", "5"),
        ("momentum", "0.5"),
        ("momentum", True),
        ("download", 1),
        ("download", "true"),
        ("method", True),
        ("cps-dim", 1.5),
        ("cps-dim", "all"),
    ],
)
def test_types_are_strict(key: str, value: Scalar) -> None:
    (line,) = refused({key: value})
    assert line.startswith(f"{key} = {value!r}: allowed is ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fraction-train", 0.0),
        ("fraction-train", 1.1),
        ("momentum", 1.0),
        ("trim-share", 0.5),
        ("seed", -1),
        ("batch-size", 0),
        ("learning-rate", float("nan")),
        ("learning-rate", float("inf")),
        ("regularizer-weight", -1.0),
        ("regularizer-weight", float("nan")),
        ("upscale", -0.5),
        ("aps-scale", -1.0),
        ("aps-scale", 0.0),
        ("cps-dim", -1),
        ("train-share", 1.0),
    ],
)
def test_ranges(key: str, value: Scalar) -> None:
    (line,) = refused({key: value})
    assert line.startswith(f"{key} = {value!r}: allowed is ")


def test_momentum_is_of_sgd() -> None:
    with pytest.raises(PbflError) as error:
        parse({"optimizer": "adamw", "momentum": 0.9})
    assert (
        str(error.value)
        == "momentum = 0.9: optimizer = 'adamw' has no such setting; allowed is 0, or optimizer = 'sgd'"
    )
    assert parse({"optimizer": "sgd", "momentum": 0.9}).training.momentum == 0.9


def test_a_rate_that_is_high_for_adam_is_remarked() -> None:
    said = ["learning-rate = 0.01: 0.001 or less is usual for adam"]
    assert parse({"optimizer": "adam"}).training.config_warnings() == said
    assert parse({"optimizer": "adam", "learning-rate": 0.003}).training.config_warnings() == []
    assert parse({"learning-rate": 0.1}).training.config_warnings() == []


def test_the_servers_prototypes_have_a_rate_of_sgd() -> None:
    def rate(keys: Mapping[str, Scalar]) -> float:
        method = build_method(parse({"method": "fedtgp", **keys}, SECTIONS))
        assert isinstance(method, Pipeline)
        assert method.server_training is not None
        return method.server_training.learning_rate

    assert rate({"learning-rate": 0.03}) == 0.03
    assert rate({"optimizer": "adam", "learning-rate": 0.001}) == 0.01
    assert rate({"optimizer": "adam", "fedtgp.server-learning-rate": 0.2}) == 0.2


def test_a_whole_number_is_a_number() -> None:
    assert parse({"learning-rate": 1, "regularizer-weight": 2}).training.learning_rate == 1


@pytest.mark.parametrize("key", ["num_clients", "fedtgp.batch_size"])
def test_keys_are_kebab_case_only(key: str) -> None:
    (line,) = refused({key: 5})
    assert line.startswith(f"unknown key '{key}'; did you mean '{key.replace('_', '-')}'?")


def test_sections_of_other_methods_are_checked_but_not_kept() -> None:
    settings = parse({"method": "local", "fedtgp.rate": 0.25}, {"fedtgp": Own})
    assert settings.method_section == {}
    assert refused({"method": "local", "fedtgp.rate": 0.0}) == [
        "fedtgp.rate = 0.0: allowed is greater than 0"
    ]
    chosen = parse({"method": "fedtgp", "fedtgp.rate": 0.25}, {"fedtgp": Own})
    assert chosen.method_section == {"batch-size": "auto", "rate": 0.25, "kind": "a"}
    assert parse({"method": "fedtgp"}, {"fedtgp": Own}).method_section["rate"] == 0.5


def test_keys_stand_in_one_group_only() -> None:
    names = [key for group in GROUPS.values() for key in group.key_names()]
    assert len(names) == len(set(names))
    assert not [key for key in names if "_" in key or "." in key]


# Protocols --------------------------------------------------------------------------------------------------


def test_the_protocol_table_is_complete_and_its_values_are_allowed() -> None:
    protocols = {"clean", "htfl", "pfl", "fedproto"}
    for name, row in PROTOCOLS.items():
        method, _, key = name.rpartition(".")
        assert set(row) == protocols
        for protocol, value in row.items():
            if value != "auto":
                parse({key: value})
            found = parse({"protocol": protocol, "method": method or "local"}).as_dict()
            assert found[key] == value


def test_a_method_may_have_a_row_of_its_own() -> None:
    collected = {
        name: parse({"protocol": "htfl", "method": name}).prototypes.collect
        for name in ("fedproto", "fedtgp", "protonorm", "tinyproto")
    }
    assert collected == {
        "fedproto": "trajectory",
        "fedtgp": "before",
        "protonorm": "before",
        "tinyproto": "trajectory",
    }


def test_what_is_given_beats_the_protocol() -> None:
    settings = parse({"protocol": "htfl", "batch-order": "shuffled"})
    assert settings.training.batch_order == "shuffled"
    assert settings.training.drop_last == "always"
    assert settings.evaluation.evaluate_moment == "before"
    assert settings.prototypes.collect == "trajectory"


def test_nothing_of_the_loader_stays_open() -> None:
    for protocol in ("clean", "htfl", "pfl", "fedproto"):
        settings = parse({"protocol": protocol})
        assert "auto" not in (settings.training.batch_order, settings.training.drop_last)


# Fingerprint ------------------------------------------------------------------------------------------------


def test_the_fingerprint_knows_what_changes_results(tmp_path: Path) -> None:
    base = parse({}).fingerprint()
    for same in (
        {"run-dir": str(tmp_path)},
        {"state-dir": str(tmp_path)},
        {"resume": True},
        {"num-server-rounds": 99},
        {"round-timeout": 5.0},
        {"join-timeout": 5.0},
        {"threads": 2},
    ):
        assert parse(same).fingerprint() == base, same
    others: list[dict[str, Scalar]] = [
        {"seed": 1},
        {"learning-rate": 0.02},
        {"method": "fedtgp"},
        {"wire-dtype": "float16"},
        {"num-clients": 21},
        {"protocol": "pfl"},
    ]
    assert len({base, *(parse(other).fingerprint() for other in others)}) == 1 + len(others)
    of_a_method = {
        parse({"method": "fedtgp", "fedtgp.margin-cap": c}, SECTIONS).fingerprint() for c in (1.0, 2.0)
    }
    assert len(of_a_method) == 2


def test_a_configuration_survives_its_flat_form() -> None:
    for name in METHODS:
        settings = parse({"method": name, "momentum": 0.9}, SECTIONS)
        assert parse(settings.as_dict(), SECTIONS) == settings


def test_an_architecture_may_have_its_own_layout_and_precision() -> None:
    keys: dict[str, Scalar] = {"layout": "contiguous, cnn4=channels-last", "precision": "resnet8=bfloat16"}
    training = parse(keys).training
    assert {name: training.of(name).layout for name in ("cnn4", "resnet8")} == {
        "cnn4": "channels-last",
        "resnet8": "contiguous",
    }
    assert {name: training.of(name).precision for name in ("cnn4", "resnet8")} == {
        "cnn4": "float32",
        "resnet8": "bfloat16",
    }
    # What is not said is the protocol's.
    for said in ("cnn4=contiguous", "auto, cnn4 = contiguous", "cnn4=contiguous,auto"):
        assert parse({"layout": said}).training.layout == "channels-last, cnn4=contiguous"
    assert parse({"layout": "cnn4=auto"}).training.of("cnn4").layout == "channels-last"
    assert (
        parse({"layout": "cnn4=channels-last", "protocol": "pfl"}).training.of("cnn2").layout == "contiguous"
    )
    resolved = parse(keys)
    assert parse(resolved.as_dict(), SECTIONS) == parse(keys, SECTIONS)
    assert parse({"layout": "cnn4=contiguous"}).fingerprint() != parse({}).fingerprint()


@pytest.mark.parametrize(
    "value", ["diagonal", "cnn4=diagonal", "", "cnn4", "cnn4=contiguous,cnn4=auto", "auto, contiguous"]
)
def test_a_layout_that_is_none(value: str) -> None:
    (line,) = refused({"layout": value})
    assert line.startswith(f"layout = '{value}': allowed is auto, channels-last, contiguous, or a comma list")


def test_settings_cannot_be_changed() -> None:
    training: Any = Settings().training
    with pytest.raises(ValueError, match="frozen"):
        training.batch_size = 3
    assert TrainingSettings(batch_size=3).batch_size == 3


def test_an_unknown_method_is_answered_with_the_closest() -> None:
    with pytest.raises(
        PbflError, match=r"method = 'fedprot': allowed is one of .*did you mean 'fedproto'"
    ) as error:
        build_method(parse({"method": "fedprot"}, SECTIONS))
    assert "\n" not in str(error.value)


def test_pyproject_declares_every_key_with_its_default() -> None:
    """Flower takes only the keys that stand there; the list stands twice, so it is compared."""
    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    declared = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    flat = {key: value for key, value in declared.items() if not isinstance(value, dict)}
    expected = {k: v for group in GROUPS.values() for k, v in group().model_dump(by_alias=True).items()}
    assert flat == expected
    sections = {key: value for key, value in declared.items() if isinstance(value, dict)}
    assert sections == {name: group().model_dump(by_alias=True) for name, group in SECTIONS.items()}
