"""Bodies that torchvision gives, without pretrained weights: MobileNetV2, ShuffleNetV2, EfficientNet-B0, GoogLeNet.

Features are averages after the last activation: of MobileNetV2 (ReLU6) within [0, 6] in evaluation, of ShuffleNetV2
and GoogLeNet (ReLU) never negative, of EfficientNet-B0 (SiLU) above -0.28.
"""

from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import (
    global_average,
    image_shape,
    input_convolution,
    linear_head,
    torchvision_models,
)
from pbfl_flwr.task import Task

# MobileNetV2: stem, the seven groups of inverted residuals in the paper's table 2, last 1x1 convolution: 19 layers.
GROUP_LENGTHS = (1, 1, 2, 3, 4, 3, 3, 1, 1)
SMALLEST_IMAGE = 15  # of GoogLeNet: leaves a pixel after five halvings


def mobilenet_v2(task: Task) -> SplitModel:
    """MobileNetV2 of torchvision; last layer 1280.

    As in the references its Dropout(0.2) is part of the body, so features are noisy in training mode.
    """
    models = torchvision_models("mobilenet-v2")

    channels, _, _ = image_shape("mobilenet-v2", task)
    layers = models.mobilenet_v2(weights=None, num_classes=task.num_classes).features
    layers[0][0] = input_convolution(layers[0][0], channels, fan_out=True)
    stages = []
    start = 0
    for length in GROUP_LENGTHS:
        stages.append(layers[start : start + length])
        start += length
    return SplitModel(task, stages, global_average(1280, task, dropout=0.2), linear_head(task))


def shufflenet_v2(task: Task) -> SplitModel:
    """ShuffleNetV2 x1.0 of torchvision; last layer 1024."""
    models = torchvision_models("shufflenet-v2")

    channels, _, _ = image_shape("shufflenet-v2", task)
    net = models.shufflenet_v2_x1_0(weights=None, num_classes=task.num_classes)
    net.conv1[0] = input_convolution(net.conv1[0], channels, fan_out=False)
    stages = [nn.Sequential(net.conv1, net.maxpool), net.stage2, net.stage3, net.stage4, net.conv5]
    return SplitModel(task, stages, global_average(1024, task), linear_head(task))


def efficientnet_b0(task: Task) -> SplitModel:
    """EfficientNet-B0 of torchvision; last layer 1280.

    As in the references its Dropout(0.2) is part of the head; unlike torchvision's it is not in-place, since the
    features are also needed without dropout.
    """
    models = torchvision_models("efficientnet-b0")

    channels, _, _ = image_shape("efficientnet-b0", task)
    stages = models.efficientnet_b0(weights=None, num_classes=task.num_classes).features
    stages[0][0] = input_convolution(stages[0][0], channels, fan_out=True)
    return SplitModel(task, list(stages), global_average(1280, task), linear_head(task, dropout=0.2))


def googlenet(task: Task) -> SplitModel:
    """GoogLeNet of torchvision, no auxiliary heads; from 15x15 pixels; last layer 1024.

    As in the references its Dropout(0.2) is part of the body, so features are noisy in training mode. Initial
    weights are truncated normal, as in torchvision.

    Raises:
        PbflError: if inputs are no images, or too small.
    """
    models = torchvision_models("googlenet")

    channels, height, width = image_shape("googlenet", task)
    if min(height, width) < SMALLEST_IMAGE:
        raise PbflError(
            f"model 'googlenet', first layer: expected images of at least {SMALLEST_IMAGE}x{SMALLEST_IMAGE} pixels, "
            f"found {height}x{width} (input shape {task.input_shape})"
        )
    net = models.googlenet(weights=None, num_classes=task.num_classes, aux_logits=False, init_weights=True)
    if channels != net.conv1.conv.in_channels:
        net.conv1.conv = input_convolution(net.conv1.conv, channels, fan_out=False)
        nn.init.trunc_normal_(net.conv1.conv.weight, mean=0.0, std=0.01, a=-2, b=2)
    stages = [
        nn.Sequential(net.conv1, net.maxpool1),
        nn.Sequential(net.conv2, net.conv3, net.maxpool2),
        nn.Sequential(net.inception3a, net.inception3b),
        nn.Sequential(
            net.maxpool3, net.inception4a, net.inception4b, net.inception4c, net.inception4d, net.inception4e
        ),
        nn.Sequential(net.maxpool4, net.inception5a, net.inception5b),
    ]
    return SplitModel(task, stages, global_average(1024, task, dropout=0.2), linear_head(task))
