import pytest
import torch
from torch import nn

from pbfl_flwr.methods.fedcpd.attention import (
    CBAM,
    MapDistillation,
    MapMemory,
    check_maps,
    convolutional,
    map_channels,
)
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import random_inputs
from pbfl_flwr.task import Task
from tests.methods.tiny_nets import normed
from tests.models.kinds import EXAMPLES, WITHOUT_PLACES, is_one_of, shapes, takes_images, task_of

IMAGES = Task(4, 6, (3, 16, 16))


def task_for(name):
    return IMAGES if takes_images(name) else task_of(name, 6, shapes(name)[-1], 4)


IMAGE_MODELS = (
    "cnn4",
    "resnet6",
    "resnet50",
    "googlenet",
    "shufflenet-v2",
    "mobilenet-v2",
    "efficientnet-b0",
)
CONVOLUTIONAL = [(name, task_for(name)) for name in (*IMAGE_MODELS, "har-cnn", "har-resnet", "textcnn")]


def maps_of(name, task, batch=2):
    model = build_model(name, task, 0)
    inputs = random_inputs(task, batch, seed=1)
    return model, inputs, convolutional(model.feature_maps(inputs))


@pytest.mark.parametrize(("name", "task"), CONVOLUTIONAL)
def test_distillation_trains_every_stage_and_itself(name, task):
    model, inputs, maps = maps_of(name, task)
    assert [x.shape[1] for x in maps] == map_channels(model, task)
    distillation = MapDistillation(map_channels(model, task), width=8)
    assert all(CBAM(x.shape[1])(x).shape == x.shape for x in maps)
    teacher = MapMemory(model.stages, build_model(name, task, 1).stages.state_dict(), distillation.attention)
    distillation(maps, *teacher(inputs)).backward()
    assert [n for n, p in model.stages.named_parameters() if p.grad is None] == []
    assert [n for n, p in distillation.named_parameters() if p.grad is None] == []
    assert all(p.grad is None and not p.requires_grad for p in teacher.stages.parameters())


@pytest.mark.parametrize("name", [name for name in EXAMPLES if is_one_of(name, WITHOUT_PLACES)])
def test_states_of_sequences_are_no_maps_with_places(name):
    task = task_of(name, 8, shapes(name)[0])
    assert map_channels(build_model(name, task, 0), task) == []


def test_cnn4_on_28x28_has_the_published_maps():
    _, _, maps = maps_of("cnn4", Task(10, 512, (1, 28, 28)))
    assert [tuple(x.shape[1:]) for x in maps] == [(32, 12, 12), (64, 4, 4)]
    hidden = [CBAM(c).channel_gate[0].out_features for c in (32, 64, 10)]
    assert hidden == [2, 4, 1]  # C/16, at least one
    # 32·2 + 2, 2·32 + 32, and 2·7·7 without a bias
    assert sum(p.numel() for p in CBAM(32).parameters()) == 66 + 96 + 98


def test_seeded_and_without_a_trace_in_the_global_state():
    before = torch.random.get_rng_state()
    one, two, other = (MapDistillation([2, 3], width=4, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second, third = (dict(m.named_parameters())["fuse_maps.unify.0.weight"] for m in (one, two, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_looking_at_maps_changes_nothing():
    model = build_model("resnet4", IMAGES, 0).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert map_channels(model, IMAGES) == [64, 64]
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert map_channels(build_model("mlp5", IMAGES, 0), IMAGES) == []
    assert map_channels(nn.Linear(2, 2), IMAGES) == []


def test_maps_are_compared_without_dropout():
    model = normed(IMAGES)
    model.neck = nn.Sequential(model.neck, nn.Dropout(0.5))
    check_maps("normed", model.train(), IMAGES)
