"""Residual networks with torchvision's stem (7x7 stride 2, BatchNorm, ReLU, 3x3 max-pooling stride 2).

In the stem the pooling precedes the ReLU, which gives bit-identical outputs and gradients for a quarter of the work.
resnet4 to resnet10 have one BasicBlock per width: 64; 64-128; 64-128-256; 64-128-256-512. ResNet-8 is client 0 of
HtFLlib's heterogeneous family. Features are averages after a ReLU, hence never negative.
"""

from functools import partial

from torch import Tensor, nn

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import (
    global_average,
    image_shape,
    input_convolution,
    linear_head,
    replaced_classifier,
    torchvision_models,
)
from pbfl_flwr.task import Task


def _of_torchvision(name: str, task: Task) -> SplitModel:
    models = torchvision_models(name)

    channels, _, _ = image_shape(name, task)
    net = getattr(models, name)(weights=None, num_classes=task.num_classes)
    stem = nn.Sequential(input_convolution(net.conv1, channels, fan_out=True), net.bn1, net.maxpool, net.relu)
    stages = [stem, net.layer1, net.layer2, net.layer3, net.layer4]
    return SplitModel(task, stages, global_average(net.fc.in_features, task), linear_head(task))


def _one_block_each(name: str, widths: tuple[int, ...], task: Task) -> SplitModel:
    channels, _, _ = image_shape(name, task)
    stem = nn.Sequential(
        nn.Conv2d(channels, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.MaxPool2d(3, 2, 1),
        nn.ReLU(inplace=True),
    )
    stages: list[nn.Module] = [stem]
    before = 64
    for width in widths:
        stages.append(_BasicBlock(before, width))
        before = width
    replaced_classifier(before, task)
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return SplitModel(task, stages, global_average(before, task), linear_head(task))


class _BasicBlock(nn.Module):
    """Torchvision's BasicBlock, with its names; importing torchvision takes each process 2 s, as long as torch."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride, shortcut = 1, None
        if before != width:
            stride = 2
            shortcut = nn.Sequential(nn.Conv2d(before, width, 1, 2, bias=False), nn.BatchNorm2d(width))
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Return (B, width, h', w') for (B, before, h, w)."""
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(maps)))))
        inner += maps if self.downsample is None else self.downsample(maps)
        output: Tensor = self.relu(inner)
        return output


resnet4 = partial(_one_block_each, "resnet4", (64,))
resnet6 = partial(_one_block_each, "resnet6", (64, 128))
resnet8 = partial(_one_block_each, "resnet8", (64, 128, 256))
resnet10 = partial(_one_block_each, "resnet10", (64, 128, 256, 512))
resnet18 = partial(_of_torchvision, "resnet18")
resnet34 = partial(_of_torchvision, "resnet34")
resnet50 = partial(_of_torchvision, "resnet50")
resnet101 = partial(_of_torchvision, "resnet101")
resnet152 = partial(_of_torchvision, "resnet152")
