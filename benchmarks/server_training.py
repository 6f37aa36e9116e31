"""FedTGP's training on the server beside the matrix products that it consists of: how much faster could it be?

    python benchmarks/server_training.py [--epochs 1] [--out server-training.json]

K = 200, d = 512, 20 clients with all classes, batches of 32, one thread; wall time, the median of five in turn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from machine import introduce, write

from pbfl_flwr.prototypes.trainable import ServerTraining, initial_state, train_prototypes

K, D, CLIENTS, BATCH = 200, 512, 20, 32
STEPS = CLIENTS * K // BATCH  # of an epoch


def training(epochs: int, vectors: torch.Tensor, labels: torch.Tensor) -> float:
    order = torch.Generator().manual_seed(1)
    state = initial_state(K, D, 0)
    begin = time.perf_counter()
    train_prototypes(state, vectors, labels, ServerTraining(epochs, BATCH, 0.01), order)
    return time.perf_counter() - begin


def products(epochs: int, vectors: torch.Tensor) -> float:
    """Time two layers forward and backward for all K classes, and the distances of a batch to them."""
    inputs, weight, batch, errors = vectors[:K], torch.randn(D, D), vectors[:BATCH], torch.randn(BATCH, K)
    begin = time.perf_counter()
    for _ in range(epochs * STEPS):
        hidden = inputs @ weight
        outputs = hidden @ weight
        batch @ outputs.T
        gradient = errors.T @ batch
        gradient.T @ hidden
        back = gradient @ weight
        back.T @ inputs
        back @ weight
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1, help="of the server (default 1; FedTGP has 100)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    introduce(1)
    labels = torch.arange(K).repeat(CLIENTS)
    vectors = torch.randn(len(labels), D, generator=torch.Generator().manual_seed(0))
    pairs = [
        (training(arguments.epochs, vectors, labels), products(arguments.epochs, vectors)) for _ in range(6)
    ]
    train, least = (median(times) for times in zip(*pairs[1:], strict=True))  # the first warms up
    flops = arguments.epochs * STEPS * (6 * 2 * K * D * D + 2 * 2 * BATCH * K * D)
    print(
        f"training {train:.2f} s, its matrix products {least:.2f} s at {flops / least / 1e9:.0f} GFLOP/s: "
        f"ratio {train / least:.2f}"
    )
    write(arguments.out, 1, training=train, products=least, flops=flops)


if __name__ == "__main__":
    main()
