"""Networks of torchvision and timm for ``models=networks:mobilenet_v3,networks:ghostnet``.

``PYTHONPATH=docs/examples pbfl run --set dataset=cifar10 --set models=networks:mobilenet_v3,networks:ghostnet``
"""

from torch import nn

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import impose_width
from pbfl_flwr.task import Task


def mobilenet_v3(task: Task) -> SplitModel:
    """Torchvision's small MobileNetV3, for images of three channels; its stages are feature maps for FedCPD."""
    from torchvision.models import mobilenet_v3_small

    net = mobilenet_v3_small(weights=None)  # or weights=MobileNet_V3_Small_Weights.DEFAULT
    neck = nn.Sequential(net.avgpool, nn.Flatten(), *impose_width(576, task.feature_dim))
    return SplitModel(task, [*net.features], neck, nn.Linear(task.feature_dim, task.num_classes))


def ghostnet(task: Task) -> SplitModel:
    """One of timm's networks, by its name; any other one that classifies images is made alike."""
    import timm

    net = timm.create_model("ghostnet_100", pretrained=False, in_chans=task.input_shape[0], num_classes=0)
    neck = nn.Sequential(net, *impose_width(net.num_features, task.feature_dim))
    return SplitModel(task, [], neck, nn.Linear(task.feature_dim, task.num_classes))
