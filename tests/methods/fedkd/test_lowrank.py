import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pbfl_flwr.methods.averaging import parameters_of
from pbfl_flwr.methods.fedkd.lowrank import check_shapes, compress, expand, truncated
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import LowRank, RejectedPayload
from pbfl_flwr.task import Task

TASK = Task(4, 6, (1, 16, 16))


def shapes_of(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


def factors(matrix, energy, how):
    result = truncated(matrix, energy, how)
    assert result is not None
    return result


def test_how_many_singular_values_by_hand():
    # σ² = 16, 9, 4, 1 of 30: shares 0.533, 0.833, 0.967, 1. "More than" the share decides, not "at least".
    matrix = torch.zeros(4, 40)
    matrix[range(4), range(4)] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    for energy, safe, coded in ((0.5, 1, 1), (0.6, 2, 2), (0.84, 3, 3), (0.97, None, 0), (1.0, None, 0)):
        result = truncated(matrix, energy, "safe")
        # k = 4 of a 4 x 40 matrix is 4·45 = 180 > 160 numbers: dense; as coded k = 4 is never tried and k becomes 0
        assert (result.sigma.shape[-1] if result else None) == safe
        assert factors(matrix, energy, "as-coded").sigma.shape[-1] == coded
    assert factors(matrix, 0.6, "safe").scalars() == 2 * (4 + 40 + 1)
    assert not factors(matrix, 0.99, "as-coded").product().any()


@pytest.mark.parametrize("how", ["safe", "as-coded"])
def test_exactly_the_share_is_not_enough(how):
    matrix = torch.zeros(5, 40)
    matrix[range(5), range(5)] = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0])  # σ² = 4 of 8
    assert factors(matrix, 0.5, how).sigma.tolist() == [2.0, 1.0]


def test_factors_of_the_tensors_own_size_are_not_sent():
    matrix = torch.ones(2, 3)  # k = 1: 2 + 1 + 3 numbers
    assert truncated(matrix, 0.9, "safe") is None
    assert factors(torch.ones(2, 4), 0.9, "safe").scalars() == 7


def test_ranks_of_the_published_network():
    """The 4-layer CNN at initialisation, K = 100, d = 512: spectra so flat that factors outweigh the tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {
            "conv1": nn.Conv2d(3, 32, 5),
            "conv2": nn.Conv2d(32, 64, 5),
            "hidden": nn.Linear(1600, 512),
            "head": nn.Linear(512, 100),
        }
    network = nn.ModuleDict(layers)
    weights = parameters_of(network)
    for energy, of_hidden, of_head in ((0.95, 430, 88), (0.965, 450, 92), (0.98, 473, 95)):
        coded = compress(weights, energy, "as-coded")
        ranks = {name: factors.sigma.shape[-1] for name, factors in coded.factors.items()}
        assert ranks == {
            "conv1.weight": 4,  # of 5, for each of the 32·3 kernels
            "conv2.weight": 4,
            "hidden.weight": of_hidden,
            "head.weight": of_head,
        }
        assert 1.14 <= coded.scalars() / sum(tensor.numel() for tensor in weights.values()) <= 1.25
    assert truncated(weights["head.weight"], 0.95, "safe") is None


def test_as_coded_loses_whole_tensors_of_a_residual_network():
    weights = parameters_of(build_model("resnet8", Task(10, 256, (3, 32, 32)), 0))
    coded = compress(weights, 0.98, "as-coded")
    lost = {name for name, factors in coded.factors.items() if factors.sigma.shape[-1] == 0}
    assert "head.weight" in lost
    assert {name for name in weights if weights[name].shape[2:] in ((1, 1), (3, 3))} <= lost


@pytest.mark.parametrize("energy", [0.95, 0.98])
def test_safe_bounds_error_and_size_on_a_residual_network(energy):
    weights = parameters_of(build_model("resnet8", Task(10, 64, (3, 32, 32)), 0))
    safe = compress(weights, energy, "safe")
    rebuilt = expand(safe, shapes_of(weights))
    for name, tensor in weights.items():
        error = float((rebuilt[name] - tensor).norm() / tensor.norm()) if bool(tensor.any()) else 0.0
        assert error < math.sqrt(1 - energy)
    assert safe.scalars() <= sum(tensor.numel() for tensor in weights.values())


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.floats(0.1, 1.0), st.integers(0, 99))
def test_safe_never_sends_more_and_crosses_the_wire(outputs, inputs, side, energy, seed):
    random = torch.Generator().manual_seed(seed)
    tensors = {
        "conv": torch.randn(outputs, inputs, side, side, generator=random),
        "bias": torch.randn(outputs, generator=random),
        "zero": torch.zeros(outputs, inputs),
    }
    sent = compress(tensors, energy, "safe", base=3, version=3, num_examples=5)
    assert sent.scalars() <= sum(tensor.numel() for tensor in tensors.values())
    arrived = LowRank.from_tensors(sent.to_tensors(), TASK)
    assert (arrived.base, arrived.version, arrived.num_examples) == (3, 3, 5)
    rebuilt = expand(arrived, shapes_of(tensors))
    for name, tensor in tensors.items():
        assert (rebuilt[name] - tensor).norm() <= math.sqrt(1 - energy) * tensor.norm() + 1e-4


def test_as_coded_keeps_kernels_apart():
    # two 3x3 kernels of rank one with σ = 2 and 1: one common k = 1 rebuilds both
    kernels = torch.zeros(2, 1, 3, 3)
    kernels[0, 0, 0, 1], kernels[1, 0, 2, 2] = 2.0, -1.0
    sent = compress({"conv": kernels}, 0.95, "as-coded")
    assert sent.factors["conv"].u.shape == (2, 1, 3, 1)
    assert torch.allclose(expand(sent, {"conv": kernels.shape})["conv"], kernels)


def test_rejects_factors_that_do_not_fit():
    good = compress(
        {"w": torch.outer(torch.arange(1.0, 6.0), torch.arange(1.0, 8.0))}, 0.9, "safe"
    ).to_tensors()
    shapes = {"w": torch.Size([5, 7])}
    check_shapes(LowRank.from_tensors(good, TASK), shapes)
    bad = [
        ({**good, "u.w": good["u.w"] * math.nan}, "NaN"),
        ({key: tensor for key, tensor in good.items() if key != "s.w"}, "are incomplete"),
        ({**good, "s.w": torch.ones(2)}, "do not fit"),
        ({**good, "s.w": -good["s.w"]}, "negative singular"),
        ({**good, "u.w": good["u.w"] * 5}, "norm above 1"),
        ({**good, "d.w": torch.ones(5, 7)}, "sent twice"),
        ({**good, "x.w": torch.ones(1)}, "unexpected tensor 'x.w'"),
        ({**good, "about": torch.tensor([-2, 0, 0])}, "'about'"),
        ({**good, "about": torch.tensor([0, 0])}, "'about'"),
    ]
    for tensors, reason in bad:
        with pytest.raises(RejectedPayload, match=reason):
            LowRank.from_tensors(tensors, TASK)
    with pytest.raises(RejectedPayload, match=r"shape \(5, 7\), expected \(7, 5\)"):
        check_shapes(LowRank.from_tensors(good, TASK), {"w": torch.Size([7, 5])})
    with pytest.raises(RejectedPayload, match="missing or unexpected"):
        check_shapes(LowRank.from_tensors(good, TASK), {**shapes, "b": torch.Size([1])})
