"""GoogLeNet of torchvision. Features are averages after a ReLU, hence never negative."""

from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import global_average, image_shape, input_convolution, linear_head
from pbfl_flwr.task import Task

SMALLEST_IMAGE = 15  # leaves a pixel after five halvings


def googlenet(task: Task) -> SplitModel:
    """GoogLeNet of torchvision, no auxiliary heads; at least 15x15 pixels; last layer 1024, 5,599,904 body parameters.

    As in the references its Dropout(0.2) is part of the body, so features are noisy in training mode. Initial
    weights are truncated normal, as in torchvision.

    Raises:
        PbflError: if inputs are no images, or too small.
    """
    from torchvision import models

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
