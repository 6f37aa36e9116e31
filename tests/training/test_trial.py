"""The step before round 1, on networks whose gradients are huge with two samples."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from pbfl_flwr.config import parse
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.task import Task
from pbfl_flwr.training.trial import try_step

K, SHAPE = 10, (3, 32, 32)
TASK = Task(K, 512, SHAPE)
SETTINGS = parse({"method": "fedproto", "models": "efficientnet-b0"}, SECTIONS)


def smooth_images(client: int) -> ClientData:
    """Four images of large areas, unlike noise."""
    random = torch.Generator().manual_seed(client)
    coarse = torch.rand((4, 3, 4, 4), generator=random) * 255
    images = torch.nn.functional.interpolate(coarse, SHAPE[1:], mode="bilinear").to(torch.uint8)
    train = Shard(images, torch.tensor([0, 1, 2, 3]))
    names = tuple(map(str, range(K)))
    scale, shift = torch.full((3, 1, 1), 1 / 127.5), torch.full((3, 1, 1), -1.0)
    return ClientData(train, Shard(images[:2], torch.tensor([0, 1])), K, names, scale, shift)


def client_of(model: SplitModel, seed: int) -> Client:
    return Client(seed, 1, TASK, model, smooth_images(seed), SETTINGS.training)


@pytest.mark.parametrize("seed", [2, 5])
def test_batch_norm_over_two_values_in_many_layers_is_no_reason_to_refuse_a_network(seed: int) -> None:
    """At 32x32 EfficientNet-B0's deeper half sees one pixel: gradients of 1e5 to 1e10 with two samples."""
    client = client_of(build_model("efficientnet-b0", TASK, seed), seed)
    try_step("efficientnet-b0", build_method(SETTINGS), client)


@pytest.mark.parametrize("method", ["fedproto", "local", "fedgh", "fedrep", "gfpl"])
def test_a_head_that_changes_features_only_in_training_is_refused(method: str) -> None:
    model = build_model("mlp", TASK, 0)
    model.head = nn.Sequential(nn.Dropout(inplace=True), model.head)
    settings = parse({"method": method, "models": "mlp"}, SECTIONS)
    with pytest.raises(
        PbflError, match=rf"^model 'mlp', a step of method '{method}' on 2 .* its head changes its"
    ):
        try_step("mlp", build_method(settings), client_of(model, 0))
    model.head[0] = nn.Dropout()
    try_step("mlp", build_method(settings), client_of(model, 0))


def test_weights_that_cannot_travel_are_refused() -> None:
    model = build_model("mlp", TASK, 0)
    model.places = nn.Parameter(torch.arange(3), requires_grad=False)
    settings = parse({"method": "fedavg", "models": "mlp"}, SECTIONS)
    with pytest.raises(
        PbflError, match=r"^model 'mlp', a step of method 'fedavg' .*'w.places' is torch.int64, exp"
    ):
        try_step("mlp", build_method(settings), client_of(model, 0))
    try_step("mlp", build_method(SETTINGS), client_of(model, 0))


def test_what_keeps_no_count_of_changes_is_not_refused() -> None:
    """A scripted head takes no hooks, and tensors of inference mode have no versions."""
    model = build_model("mlp", TASK, 0)
    settings = parse({"method": "local", "models": "mlp"}, SECTIONS)
    method = build_method(settings)
    update, seen = type(method).local_update, []

    def watching(method: Any, client: Client, down: Any) -> Any:
        with torch.inference_mode():
            seen.append(client.model.head(torch.zeros(2, 512)))
        return update(method, client, down)

    with patch.object(type(method), "local_update", watching):
        try_step("mlp", method, client_of(model, 0))
    assert len(seen) == 2
    model.head = torch.jit.script(model.head)
    try_step("mlp", method, client_of(model, 0))


def test_predictors_are_tried_without_and_with_what_the_step_has_kept() -> None:
    method, kept = build_method(SETTINGS), []
    predictors = type(method).predictors

    def watching(method: Any, client: Client, down: Any) -> Any:
        kept.append("present" in client.memory)
        return predictors(method, client, down)

    with patch.object(type(method), "predictors", watching):
        try_step("mlp", method, client_of(build_model("mlp", TASK, 0), 0))
    assert kept == [False, True] * 2  # for each number of samples


def test_a_network_that_exits_while_it_trains_is_named() -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    model = build_model("cnn4", TASK, 0)
    model.head.register_full_backward_hook(leave)
    with pytest.raises(
        PbflError, match=r"^model 'cnn4', a step of method 'fedproto' on 2 samples: SystemExit: 3"
    ):
        try_step("cnn4", build_method(SETTINGS), client_of(model, 0))


@pytest.mark.parametrize("metric", [torch.tensor(0.5), "0.5", None, float("nan"), 1])
def test_metrics_that_no_report_can_hold_are_refused(metric: Any) -> None:
    """NaN travels no further, but with so few samples it may be right."""
    method, client = build_method(SETTINGS), client_of(build_model("mlp", TASK, 0), 0)
    update = type(method).local_update

    def measuring(*arguments: Any) -> Any:
        return replace(update(*arguments), metrics={"mine": metric})

    with patch.object(type(method), "local_update", measuring):
        if isinstance(metric, int | float):
            try_step("mlp", method, client)
            return
        says = r"^model 'mlp', a step of .* on 2 samples: .*measuring \(test_trial.py:\d+\) returned .*'mine' is of"
        with pytest.raises(PbflError, match=says):
            try_step("mlp", method, client)
