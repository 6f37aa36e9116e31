"""docs/examples/networks.py: networks of other packages as models of a run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import own_code

TASK = Task(4, 64, (3, 32, 32))


def named_here(name: str) -> str:
    """A network of the file, as a configuration names it."""
    spec = f"networks:{name}"
    return own_code(spec, [spec])


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the examples be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "docs" / "examples"))


def test_a_network_of_torchvision_gives_the_features_before_its_classifier() -> None:
    from torchvision.models import mobilenet_v3_small

    wide = Task(4, 576, (3, 32, 32))
    model = build_model(named_here("mobilenet_v3"), wide, 0)
    dry_forward("mobilenet_v3", model, wide)
    net = mobilenet_v3_small().eval()
    own = {name: tensor for name, tensor in net.state_dict().items() if name.startswith("features.")}
    renamed = {name.replace("features.", "stages.", 1): tensor for name, tensor in own.items()}
    lacking, strange = model.load_state_dict(renamed, strict=False)
    assert (set(lacking), strange) == ({"head.weight", "head.bias"}, [])
    net.classifier = nn.Sequential()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().features(images), net(images))
    assert len(model.feature_maps(images)) == len(net.features)


def test_a_network_of_timm_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timm:
        @staticmethod
        def create_model(name: str, *, pretrained: bool, in_chans: int, num_classes: int) -> nn.Module:
            assert (name, pretrained, num_classes) == ("ghostnet_100", False, 0)
            net: Any = nn.Sequential(nn.Conv2d(in_chans, 20, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            net.num_features = 20
            assert isinstance(net, nn.Module)
            return net

    monkeypatch.setitem(sys.modules, "timm", Timm)
    dry_forward("ghostnet", build_model(named_here("ghostnet"), TASK, 0), TASK)
