"""The base of all methods that average weights, and FedAvg, which is little else."""

from typing import Any

import pytest
import torch

from pbfl_flwr.config import parse
from pbfl_flwr.method import Round
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.methods.averaging import average, shared_parameters
from pbfl_flwr.methods.mutual import Conventions
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import RejectedPayload, Weights
from pbfl_flwr.task import Task


def test_average_weighs_by_samples_or_not():
    state = Weights({"w": torch.zeros(1)})
    uploads = {0: Weights({"w": torch.tensor([1.0])}, 1), 1: Weights({"w": torch.tensor([5.0])}, 3)}
    assert float(average(state, uploads, "samples").tensors["w"]) == 4.0  # (1·1 + 3·5)/4
    assert float(average(state, uploads, "uniform").tensors["w"]) == 3.0
    assert average(state, {}, "samples") is state
    assert average(state, {0: Weights({"w": torch.ones(1)}, 0)}, "samples") is state


@pytest.mark.parametrize(
    ("weighting", "names"),
    [
        ("samples", "fedavg fedprox fedala fedper fedrep feduv fedfa lg-fedavg fedgen fedmrl"),
        ("uniform", "fml fedkd fednh fesem"),
    ],
)
def test_how_each_method_weighs_unless_it_is_told_otherwise(make_method, weighting, names):
    for name in names.split():
        assert make_method(name).weighting == weighting, name
        other = "uniform" if weighting == "samples" else "samples"
        assert make_method(name, weighting=other).weighting == other, name


def test_weights_are_scored_as_they_come_and_own_networks_after_training():
    result = {name: build_method(parse({"method": name}, SECTIONS)).moment for name in METHODS}
    before = {name for name, moment in result.items() if moment == "before"}
    received = "fedavg fedprox fedper fedrep fedala fesem fednh fedfa lg-fedavg fedgen fedgh fedcpd fedmrl"
    assert before == set(received.split())
    assert result.keys() - before == {name for name, moment in result.items() if moment == "after"}


def test_the_three_parts_of_a_network():
    task = Task(10, 50, (1, 28, 28))
    model = build_model("cnn2", task, 0)
    numbers = {
        share: sum(p.numel() for p in shared_parameters(model, share).values())
        for share in ("all", "body", "stages", "head")
    }
    # convolutions 10·25+10 and 20·10·25+20; hidden layer 320·50+50; head 50·10+10
    assert numbers == {"all": 21_840, "body": 21_330, "stages": 5_280, "head": 510}
    assert list(shared_parameters(model, "head")) == [
        "head.weight",
        "head.bias",
    ]  # a dropout stands before it


@pytest.mark.parametrize(
    ("name", "own", "architecture", "travels"),
    [
        ("fedper", {"shared": "body"}, "cnn4", ("stages.", "neck.")),
        ("fedrep", {"shared": "stages"}, "cnn4", ("stages.",)),
        ("lg-fedavg", {}, "cnn4", ("head.",)),
        ("lg-fedavg", {}, "efficientnet-b0", ("head.",)),  # Sequential(Dropout, Linear)
    ],
)
def test_only_the_shared_part_travels_and_the_rest_stays(
    make_method, make_client, task, name, own, architecture, travels
):
    method, client = make_method(name, own=own, models="cnn4"), make_client(architecture=architecture)
    state = method.init(task, 11)
    before = {name: p.detach().clone() for name, p in client.model.named_parameters()}
    method.install(client, state)
    after = dict(client.model.named_parameters())
    assert {name for name in before if not torch.equal(after[name], before[name])} == {
        name for name in before if name.startswith(travels)
    }
    shared = shared_parameters(client.model, method.part)
    assert shared.keys() == state.tensors.keys()
    assert all(torch.equal(parameter, state.tensors[key]) for key, parameter in shared.items())
    sent = method.local_update(client, state).payload
    last = [*before][-1]  # the head's bias, which is trained jointly where it does not travel, too
    assert not torch.equal(after[last], before[last])
    assert (sent.num_examples, sent.scalars()) == (8, state.scalars())
    assert sent.tensors.keys() == state.tensors.keys()
    assert all(name.startswith(travels) for name in sent.tensors)
    new = method.aggregate(state, {0: sent}, Round(1, task, 1))  # one client: its own part
    assert all(torch.equal(new.tensors[name], tensor) for name, tensor in sent.tensors.items())


def test_batchnorm_buffers_never_travel(make_method, make_client, task):
    method, client = make_method("fedavg", models="resnet4"), make_client(architecture="resnet4")
    update = method.local_update(client, method.init(task, 0))
    assert set(update.payload.tensors) == {name for name, _ in client.model.named_parameters()}
    assert not any("running" in name or "tracked" in name for name in update.payload.tensors)


def test_other_shapes_and_names_are_rejected(make_method, task):
    method = make_method("fedavg")
    state = method.init(task, 0)
    missing = Weights({name: t for name, t in state.tensors.items() if name != "head.bias"})
    with pytest.raises(RejectedPayload, match=r"head\.bias"):
        method.validate(missing, state, task)
    with pytest.raises(RejectedPayload, match=r"head\.bias.*\(5,\)"):
        method.validate(Weights({**state.tensors, "head.bias": torch.zeros(5)}), state, task)


def test_methods_that_average_whole_bodies_ask_for_one_architecture():
    asked = {name for name in METHODS if build_method(parse({"method": name}, SECTIONS)).same_architecture}
    names = "fedavg fedprox fedper fedrep fedcpd fedala fesem feduv fednh fedfa fedpa"
    assert asked == set(names.split())


OWN, THEIRS = Conventions("batchmean", detach=True), Conventions("mean", detach=False)
CHOICES: dict[str, tuple[str, list[Any], dict[str, Any], Any]] = {
    # method: attribute, its value in each protocol, and how a key overrules them
    "fedkd": ("scheme", ["safe", "as-coded", "as-coded", "safe"], {"own": {"compression": "safe"}}, "safe"),
    "feddistill": ("form", ["paper", "ce-soft", "ce-soft", "ce-soft"], {"own": {"loss": "mse"}}, "mse"),
    "fedper": ("part", ["body", "body", "body", "stages"], {"own": {"shared": "body"}}, "body"),
    "fedrep": ("part", ["body", "body", "body", "stages"], {"own": {"shared": "stages"}}, "stages"),
    "lg-fedavg": ("weighting", ["samples"] * 3 + ["uniform"], {"weighting": "uniform"}, "uniform"),
    "fml": (
        "conventions",
        [OWN, THEIRS, THEIRS, OWN],
        {"kl_reduction": "batchmean", "detach_teacher": "yes"},
        OWN,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_protocols_choose_conventions_and_a_key_overrules_them(make_method, name):
    attribute, by_protocol, keys, overruled = CHOICES[name]
    for protocol, expected in zip(("clean", "htfl", "pfl", "fedproto"), by_protocol, strict=True):
        assert getattr(make_method(name, protocol=protocol), attribute) == expected
        assert getattr(make_method(name, protocol=protocol, **keys), attribute) == overruled
