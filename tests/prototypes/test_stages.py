import math
from typing import Any

import pytest
import torch

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import settings_in
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.prototypes.stages import Stages, scale_by_counts


def test_scale_by_counts_by_hand():
    scaled = scale_by_counts(torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 0.0]]), torch.tensor([3, 4, 0]))
    assert scaled.tolist() == [[3, -6], [2, 0], [0, 0]]
    assert scaled.dtype == torch.float32


def test_a_run_records_what_the_method_made_of_auto():
    keys = parse({"method": "protonorm", "upscale": 3.0}, SECTIONS)
    settings = settings_in(build_method(keys))
    assert keys.prototypes.alignment == keys.prototypes.regularizer_weight == "auto"
    assert {name: settings[f"stages.{name}"] for name in ("alignment", "regularizer_weight", "upscale")} == {
        "alignment": "thomson",
        "regularizer_weight": 10.0,
        "upscale": 3.0,
    }
    assert settings_in(build_method(parse({"method": "fedavg"}, SECTIONS)))["weighting"] == "samples"
    assert (
        settings_in(Stages.model_construct(upscale=math.inf))["upscale"] == "inf"
    )  # run.json stays readable


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("fedproto", {}),
        ("fedtgp", {}),
        ("tinyproto", {"aggregation": "aps-sum", "cps_dim": 50}),
        ("protonorm", {"alignment": "thomson", "upscale": 100.0}),
    ],
)
def test_what_auto_stands_for_in_each_prototype_method(method: str, named: dict[str, Any]) -> None:
    usual = {"regularizer_weight": 10.0, "regularizer_form": "mse", "collect": "post", "aggregation": "mean"}
    usual |= {"cps_dim": 0, "cpkd": "off", "alignment": "off", "upscale": 1.0}
    settings = settings_in(build_method(parse({"method": method}, SECTIONS)))
    assert {name: settings[f"stages.{name}"] for name in usual} == {**usual, **named}


def test_an_unknown_rule_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        PbflError, match=r"^aggregation = 'medain': must be one of auto, mean, .*did you mean 'median'"
    ):
        build_method(parse({"aggregation": "medain"}))
