from typing import Any

import pytest
import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods.generative.generators import (
    GenerativeState,
    GeneratorBroadcast,
    GeneratorState,
    Shape,
    initial_state,
    tensors_of,
    train_generator,
)
from pbfl_flwr.payloads import Prototypes, RejectedPayload, Weights
from pbfl_flwr.task import Task

TASK = Task(4, 6, (1, 16, 16))
SHAPE = Shape(3, 8)


def test_the_published_size():
    # noise 32, hidden 512, K = 100, d = 512: 132·512 + 512, BatchNorm 2·512, 512·512 + 512
    assert Shape(32, 512).parameters(Task(100, 512, (3, 32, 32))) == 331_776


def test_noise_is_uniform_and_features_follow_the_layers():
    network: Any = SHAPE.build(TASK, 1).eval()
    features, labels, noise = network.draw(torch.tensor([1, 0, 0, 1]), 8, torch.Generator().manual_seed(0))
    assert set(labels.tolist()) == {0, 3}
    assert noise.shape == (8, 3)
    assert 0 <= float(noise.min()) <= float(noise.max()) < 1
    linear, norm, _ = network.hidden
    inputs = torch.cat([noise, torch.eye(4)[labels]], dim=1)
    hidden = (linear(inputs) / (1 + norm.eps) ** 0.5).relu()  # fresh BatchNorm: mean 0, variance 1
    assert torch.allclose(features, network.output(hidden), atol=1e-6)
    assert Shape(3, 8, positive=True).build(TASK).draw(torch.ones(4), 5, torch.Generator())[0].min() >= 0


def test_training_goes_on_with_its_moments():
    """Two trainings of 3 steps equal one of 6; without the first one's moments they would not."""

    def loss(network):
        return (network(torch.tensor([0, 1, 2, 3]), torch.full((4, 3), 0.5)) - 1).square().mean()

    def train(state, steps):
        network = SHAPE.load(TASK, state.tensors)
        return train_generator(state, network, loss, steps, 0.05)

    start = GeneratorState(tensors_of(SHAPE.build(TASK, 2)))
    assert not start.trained
    six, mean = train(start, 6)
    three, _ = train(start, 3)
    kept, fresh = train(three, 3)[0], train(GeneratorState(three.tensors), 3)[0]
    assert six.trained
    assert mean < float(loss(SHAPE.load(TASK, start.tensors).train()).detach())
    for name, tensor in six.tensors.items():
        assert torch.allclose(kept.tensors[name], tensor, atol=1e-6)
    assert not torch.allclose(fresh.tensors["output.weight"], six.tensors["output.weight"], atol=1e-4)
    assert torch.equal(start.tensors["output.weight"], SHAPE.build(TASK, 2).output.weight)
    again = GeneratorState.from_tensors(three.to_tensors(), TASK)
    resumed = train(again, 3)[0]
    assert all(torch.equal(resumed.tensors[name], tensor) for name, tensor in kept.tensors.items())


def test_a_generator_that_diverges_is_an_error():
    start = GeneratorState(tensors_of(SHAPE.build(TASK, 2)))
    network = SHAPE.load(TASK, start.tensors)
    with pytest.raises(PbflError, match="generator diverged"):
        train_generator(start, network, lambda net: net.output.weight.sum() * float("nan"), 1, 0.1)


def test_labels_are_drawn_in_proportion():
    _, drawn, _ = SHAPE.build(TASK).draw(torch.tensor([3, 0, 1, 0]), 4000, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=4)
    assert counts[1] == counts[3] == 0
    assert 2850 < int(counts[0]) < 3150


def test_payloads_and_states_survive_the_wire():
    weights = Weights({"head.bias": torch.ones(4)}, 0)
    state = initial_state(weights, SHAPE, TASK, 3, used=True, prototypes=Prototypes.empty(4, 6))
    state = GenerativeState(state.taught, state.generator, {2: torch.arange(4)}, 0.25)
    again = GenerativeState.from_tensors(state.to_tensors(), TASK)
    assert again.loss == 0.25
    assert again.clients[2].tolist() == [0, 1, 2, 3]
    assert again.to_tensors().keys() == state.to_tensors().keys()
    assert state.taught.scalars() == 4 + sum(t.numel() for t in state.generator.tensors.values())
    assert GeneratorBroadcast.from_tensors(state.taught.to_tensors(), TASK).prototypes is not None
    unused = initial_state(weights, SHAPE, TASK, 3, used=False).taught
    assert GeneratorBroadcast.from_tensors(unused.to_tensors(), TASK).prototypes is None
    assert unused.scalars() == 4
    tensors = unused.to_tensors()
    for bad in (torch.tensor([1, 2, 3]), torch.tensor([1, -1, 0, 0]), torch.ones(4)):
        with pytest.raises(RejectedPayload, match="label-counts"):
            GeneratorBroadcast.from_tensors({**tensors, "label-counts": bad}, TASK)
    with pytest.raises(PbflError, match="does not have the configured shape"):
        Shape(3, 9).load(TASK, state.generator.tensors)
    assert isinstance(SHAPE.load(TASK, state.generator.tensors), nn.Module)
