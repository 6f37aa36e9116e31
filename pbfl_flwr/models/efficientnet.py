"""EfficientNet-B0 of torchvision. Features are averages after a SiLU, hence above -0.28."""

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import global_average, image_shape, input_convolution, linear_head
from pbfl_flwr.task import Task


def efficientnet_b0(task: Task) -> SplitModel:
    """EfficientNet-B0 of torchvision, no pretrained weights; last layer 1280, 4,007,548 body parameters.

    As in the references its Dropout(0.2) is part of the head; unlike torchvision's it is not in-place, since the
    features are also needed without dropout.
    """
    from torchvision import models

    channels, _, _ = image_shape("efficientnet-b0", task)
    stages = models.efficientnet_b0(weights=None, num_classes=task.num_classes).features
    stages[0][0] = input_convolution(stages[0][0], channels, fan_out=True)
    return SplitModel(task, list(stages), global_average(1280, task), linear_head(task, dropout=0.2))
