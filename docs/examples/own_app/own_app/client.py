"""The ClientApp: data of my own; training and scoring are the configured method's."""

import torch
from sklearn.datasets import load_digits

from pbfl_flwr.config import Settings
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.strategies import make_client_app


def my_data(settings: Settings, client: int) -> ClientData:
    """Client i of M has every M-th digit, three of four to train on; app.noise is the deviation of noise on them."""
    digits = load_digits()
    rows = slice(client, None, settings.run.num_clients)
    images = torch.tensor(digits.images[rows], dtype=torch.float32).unsqueeze(1)  # (n, 1, 8, 8), 0 to 16
    labels = torch.tensor(digits.target[rows])
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(client))
    images = images + 16 * float(settings.app["noise"]) * noise
    cut = len(labels) * 3 // 4
    return ClientData(
        train=Shard(images[:cut], labels[:cut]),
        test=Shard(images[cut:], labels[cut:]),
        num_classes=10,
        label_names=tuple(map(str, range(10))),
        scale=torch.full((1, 1, 1), 1 / 8),  # a network is fed inputs * scale + shift
        shift=torch.full((1, 1, 1), -1.0),
    )


app = make_client_app(my_data)
