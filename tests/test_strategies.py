"""The methods as strategies of somebody else's Flower app: own data, own run configuration, no key of ours in it."""

from inspect import signature
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from pbfl_flwr.config import PrototypeSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.stages import Stages
from pbfl_flwr.strategies import (
    GFPL,
    Aggregation,
    Alignment,
    Cpkd,
    FedCPD,
    FedProto,
    FedTGP,
    ProtoNorm,
    TinyProto,
    strategy_of,
)
from pbfl_flwr.task import Task
from tests.flower.inprocess import NUM_CLIENTS, InProcessGrid, tiny_data


def strategies(directory: Path) -> list[MethodStrategy]:
    common: dict[str, Any] = {"models": "cnn4", "feature_dim": 20, "num_server_rounds": 2}
    where = str(directory / "state")
    return [
        FedProto(
            num_clients=NUM_CLIENTS, cps_dim=5, aggregation="ppa", cpkd="sample", state_dir=where, **common
        ),
        FedTGP(num_clients=NUM_CLIENTS, server_epochs=2, state_dir=where, **common),
        TinyProto(num_clients=NUM_CLIENTS, base="fedtgp", cps_dim=4, state_dir=where, **common),
        ProtoNorm(num_clients=NUM_CLIENTS, upscale=10.0, alignment="simplex", state_dir=where, **common),
        GFPL(num_clients=NUM_CLIENTS, components=2, start=1, interval=1, state_dir=where, **common),
        FedCPD(num_clients=NUM_CLIENTS, align_weight=0.5, base="fedavg", state_dir=where, **common),
        strategy_of(
            "fedgh", num_clients=NUM_CLIENTS, section={"server_epochs": 2}, state_dir=where, **common
        ),
    ]


@pytest.mark.parametrize("number", range(7))
def test_in_another_app(number: int, tmp_path: Path) -> None:
    strategy = strategies(tmp_path)[number]
    app = make_client_app(tiny_data, strategy.settings)
    result = strategy.start(InProcessGrid(app, {"their-own-key": 1}, NUM_CLIENTS))
    assert strategy.done == 2
    assert not strategy.history[-1]["failures"]
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert result.arrays  # the global prototypes, encoded
    assert not (tmp_path / "run.json").exists()


def test_keywords_reach_the_method(tmp_path: Path) -> None:
    made = strategies(tmp_path)
    methods: list[Any] = [strategy.method for strategy in made]
    sparse, trained, tiny, aligned, mixed, distilled, other = methods
    assert (sparse.stages.cps_dim, sparse.stages.aggregation) == (5, "ppa")
    assert trained.server_training.epochs == 2
    assert tiny.server_training is not None
    assert (aligned.stages.alignment, aligned.stages.upscale) == ("simplex", 10.0)
    assert (mixed.config.components, mixed.config.interval) == (2, 1)
    assert (distilled.config.align_weight, distilled.config.base) == (0.5, "fedavg")
    assert (other.name, made[-1].settings.as_dict()["fedgh.server-epochs"]) == ("fedgh", 2)


def test_defaults_of_keywords_are_those_of_the_keys() -> None:
    for page, strategy in (("gfpl", GFPL), ("fedcpd", FedCPD), ("fedtgp", FedTGP)):
        given = {
            f"{page}.{name.replace('_', '-')}": p.default
            for name, p in signature(strategy).parameters.items()
        }
        known = SECTIONS[page]()
        own = {
            f"{page}.{key}": value
            for key, value in zip(known.key_names(), known.model_dump().values(), strict=True)
        }
        assert {key: own[key] for key in own.keys() & given.keys()} == {
            key: given[key] for key in own.keys() & given.keys()
        }
        assert len(own.keys() & given.keys()) >= 2


def test_aggregate_fit_needs_no_grid() -> None:
    strategy = FedProto(num_clients=2, feature_dim=2)
    strategy.begin(Task(2, 2, (1, 16, 16)))
    one = Prototypes(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([True, False]))
    two = Prototypes(torch.tensor([[3.0, 5.0], [7.0, 7.0]]), torch.tensor([True, True]))
    state = strategy.aggregate_fit(1, {0: one, 1: two})
    assert state.broadcast.values.tolist() == [[2.0, 4.0], [7.0, 7.0]]  # (1+3)/2, (3+5)/2; one holder


def test_wrong_keywords_are_named_at_once() -> None:
    with pytest.raises(PbflError) as caught:
        TinyProto(num_clients=0, cps_dim=-1, batchsize=3)
    said = str(caught.value)
    assert "num-clients = 0" in said
    assert "cps-dim = -1" in said
    assert "unknown key 'batchsize'; did you mean 'batch-size'?" in said


@pytest.mark.parametrize(
    ("stage", "said"),
    [("aggregation", Aggregation), ("alignment", Alignment), ("cpkd", Cpkd)],
)
def test_what_a_stage_may_be_is_the_same_everywhere(stage: str, said: Any) -> None:
    key = PrototypeSettings.model_fields[stage].annotation
    assert get_args(said) == get_args(key)
    for value in get_args(said)[1:]:  # all but "auto", which is resolved by then
        assert getattr(Stages.model_validate({stage: value}), stage) == value
    with pytest.raises(ValidationError):
        Stages.model_validate({stage: "auto"})
