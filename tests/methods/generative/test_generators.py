from typing import Any

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods.generative.generators import (
    GeneratorBroadcast,
    GeneratorState,
    Shape,
    initial_state,
    tensors_of,
    train_generator,
)
from pbfl_flwr.payloads import RejectedPayload, Weights
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


def test_bad_broadcasts_are_rejected():
    weights = Weights({"head.bias": torch.ones(4)}, 0)
    state = initial_state(weights, SHAPE, TASK, 3, used=True)
    tensors = state.taught.to_tensors()
    for bad in (torch.tensor([1, 2, 3]), torch.tensor([1, -1, 0, 0]), torch.ones(4)):
        with pytest.raises(RejectedPayload, match="label-counts"):
            GeneratorBroadcast.from_tensors({**tensors, "label-counts": bad}, TASK)
    with pytest.raises(PbflError, match="does not have the configured shape"):
        Shape(3, 9).load(TASK, state.generator.tensors)
