"""A body in reduced precision is the same function, more roughly, and hands on float32."""

import pytest
import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.precision import set_precision
from pbfl_flwr.task import Task

TASK = Task(5, 24, (3, 32, 32))


def test_reduced_precision_is_not_left_out_in_silence() -> None:
    with pytest.raises(
        PbflError, match=r"precision = 'bfloat16': Linear is not a .*SplitModel; allowed .* 'float32'"
    ):
        set_precision(nn.Linear(2, 2), "bfloat16")


@pytest.mark.parametrize("name", ["cnn4", "mobilenet-v2", "mlp5"])
def test_reduced_precision_stays_close_and_hands_on_float32(name: str) -> None:
    task = Task(5, 24, (64,)) if name == "mlp5" else TASK
    plain = build_model(name, task, 0).eval()
    reduced = set_precision(optimize_layout(build_model(name, task, 0), "channels-last"), "bfloat16").eval()
    inputs = torch.randn(16, *task.input_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, result = plain.features(inputs), reduced.features(inputs)
        maps, features = reduced.maps_and_features(inputs)
        exact = plain.feature_maps(inputs)
    assert torch.equal(features, result)  # both ways through the body compute alike
    assert [item.shape for item in maps] == [item.shape for item in exact]
    assert {item.dtype for item in maps} == {torch.float32}
    assert not any(torch.equal(*pair) for pair in zip(maps, exact, strict=True))
    assert result.dtype == reduced(inputs).dtype == torch.float32
    assert not torch.equal(result, wanted)  # or nothing was reduced
    assert float((result - wanted).norm() / wanted.norm()) < 0.05
    assert {parameter.dtype for parameter in reduced.parameters()} == {torch.float32}
