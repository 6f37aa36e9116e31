"""A strategy of four clients, and prototypes to send to it."""

import torch

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.task import Task

TASK = Task(num_classes=4, feature_dim=6, input_shape=(1, 16, 16))


def strategy_of(**keys: Scalar) -> MethodStrategy:
    config = {"num-clients": 4, "num-server-rounds": 1, "feature-dim": 6, "join-timeout": 0.2}
    app = {key.replace("_", "-"): value for key, value in keys.items()}
    return MethodStrategy(parse({**config, **app}, SECTIONS))


def prototypes(seed: int, labels: list[int], counts: list[int] | None = None) -> Prototypes:
    values = torch.zeros(4, 6)
    values[labels] = torch.randn(len(labels), 6, generator=torch.Generator().manual_seed(seed))
    present = torch.zeros(4, dtype=torch.bool)
    present[labels] = True
    table = None
    if counts is not None:
        table = torch.zeros(4, dtype=torch.int64)
        table[labels] = torch.tensor(counts)
    return Prototypes(values, present, table)
