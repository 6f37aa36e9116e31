"""Every method with classifiers of its clients' own depths: it runs, or says before round 1 why it does not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import METHODS
from pbfl_flwr.util.user_code import own_code
from tests.flower.inprocess import federation

LINEAR = {"fedgen", "fedgh", "fednh", "fedpa"}
"""Those that read the classifier as one linear layer."""
ALIKE = LINEAR | {"lg-fedavg", "fedavg", "fedprox", "fedala", "fesem", "feduv", "fedfa"}
"""Those that give the classifier to other clients."""

HUGE = "+65536-65536-65536-65536"

# So that the classifier is trained on what others sent, within the two rounds of a test.
AT_ONCE: dict[str, dict[str, Any]] = {"gfpl": {"gfpl.start": 1, "gfpl.interval": 1}}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_deeper_classifiers_or_refuses(method: str, tmp_path: Path) -> None:
    mixed, alike = "cnn4,cnn4+16,cnn4+12-8", "cnn4+16"
    refused = {alike} if method in LINEAR else {mixed} if method in ALIKE else set()
    for models in refused:
        fed = federation(tmp_path / "refused", method, models=models)
        with pytest.raises(PbflError, match=rf"^method '{method}' .*cnn4\+16") as caught:
            fed.run()
        assert "\n" not in str(caught.value)
        assert {number for _, number, _ in fed.grid.asked} == {0}, "somebody trained"
    if method in LINEAR:
        return
    fed = federation(tmp_path, method, models=alike if refused else mixed, **AT_ONCE.get(method, {})).run()
    for line in fed.strategy.history:
        assert line.failures == []
        assert all(value is not None for value in line.client_metrics.values())
        assert line.accuracy


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedcpd"])
def test_classifiers_that_do_not_travel_may_differ_but_not_the_bodies(make_method, task, method: str) -> None:
    make_method(method).check(task, ["cnn4", "cnn4+32", "cnn4+8-8"])
    with pytest.raises(PbflError, match=rf"'{method}'.*found cnn4, resnet4;"):
        make_method(method).check(task, ["cnn4+32", "resnet4"])


def test_fedcpd_on_fedavg_shares_the_classifier(make_method, task) -> None:
    with pytest.raises(PbflError, match=r"found cnn4, cnn4\+32;"):
        make_method("fedcpd", own={"base": "fedavg"}).check(task, ["cnn4", "cnn4+32"])


def test_lg_fedavg_takes_the_same_deeper_classifier_of_different_networks(
    make_method, task, make_client
) -> None:
    method = make_method("lg-fedavg", models="cnn4+5,cnn2+5")
    method.check(task, ["cnn4+5", "cnn2+5"])  # cnn2 has a dropout before it
    # M = 3 clients, both ways, d·5 and 5·K weights with d = 6, K = 4
    assert method.paper_scalars(task, [4] * 3) == 2 * 3 * (6 * 5 + 5 * 4)
    state = method.init(task, 7)
    client = make_client(0, "cnn2+5")
    sent = method.local_update(client, state).payload
    assert list(sent.tensors) == list(state.tensors)
    assert torch.equal(sent.tensors["head.1.weight"], client.model.head[3].weight)
    assert not torch.equal(sent.tensors["head.1.weight"], state.tensors["head.1.weight"])


@pytest.mark.parametrize(
    ("models", "clients", "message"),
    [
        ("cnn4+5", ["cnn4+5", "cnn2+6-5"], "found head.0.weight (6, 6), .* in 'cnn2+6-5'"),
        ("cnn4", ["cnn4+5"], "found .* in 'cnn4+5'"),  # the server has another one than all clients
        ("cnn4", [f"cnn4{HUGE}"], f"found .* in 'cnn4{HUGE}'"),  # no memory is taken for it
    ],
)
def test_lg_fedavg_names_a_classifier_that_differs(make_method, task, models, clients, message) -> None:
    with pytest.raises(PbflError, match=re.escape(message).replace(r"\.\*", ".*")):
        make_method("lg-fedavg", models=models).check(task, clients)


@pytest.mark.parametrize("method", ["fedavg", "fedcpd", "fednh", "fedpa", "fesem"])
def test_rejects_clients_with_another_network_than_the_server(make_method, task, method) -> None:
    own = {"base": "fedavg"} if method == "fedcpd" else {}
    with pytest.raises(
        PbflError, match=r"needs one architecture on all clients, found cnn4, cnn4\+16; set models"
    ):
        make_method(method, models="cnn4", own=own).check(task, ["cnn4+16", "cnn4+16"])


def test_the_page_of_models_names_the_methods_that_limit_classifiers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [
        line.split("|")[1:-1] for line in page.partition("## Classifiers")[2].splitlines() if line[:1] == "|"
    ]
    result = {first.strip(): sorted(re.findall("`(.+?)`", second)) for first, second in rows[2:]}
    assert result == {
        "any, each client its own": [],  # all others
        "any, the same on all clients": sorted(ALIKE - LINEAR),
        "linear": sorted(LINEAR),
    }


@pytest.mark.parametrize("method", sorted(LINEAR))
def test_a_classifier_that_only_looks_linear_is_refused(make_method, task, method: str) -> None:
    name = "tests.methods.tiny_nets:with_a_cosine_head"
    model = own_code(name, [name])
    with pytest.raises(PbflError, match="needs a linear one in every model; that of 'tests"):
        make_method(method, models=model).check(task, [model])
    name = "tests.methods.tiny_nets:normed"
    linear = own_code(name, [name])
    make_method(method, models=linear).check(task, [linear])
