"""Networks for sensor windows: their inputs, their maps, and what they compute, by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model, check_models
from pbfl_flwr.models.contract import is_deterministic, random_inputs
from pbfl_flwr.models.registry import FAMILIES
from pbfl_flwr.task import Task

HAR = Task(num_classes=6, feature_dim=16, input_shape=(9, 128))
NAMES = ["har-cnn", "har-gru", "har-resnet", "harcnn-1-1", "harcnn-2-1", "harcnn-3-1"]


def task(*shape: int) -> Task:
    return Task(num_classes=6, feature_dim=16, input_shape=shape)


@pytest.mark.parametrize("shape", [(9,), (9, 4), (3, 32, 32), (3, 1, 1, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_an_input_that_is_no_window_is_one_line(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        PbflError, match=rf"^model '{name}', first layer: expected windows .* found input shape"
    ):
        build_model(name, task(*shape), seed=0)


@pytest.mark.parametrize(
    ("name", "shortest"),
    [
        ("har-cnn", 8),
        ("har-gru", 8),
        ("har-resnet", 8),
        # backwards from one place: 2 before the pooling, (2 - 1)·stride + kernel before the convolution, and so on
        ("harcnn-1-1", 10),
        ("harcnn-1-3", 12),
        ("harcnn-2-1", 28),
        ("harcnn-2-3", 78),
        ("harcnn-3-1", 36),
        ("harcnn-3-2", 127),
    ],
)
def test_the_shortest_window_is_accepted_and_named_in_the_error(name: str, shortest: int) -> None:
    with pytest.raises(PbflError, match=rf"'{name}', .* of length {shortest} or more, found input shape"):
        build_model(name, task(3, shortest - 1), seed=0)
    check_models(name, task(3, shortest))
    assert build_model(name, task(3, shortest), seed=0).train()(torch.randn(1, 3, shortest)).isfinite().all()


def test_a_fourth_block_is_refused() -> None:
    with pytest.raises(PbflError, match=r"^model 'harcnn-4-1': found 4 blocks, must be 1 to 3$"):
        check_models("harcnn-2-1,harcnn-4-1", HAR)


@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_are_read_alike(name: str) -> None:
    x = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(0))
    flat, tall = build_model(name, task(9, 40), seed=0), build_model(name, task(9, 1, 40), seed=0)
    with torch.no_grad():
        assert torch.equal(flat(x), tall(x.unsqueeze(2)))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("har-cnn", [(32, 64), (64, 32), (128, 16)]),
        ("har-gru", [(64,)]),
        ("har-resnet", [(32, 64), (32, 64), (64, 32), (128, 16)]),
        # 128 - 8 = 120, halved; 60 - 8 = 52, halved
        ("harcnn-2-1", [(32, 60), (64, 26)]),
        # (128 - 9)//3 + 1 = 40, halved; (20 - 9)//3 + 1 = 4, halved
        ("harcnn-2-3", [(32, 20), (64, 2)]),
        ("harcnn-3-1", [(32, 62), (64, 29), (128, 12)]),
    ],
)
def test_maps_of_128_readings(name: str, sizes: list[tuple[int, ...]]) -> None:
    maps = build_model(name, HAR, seed=0).feature_maps(random_inputs(HAR, 2))
    assert [tuple(x.shape[1:]) for x in maps] == sizes


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("harcnn-1-2", [(32, 9)]),
        ("harcnn-2-1", [(32, 9), (64, 9)]),
        ("harcnn-3-2", [(32, 5), (64, 5), (128, 5)]),
    ],
)
def test_harcnn_draws_and_computes_as_convolutions_over_a_height_of_one(
    name: str, reference: list[tuple[int, int]]
) -> None:
    stride = int(name[-1])
    torch.manual_seed(3)
    blocks: list[nn.Module] = []
    before = 9
    for channels, kernel in reference:
        blocks += [nn.Conv2d(before, channels, (1, kernel), stride), nn.ReLU(), nn.MaxPool2d((1, 2), 2)]
        before = channels
    nn.Linear(26 * before, 1024), nn.Linear(1024, 512), nn.Linear(512, 6)  # the classifier that gives way
    head = nn.Linear(16, 6)
    x = random_inputs(HAR, 5)
    features = nn.AdaptiveAvgPool1d(16)(nn.Sequential(*blocks)(x.unsqueeze(2)).flatten(1))
    model = build_model(name, HAR, seed=3)
    assert torch.equal(model.features(x), features)
    assert torch.equal(model(x), head(features))


def test_har_gru_by_the_loop_of_its_equations() -> None:
    model: Any = build_model("har-gru", HAR, seed=0)
    x = random_inputs(HAR, 2, seed=1)
    gru = model.stages[0][2].gru
    state, outputs = torch.zeros(2, 64), list[Tensor]()
    for step in x.unflatten(2, (64, 2)).mean(dim=3).unbind(2):
        given = (step @ gru.weight_ih_l0.T + gru.bias_ih_l0).chunk(3, dim=1)
        kept = (state @ gru.weight_hh_l0.T + gru.bias_hh_l0).chunk(3, dim=1)
        reset, update = (torch.sigmoid(given[gate] + kept[gate]) for gate in (0, 1))
        state = (1 - update) * torch.tanh(given[2] + reset * kept[2]) + update * state
        outputs.append(state)
    mean = torch.stack(outputs).mean(dim=0)
    centred = mean - mean.mean(dim=1, keepdim=True)
    normal = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()  # LayerNorm as it begins
    expected = model.neck[1](normal).relu()
    torch.testing.assert_close(model.features(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_features_of_a_sample_do_not_depend_on_its_batch(name: str) -> None:
    model, x = build_model(name, HAR, seed=0).train(), random_inputs(HAR, 4)
    torch.testing.assert_close(model.features(x)[:1], model.features(x[:1]))
    assert is_deterministic(model) == (
        name not in {"har-gru", "har-resnet"}
    )  # layers of their own are not known


def test_families_are_of_phone_size() -> None:
    for name in FAMILIES["sensor-4"] + FAMILIES["htfe-sen-8"]:
        model = build_model(name, Task(6, 512, (9, 128)), seed=0)
        assert sum(p.numel() for p in model.parameters()) < 500_000


def test_htfllibs_families_grow() -> None:
    assert FAMILIES["htfe-sen-2"] == ("harcnn-2-1", "harcnn-2-2")
    assert FAMILIES["htfe-sen-3"] == (*FAMILIES["htfe-sen-2"], "harcnn-2-3")
    assert FAMILIES["htfe-sen-5"] == (*FAMILIES["htfe-sen-3"], "harcnn-1-1", "harcnn-3-1")
    assert sorted(FAMILIES["htfe-sen-8"]) == sorted(
        (*FAMILIES["htfe-sen-5"], "harcnn-1-2", "harcnn-1-3", "harcnn-3-2")
    )
