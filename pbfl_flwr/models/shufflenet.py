"""ShuffleNetV2 of torchvision. Features are averages after a ReLU, hence never negative."""

from torch import nn

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import global_average, image_shape, input_convolution, linear_head
from pbfl_flwr.task import Task


def shufflenet_v2(task: Task) -> SplitModel:
    """ShuffleNetV2 x1.0 of torchvision, no pretrained weights; last layer 1024, 1,253,604 body parameters."""
    from torchvision import models

    channels, _, _ = image_shape("shufflenet-v2", task)
    net = models.shufflenet_v2_x1_0(weights=None, num_classes=task.num_classes)
    net.conv1[0] = input_convolution(net.conv1[0], channels, fan_out=False)
    stages = [nn.Sequential(net.conv1, net.maxpool), net.stage2, net.stage3, net.stage4, net.conv5]
    return SplitModel(task, stages, global_average(1024, task), linear_head(task))
