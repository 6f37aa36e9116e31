"""A dataset outside of the package: Synthetic(α, β) of the FedProx paper (Li et al. 2020).

    PYTHONPATH=docs/examples pbfl run --set dataset=synthetic:load --set partition=natural --set num-clients=30 \
        --set models=mlp-32 --set feature-dim=32

Each client has a linear classifier and inputs of its own: α is how much the classifiers differ, β the inputs.
"""

from typing import Any

import numpy as np

from pbfl_flwr.config import DataSettings

ALPHA, BETA, CLIENTS, CLASSES, WIDTH = 1.0, 1.0, 30, 10, 60


def load(settings: DataSettings) -> dict[str, Any]:
    """Return the samples of all clients, the same at every call with these settings."""
    draw = np.random.default_rng(settings.partition_seed)
    spread = np.arange(1, WIDTH + 1) ** -0.6  # standard deviations: variances j^-1.2
    x, y, client = [], [], []
    for k, n in enumerate(draw.lognormal(4, 2, CLIENTS).astype(int) + 50):
        shift, centre = draw.normal(0, ALPHA**0.5), draw.normal(0, BETA**0.5)
        weights, bias = draw.normal(shift, 1, (WIDTH, CLASSES)), draw.normal(shift, 1, CLASSES)
        inputs = draw.normal(draw.normal(centre, 1, WIDTH), spread, (n, WIDTH))
        x.append(inputs)
        y.append((inputs @ weights + bias).argmax(1))
        client += [k] * n
    return {"x": np.concatenate(x), "y": np.concatenate(y), "client": client, "classes": range(CLASSES)}
