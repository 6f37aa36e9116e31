"""A client's local training: this project's workers against a plain loop, on the same data and architectures.

    python benchmarks/local_training.py [--workers 2] [--rounds 3] [--only cnn4] [--out local_training.json]
    python benchmarks/local_training.py --device cuda --workers 1 8 --samples 2240

Both sides do a round of FedProto for every client: one epoch of SGD on cross-entropy plus prototype
regularisation, then a pass that collects the client's prototypes. The plain loop follows typical research code: one
process with torch's default threads and memory layout, a DataLoader over (image, label) pairs, a fresh model for every
client, prototypes handled sample by sample. Ours is the method's own ``local_update`` in worker processes of one
thread each. The two sides alternate, so that other load affects both. Images are random: only time is measured.
With ``--device cuda`` both sides train on the GPU, which our workers share, with CUDA graphs and without; without a
GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

# Spinning threads slow a busy machine down, to the disadvantage of the plain loop.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from machine import NO_CARD, introduce, write
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pbfl_flwr.config import TrainingSettings, parse
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.method import Client
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.precision import set_precision
from pbfl_flwr.models.registry import FAMILIES
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.task import Task
from pbfl_flwr.training.allocator import keep_freed_memory

CASES: dict[str, tuple[tuple[str, ...], tuple[int, int, int], int]] = {
    "heterogeneous-4": (FAMILIES["heterogeneous-4"], (3, 32, 32), 32),
    "small-4": (FAMILIES["small-4"], (1, 28, 28), 32),
    "cnn4": (("cnn4",) * 4, (1, 28, 28), 10),
}
K, D = 10, 512
SAMPLES = 480  # per client


def data_of(client: int, shape: tuple[int, int, int], samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    images = torch.randint(0, 256, (samples, *shape), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, K, (samples,), generator=generator)


def targets() -> Tensor:
    return torch.randn(K, D, generator=torch.Generator().manual_seed(0))


# The plain loop ---------------------------------------------------------------------------------------------


def plain_round(
    architecture: str, shape: tuple[int, int, int], batch_size: int, client: int, device: str, samples: int
) -> None:
    images, labels = data_of(client, shape, samples)
    pairs: Any = [
        ((image.float() / 255 - 0.5) / 0.5, label) for image, label in zip(images, labels, strict=True)
    ]
    model = build_model(architecture, Task(K, D, shape), 0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    global_prototypes = dict(enumerate(targets().to(device)))
    model.train()
    for x, y in DataLoader(pairs, batch_size, shuffle=True, drop_last=True):
        x, y = x.to(device), y.to(device)
        features = model.features(x)
        loss = nn.functional.cross_entropy(model.head(features), y)
        wanted = features.detach().clone()
        for row, label in enumerate(y):
            wanted[row] = global_prototypes[label.item()]
        loss = loss + 0.1 * nn.functional.mse_loss(wanted, features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    collected: dict[int, list[Tensor]] = {}
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(pairs, batch_size):
            features = model.features(x.to(device))
            for row, label in enumerate(y):
                collected.setdefault(label.item(), []).append(features[row])
    for vectors in collected.values():
        torch.stack(vectors).mean(dim=0)


def plain(case: str, clients: int, device: str, samples: int) -> float:
    architectures, shape, batch_size = CASES[case]
    begin = time.perf_counter()
    for client in range(clients):
        plain_round(architectures[client % len(architectures)], shape, batch_size, client, device, samples)
    return time.perf_counter() - begin


# Ours -------------------------------------------------------------------------------------------------------

NETWORKS: dict[tuple[object, ...], SplitModel] = {}  # cache of a worker process


def start_worker(threads: int = 1) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()


def our_round(
    architecture: str,
    shape: tuple[int, int, int],
    batch_size: int,
    client: int,
    device: str,
    layout: str = "channels-last",
    precision: str = "float32",
    samples: int = SAMPLES,
    cuda_graphs: bool = False,
) -> float:
    task = Task(K, D, shape)
    key = (architecture, shape, layout, precision)
    if key not in NETWORKS:
        network = optimize_layout(build_model(architecture, task, 0), layout)
        NETWORKS[key] = set_precision(network, precision).to(device)
    images, labels = data_of(client, shape, samples)
    data = ClientData(
        Shard(images, labels),
        Shard(images[:0], labels[:0]),
        K,
        tuple(map(str, range(K))),
        torch.full((shape[0], 1, 1), 1 / 127.5),
        torch.full((shape[0], 1, 1), -1.0),
    )
    training = TrainingSettings.model_validate(
        {"batch-size": batch_size, "layout": layout, "cuda-graphs": cuda_graphs}
    )
    method = build_method(parse({"method": "fedproto"}, SECTIONS))
    down = Prototypes(targets(), torch.ones(K, dtype=torch.bool), None, None)
    data = data.on(torch.device(device))
    method.local_update(Client(client, 1, task, NETWORKS[key], data, training), down)
    return time.process_time()


def ours(
    case: str, clients: int, pool: ProcessPoolExecutor, device: str, samples: int, cuda_graphs: bool
) -> float:
    architectures, shape, batch_size = CASES[case]
    begin = time.perf_counter()
    jobs = [
        pool.submit(
            our_round,
            architectures[client % len(architectures)],
            shape,
            batch_size,
            client,
            device,
            samples=samples,
            cuda_graphs=cuda_graphs,
        )
        for client in range(clients)
    ]
    for job in jobs:
        job.result()
    return time.perf_counter() - begin


def measure(
    case: str, clients: int, rounds: int, pool: ProcessPoolExecutor, device: str, samples: int
) -> dict[str, Any]:
    """Return samples per second of the plain loop and of ours, medians over the rounds after a warm-up."""
    ways = {"ours": False, "with CUDA graphs": True} if device == "cuda" else {"ours": False}
    seconds: dict[str, list[float]] = {"plain": [], **{way: [] for way in ways}}
    for _ in range(1 + rounds):
        seconds["plain"].append(plain(case, clients, device, samples))
        for way, cuda_graphs in ways.items():
            seconds[way].append(ours(case, clients, pool, device, samples, cuda_graphs))
    total = clients * samples
    figures: dict[str, Any] = {"case": case, "rounds": rounds, "clients": clients, "samples": samples}
    for way, (_, *measured) in seconds.items():
        figures[way] = total / median(measured)
        figures[f"{way}, ratio"] = median(
            theirs / mine for theirs, mine in zip(seconds["plain"][1:], measured, strict=True)
        )
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[os.cpu_count() or 1], help="processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="per client")
    parser.add_argument("--only", choices=sorted(CASES), action="append")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(NO_CARD)
        return 0
    threads = f"{torch.get_num_threads()} against {' and '.join(map(str, chosen.workers))} processes of 1"
    introduce(threads)
    print(f"both sides on {chosen.device}; samples per second, and the ratio to the plain loop")
    figures = []
    for workers in chosen.workers:
        with ProcessPoolExecutor(workers, get_context("spawn"), start_worker) as pool:
            for case in chosen.only or CASES:
                row = measure(case, chosen.clients, chosen.rounds, pool, chosen.device, chosen.samples)
                figures.append({"workers": workers, **row})
                rates = [name for name in row if f"{name}, ratio" in row]
                shown = ", ".join(f"{name} {row[name]:.0f} ({row[f'{name}, ratio']:.2f})" for name in rates)
                print(f"{case:<16} {workers} processes: {shown}", flush=True)
    write(chosen.out, threads, device=chosen.device, cases=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
