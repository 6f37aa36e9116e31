"""Plain convolutional networks: two 5x5 convolutions without padding, a hidden layer, a classifier.

Both set the width of the hidden layer to d instead of pooling to d, as the published costs of the 4-layer CNN at
d = 500 imply; the released codes (HtFLlib's, TinyProto's, ProtoNorm's) average 512 units to d, as cnn4-512 does.
Features follow a ReLU, hence are never negative. Max-pooling precedes the ReLU, which gives bit-identical outputs and
gradients for a quarter of the work.
"""

from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import image_shape, impose_width, linear_head, replaced_classifier
from pbfl_flwr.task import Task

SMALLEST_BLOCK_INPUT = 6  # 5x5 convolution: 2x2, max-pooling: 1x1


def cnn4(task: Task, width: int = 0) -> SplitModel:
    """4-layer CNN (FedAvgCNN): hidden layer d, or cnn4-512: 512 averaged to d; from 16x16 pixels.

    5x5 convolutions with 32 and 64 channels.

    Args:
        task: K, d and the shape of inputs.
        width: of the hidden layer; 0: d.
    """
    channels = image_shape("cnn4", task)[0]
    height, columns = _map_after_two_blocks("cnn4", task)
    stages = [
        nn.Sequential(nn.Conv2d(channels, 32, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
    ]
    width = width or task.feature_dim
    hidden = nn.Sequential(
        *_hidden_layer(64 * height * columns, width), *impose_width(width, task.feature_dim)
    )
    replaced_classifier(width, task)
    return SplitModel(task, stages, hidden, linear_head(task))


def cnn2(task: Task) -> SplitModel:
    """CNN of FedProto and GFPL: 5x5 convolutions, 10 and 20 channels; hidden layer d; from 16x16 pixels.

    As in FedProto's code the features are taken before the last dropout, which is therefore part of the head.
    At d = 50 on 28x28 grey images it has 21,330 body parameters.
    """
    channels = image_shape("cnn2", task)[0]
    height, width = _map_after_two_blocks("cnn2", task)
    stages = [
        nn.Sequential(nn.Conv2d(channels, 10, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(10, 20, 5), nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
    ]
    hidden = nn.Sequential(*_hidden_layer(20 * height * width, task.feature_dim))
    return SplitModel(task, stages, hidden, linear_head(task, dropout=0.5))


def _hidden_layer(inputs: int, width: int) -> tuple[nn.Module, ...]:
    return nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(inplace=True)


def _map_after_two_blocks(name: str, task: Task) -> tuple[int, int]:
    _, height, width = image_shape(name, task)
    for block in range(2):
        if min(height, width) < SMALLEST_BLOCK_INPUT:
            raise PbflError(
                f"model '{name}', layer stages.{block} (5x5 convolution, 2x2 max-pooling): expected a map of at "
                f"least {SMALLEST_BLOCK_INPUT}x{SMALLEST_BLOCK_INPUT}, found {height}x{width} (input shape "
                f"{task.input_shape}); {name} needs images of at least 16x16 pixels"
            )
        height, width = (height - 4) // 2, (width - 4) // 2
    return height, width
