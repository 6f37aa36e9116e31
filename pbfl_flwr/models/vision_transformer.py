"""Vision transformers of torchvision. Features are the class token after a LayerNorm and may be negative.

There are no stages: the layers exchange tokens, which are no map, since the class token has no position.
HtFLlib gives these networks alone a classifier with a hidden layer, Linear(d, 768), Tanh, Linear(768, K); here it is
one linear layer, as everywhere.
"""

import math
from functools import partial

from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import image_shape, impose_width, linear_head, torchvision_models
from pbfl_flwr.task import Task


def _of_torchvision(name: str, patch: int, task: Task) -> SplitModel:
    models = torchvision_models(name)

    channels, height, width = image_shape(name, task)
    if height != width or height % patch:
        raise PbflError(
            f"model '{name}', first layer: expected square images divisible into {patch}x{patch} patches, e.g. "
            f"{2 * patch}x{2 * patch}, found {height}x{width} (input shape {task.input_shape})"
        )
    build = models.vit_b_16 if patch == 16 else models.vit_b_32
    net = build(weights=None, image_size=height, num_classes=task.num_classes)
    if channels != net.conv_proj.in_channels:
        net.conv_proj = nn.Conv2d(channels, net.hidden_dim, patch, patch)
        nn.init.trunc_normal_(net.conv_proj.weight, std=math.sqrt(1 / (channels * patch**2)))
        nn.init.zeros_(net.conv_proj.bias)
    net.heads = nn.Sequential(*impose_width(net.hidden_dim, task.feature_dim))
    return SplitModel(task, [], net, linear_head(task))


vit_b_16 = partial(_of_torchvision, "vit-b-16", 16)
vit_b_32 = partial(_of_torchvision, "vit-b-32", 32)
