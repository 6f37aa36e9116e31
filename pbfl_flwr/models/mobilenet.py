"""MobileNetV2 of torchvision. Features are averages after a ReLU6, hence within [0, 6] in evaluation."""

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import global_average, image_shape, input_convolution, linear_head
from pbfl_flwr.task import Task

# Stem, the seven groups of inverted residuals in the paper's table 2, last 1x1 convolution: 19 layers.
GROUP_LENGTHS = (1, 1, 2, 3, 4, 3, 3, 1, 1)


def mobilenet_v2(task: Task) -> SplitModel:
    """MobileNetV2 of torchvision, no pretrained weights; last layer 1280, 2,223,872 body parameters.

    As in the references its Dropout(0.2) is part of the body, so features are noisy in training mode.
    """
    from torchvision import models

    channels, _, _ = image_shape("mobilenet-v2", task)
    layers = models.mobilenet_v2(weights=None, num_classes=task.num_classes).features
    layers[0][0] = input_convolution(layers[0][0], channels, fan_out=True)
    stages = []
    start = 0
    for length in GROUP_LENGTHS:
        stages.append(layers[start : start + length])
        start += length
    return SplitModel(task, stages, global_average(1280, task, dropout=0.2), linear_head(task))
