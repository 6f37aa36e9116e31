"""The methods as strategies of another Flower app, with its own data and run configuration."""

from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from pbfl_flwr.config import GROUPS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.artefacts import client_states
from pbfl_flwr.experiments.results import FinishedRun
from pbfl_flwr.flower.api import federate_app
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.strategies import GFPL, FedCPD, FedProto, FedTGP, ProtoNorm, TinyProto, strategy_of
from tests.flower.inprocess import NUM_CLIENTS, InProcessGrid, tiny_data

COMMON: dict[str, Any] = {"models": "cnn4", "feature_dim": 20, "num_server_rounds": 2}


def strategies(directory: Path) -> list[MethodStrategy]:
    where = str(directory / "state")
    return [
        FedProto(
            num_clients=NUM_CLIENTS, cps_dim=5, aggregation="ppa", cpkd="sample", state_dir=where, **COMMON
        ),
        FedTGP(num_clients=NUM_CLIENTS, server_epochs=2, state_dir=where, **COMMON),
        TinyProto(num_clients=NUM_CLIENTS, base="fedtgp", cps_dim=4, state_dir=where, **COMMON),
        ProtoNorm(num_clients=NUM_CLIENTS, upscale=10.0, alignment="simplex", state_dir=where, **COMMON),
        GFPL(num_clients=NUM_CLIENTS, components=2, start=1, interval=1, state_dir=where, **COMMON),
        FedCPD(num_clients=NUM_CLIENTS, align_weight=0.5, base="fedavg", state_dir=where, **COMMON),
        strategy_of("fedgh", num_clients=NUM_CLIENTS, server_epochs=2, state_dir=where, **COMMON),
    ]


@pytest.mark.parametrize("number", range(7))
def test_strategies_run_in_another_app(number: int, tmp_path: Path) -> None:
    strategy = strategies(tmp_path)[number]
    app = make_client_app(tiny_data, strategy.settings)
    result = strategy.start(InProcessGrid(app, {"their-own-key": 1}, NUM_CLIENTS))
    assert strategy.done == 2
    assert not strategy.history[-1].failures
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert result.arrays  # the global prototypes, encoded
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("keys", [{}, {"state_dir": "elsewhere"}])
def test_clients_keep_their_states_in_the_directory_of_the_run_unless_a_key_names_another(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    keys = {key: str(tmp_path / place) for key, place in keys.items()}
    strategy = FedProto(num_clients=NUM_CLIENTS, directory=tmp_path / "run", **keys, **COMMON)
    federate_app(strategy, make_client_app(tiny_data, strategy.settings))
    states = Path(keys.get("state_dir", tmp_path / "run" / "clients")) / strategy.experiment
    assert len([*states.glob("client-*.safetensors")]) == NUM_CLIENTS
    assert [client for client, _ in client_states(FinishedRun.load(tmp_path / "run"))] == [
        *range(NUM_CLIENTS)
    ]
    assert not (tmp_path / "home" / "runs").exists()


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


def alternatives(annotation: Any) -> set[Any]:
    """Return the types and literal values that an annotation allows, without ranges."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return alternatives(parts[0])
    if origin is Literal:
        return set(parts)
    return set().union(*map(alternatives, parts)) if parts else {annotation}


@pytest.mark.parametrize("strategy", [FedProto, FedTGP, TinyProto, ProtoNorm, GFPL, FedCPD])
def test_keywords_have_types_and_defaults_of_their_keys(strategy: type[MethodStrategy]) -> None:
    method = strategy.__name__.lower()
    section = [SECTIONS[method]] if method in SECTIONS else []
    fields = {
        name: field for group in (*GROUPS.values(), *section) for name, field in group.model_fields.items()
    }
    types = get_type_hints(strategy.__init__, include_extras=True)
    keywords = {
        name: parameter
        for name, parameter in signature(strategy).parameters.items()
        if name not in ("directory", "keys")
    }
    assert len(keywords) >= 3 or strategy is FedProto, "it has no keys of its own"
    for name, parameter in keywords.items():
        assert alternatives(types[name]) == alternatives(fields[name].annotation), name
        assert parameter.default == (Parameter.empty if name == "num_clients" else fields[name].default), name


def test_all_invalid_keywords_are_reported_at_once() -> None:
    with pytest.raises(PbflError) as caught:
        TinyProto(num_clients=0, cps_dim=-1, batchsize=3)
    message = str(caught.value)
    assert "num-clients = 0" in message
    assert "cps-dim = -1" in message
    assert "unknown key 'batchsize'; did you mean 'batch-size'?" in message


OWN = """
from pydantic import Field
from pbfl_flwr.config import Group
from pbfl_flwr.methods.local import build
class Config(Group):
    momentum: float = Field(0.5, description="of the server")
    base_name: str = Field("", description="of something")
"""


def test_keywords_of_a_method_of_ones_own_are_its_settings_or_common_keys_but_never_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_momentum.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def run_keys(method: str = "with_momentum:build", **keys: Any) -> tuple[str, float]:
        settings = strategy_of(method, num_clients=2, **keys).settings
        return settings.run.method_settings, settings.training.momentum

    assert run_keys(base_name='a, "b"', learning_rate=0.5) == (r'base-name = "a, \"b\""', 0.0)
    assert run_keys(method_settings="momentum=0.7") == ("momentum=0.7", 0.0)
    assert run_keys(method_settings="momentum=0.7", momentum=0.9, base_name="c") == (
        'momentum=0.7,base-name = "c"',
        0.9,
    )
    with pytest.raises(PbflError) as caught:
        run_keys(momentum=0.7)
    assert str(caught.value) == (
        "momentum = 0.7: both 'with_momentum:build' and the run configuration have this key; "
        "method_settings='momentum=...' sets the method's, and then momentum=... the other one"
    )
    with pytest.raises(PbflError, match=r"^unknown key 'mu'"):
        run_keys(mu=1)
    with pytest.raises(PbflError, match=r"^method-settings = 'mu': must be a comma list of name=value"):
        run_keys(method_settings="mu")
    with pytest.raises(
        PbflError, match=r"^method-settings = .*Cannot overwrite|^method-settings = .*[Dd]uplicate"
    ):
        run_keys(method_settings="base-name='a'", base_name="b")
