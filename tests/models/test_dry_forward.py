"""A pass of two inputs before round 1 names what does not fit."""

import pytest
import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model, check_models
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.task import Task

TASK = Task(num_classes=10, feature_dim=24, input_shape=(1, 16, 16))


@pytest.mark.parametrize("spec", ["small-4", "heterogeneous-4", "cnn2,mlp5"])
def test_dry_forward_passes_where_everything_fits(spec: str) -> None:
    before = torch.get_rng_state()
    check_models(spec, TASK)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("layer", "replacement", "settings", "shape"),
    [
        # 16x16 grey: conv 32x12x12, pool 6x6, conv 64x2x2, pool 1x1, flat 64, hidden 24
        ("stages.0.0", nn.Conv2d(3, 32, 5), "Conv2d(3, 32, kernel_size=(5, 5)", "(2, 1, 16, 16)"),
        ("stages.1.0", nn.Conv2d(32, 64, 7), "Conv2d(32, 64, kernel_size=(7, 7)", "(2, 32, 6, 6)"),
        ("stages.1.1", nn.BatchNorm2d(9), "BatchNorm2d(9, ", "(2, 64, 2, 2)"),
        ("neck.1", nn.Linear(65, 24), "Linear(in_features=65, ", "(2, 64)"),
        ("head", nn.Linear(25, 10), "Linear(in_features=25, ", "(2, 24)"),
        ("stages.0.1", nn.MaxPool2d(99), "MaxPool2d(kernel_size=99, ", "(2, 32, 12, 12)"),
    ],
)
def test_dry_forward_names_the_layer_its_settings_and_its_input(
    layer: str, replacement: nn.Module, settings: str, shape: str
) -> None:
    model = build_model("cnn4", TASK, seed=0)
    parent, _, child = layer.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)
    with pytest.raises(PbflError) as caught:
        dry_forward("cnn4", model, TASK)
    assert str(caught.value).startswith(f"model 'cnn4', layer {layer}, {settings}")
    assert f" does not accept input of shape {shape} (" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("step", ["features", "head"])
def test_a_network_that_changes_its_input_is_refused(step: str) -> None:
    """Whatever reads the features after the head would read others: prototypes, their distances."""
    model = build_model("mlp", TASK, seed=0)
    if step == "head":
        model.head = nn.Sequential(nn.ReLU(inplace=True), model.head)
    else:
        model.stages[0] = nn.Sequential(nn.ReLU(inplace=True), model.stages[0])
    with pytest.raises(PbflError, match=rf"^model 'mlp', {step}: changes its input in place"):
        dry_forward("mlp", model, TASK)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("wants something else")


class Recovers(nn.Module):
    """Tries one layer, falls back to another, as optional fast paths do."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = Raises(), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        try:
            result: Tensor = self.fast(x)
        except ValueError:
            result = self.slow(x)
        return result


class FailsBetweenLayers(SplitModel):
    def features(self, inputs: Tensor) -> Tensor:
        super().features(inputs)
        raise RuntimeError("no layer of mine")


class Leaves(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        raise SystemExit(3)


class ToFloat64(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.double()


def infinite(layer: nn.Linear) -> nn.Linear:
    nn.init.constant_(layer.bias, float("inf"))
    return layer


class Forgets(nn.Module):
    def forward(self, x: Tensor) -> None:
        """Return nothing."""


NECK, HEAD = nn.Linear(256, 24), nn.Linear(24, 10)


@pytest.mark.parametrize(
    ("stage", "neck", "head", "message"),
    [
        (nn.Flatten(), nn.Linear(256, 23), nn.Linear(23, 10), r"features: expected output \(2, 24\), found \(2, 23\)"),
        (nn.Flatten(), NECK, nn.Linear(24, 9), r"head: expected output \(2, 10\), found \(2, 9\)"),
        (nn.Flatten(), nn.LSTM(256, 24), HEAD, r"features: expected output \(2, 24\), found tuple"),
        (nn.Flatten(), Forgets(), HEAD, r"features: expected output \(2, 24\), found None"),
        (nn.Flatten(), infinite(nn.Linear(256, 24)), HEAD, "'own', features: expected finite numbers"),
        (nn.Flatten(), NECK, infinite(nn.Linear(24, 10)), "'own', head: expected finite numbers"),
        (nn.Flatten(), nn.Sequential(NECK, ToFloat64()), HEAD, "features: expected float32 numbers, found float64"),
        (nn.Flatten(), NECK, nn.Sequential(HEAD, ToFloat64()), "head: expected float32 numbers, found float64"),
        (Leaves(), NECK, HEAD, "'own', features: raised SystemExit: 3"),
        # the layer that failed and not the one that recovered
        (Recovers(), nn.Linear(7, 24), HEAD, r"layer neck, Linear\(in_features=7, .* input of shape \(2, 256\)"),
    ],
)  # fmt: skip
def test_dry_forward_names_what_a_part_returns(
    stage: nn.Module, neck: nn.Module, head: nn.Module, message: str
) -> None:
    with pytest.raises(PbflError, match=message):
        dry_forward("own", SplitModel(TASK, [stage], neck, head), TASK)


def test_dry_forward_names_no_layer_for_an_error_between_layers() -> None:
    message = r"model 'own', features: does not accept input of shape \(2, 1, 16, 16\) \(no layer of mine\)"
    with pytest.raises(PbflError, match=message):
        dry_forward("own", FailsBetweenLayers(TASK, [Recovers()], NECK, HEAD), TASK)
