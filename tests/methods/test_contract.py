"""What every method of METHODS must do; a new one is found by its entry and needs no edit here.

One that is not in the package: ``pytest tests/methods -k "contract or awkward" --method my_package.module:build``.

The checks are those of :mod:`pbfl_flwr.testing`, of runs whose messages go through Flower's own serialisation.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import PROTECTIONS, PrototypeSettings, Scalar, parse
from pbfl_flwr.config import STAGES as STAGE_KEYS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Method
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.testing.contract import CHECKS, Played, Recorder, fingerprint
from tests.flower.inprocess import federation, needs_one_architecture, raises, same_tensors


@pytest.fixture(scope="module")
def played(any_method: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    run = federation(tmp_path_factory.mktemp("run"), any_method, strategy=Recorder)
    seen = Played(run.strategy)
    with seen.watching():
        run.run()
    return seen


@pytest.mark.parametrize("check", CHECKS)
def test_what_every_method_must_do(
    played: Played, check: Callable[[Played, Path], None], tmp_path: Path
) -> None:
    check(played, tmp_path)


def test_the_papers_cost_is_a_number(played: Played) -> None:
    assert played.strategy.task is not None
    cost = played.method.paper_scalars(played.strategy.task, [3, 1, 4, 1, 4])
    assert cost is not None
    assert math.isfinite(cost)
    assert cost >= 0


def test_same_seed_same_bits_in_any_order(played: Played, any_method: str, tmp_path: Path) -> None:
    again = federation(tmp_path, any_method, order=99).run()
    assert again.fingerprint == fingerprint(played.strategy)


def test_a_client_that_fails_does_not_change_the_others(
    played: Played, any_method: str, tmp_path: Path
) -> None:
    """Client 2 raises in mid-round; what the others upload has the same bits as if it had not."""
    faulty = federation(
        tmp_path, any_method, strategy=Recorder, faults={(2, 1): raises}, num_server_rounds=1
    ).run()
    (line,) = faulty.strategy.history
    assert line.trained == [0, 1, 3, 4]
    (failure,) = line.failures
    assert failure.client == 2
    assert "boom" in failure.reason
    assert "\n" not in failure.reason
    expected, actual = played.aggregations[0].uploads, faulty.strategy.__dict__["aggregations"][0].uploads
    for client in (0, 1, 3, 4):
        assert same_tensors(actual[client].to_tensors(), expected[client].to_tensors())


@pytest.mark.parametrize("name", [name for name in METHODS if needs_one_architecture(name)])
def test_one_architecture_is_asked_for_before_round_1(name: str, tmp_path: Path) -> None:
    mixed = federation(tmp_path, name, models="cnn4,resnet4")
    with pytest.raises(PbflError, match=r"needs one architecture.*cnn4, resnet4") as error:
        mixed.run()
    assert "\n" not in str(error.value)
    assert {kind for _, _, kind in mixed.grid.asked} == {"query"}


STAGES: dict[str, Scalar] = {
    "regularizer-weight": 3.0,
    "regularizer-form": "mse",
    "collect": "trajectory",
    "aggregation": "median",
    "trim-share": 0.3,
    "cps-dim": 8,
    "cps-scheme": "block",
    "cps-regularizer": "masked",
    "cpkd": "sample",
    "aps-scale": 2.0,
    "total-examples": 100,
    "alignment": "thomson",
    "upscale": 50.0,
    "stale": "drop",
}
PIPELINES = {"fedproto", "fedtgp", "tinyproto", "protonorm"}
FORGETFUL = {"fedcpd", "fedpa", "feddistill", "gfpl"}  # they keep or drop classes that nobody sent


@pytest.mark.parametrize("key", [*STAGES, "wire-dtype"])
def test_a_stage_that_a_method_does_not_have_is_refused(key: str) -> None:
    """Every key of the group is asked of every method; nothing that was asked for is left out in silence."""
    assert {*STAGES, "wire-dtype"} == set(PrototypeSettings.key_names())
    value = STAGES.get(key, "float16")
    for method in METHODS:
        settings = parse({"method": method, "models": "cnn4", key: value}, SECTIONS)
        used = key == "wire-dtype" or method in PIPELINES or (key == "stale" and method in FORGETFUL)
        try:
            build_method(settings)
        except PbflError as error:
            message = str(error)
        else:
            message = ""
        refused = f"{key} = {value!r}: method '{method}' has no such stage; must be " in message
        assert refused is not used, (method, message)


# Each key with values of which at least one is no method's own; what else must be set for the value to be valid.
OTHERS: dict[str, tuple[tuple[Scalar, ...], dict[str, Scalar]]] = {
    **{key: ((value,), {}) for key, value in STAGES.items()},
    "aggregation": (("ppa", "mean"), {}),
    "alignment": (("thomson", "unit"), {}),
    "regularizer-form": (("mse", "l2"), {}),
    "min-class-count": ((3,), {}),
    "dp-clip": ((1.0,), {}),
    "dp-noise": ((1.0,), {"dp-clip": 1.0, "aps-scale": 0.1}),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_uses_the_keys_that_it_says(name: str) -> None:
    """That is: another value of the key makes another method."""
    assert {*OTHERS} == {*STAGE_KEYS, *PROTECTIONS}

    def built(**keys: Scalar) -> Method[Any, Any, Any]:
        auxiliary: dict[str, Scalar] = dict.fromkeys(("fml.auxiliary", "fedkd.auxiliary"), "cnn2")
        settings = parse({"method": name, "models": "cnn4", **auxiliary, **keys}, SECTIONS)
        return METHODS[name].build(settings)

    changing = {
        key
        for key, (values, more) in OTHERS.items()
        if any(built(**more, **{key: value}) != built(**more) for value in values)
    }
    assert changing == built().uses
