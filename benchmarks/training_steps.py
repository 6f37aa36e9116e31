"""Training steps replayed as CUDA graphs, on a GPU: what makes the steps of several processes shorter?

    python benchmarks/training_steps.py [--processes 8] [--rounds 3] [--out training_steps.json]
    nvidia-cuda-mps-control -d      # first, so that the kernels of several processes run at the same time

A step of FedProto with the four networks of ``heterogeneous-4``, batches of 32 images 3x32x32. For each variant, first
in one process: kernels of a step, their seconds, those of a replay. Then in all processes together: steps per second,
and the seconds of 1,400 steps, which is a round of 20 clients with 70 batches each. The variants: images contiguous or
channels-last; BatchNorm's counters of batches, which nothing reads, advanced by one kernel instead of one a layer;
ReLU6 and SiLU out of place, since in place a step copies their inputs for its backward pass; bodies compiled by
``torch.compile``, whose first seconds count as "start". Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from machine import NO_CARD, introduce, write
from torch import Tensor, nn

from pbfl_flwr.flower.client.device import make_deterministic
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.registry import FAMILIES
from pbfl_flwr.task import Task
from pbfl_flwr.training.optimizers import SGD, param_group
from pbfl_flwr.util.cuda_graph import Recordings

NETWORKS = FAMILIES["heterogeneous-4"]
TASK, BATCH, STEPS = Task(10, 512, (3, 32, 32)), 32, 70
VARIANTS = (
    "contiguous",
    "channels-last",
    "channels-last, counters",
    "channels-last, out of place",
    "channels-last, compiled",
)

Step = Callable[[Tensor, Tensor], None]


def step_of(architecture: str, variant: str) -> tuple[Step, Tensor, Tensor]:
    """Return a training step, and a batch for it."""
    torch.manual_seed(0)
    layout = variant.partition(",")[0]
    model = optimize_layout(build_model(architecture, TASK, 0), layout).to("cuda").train()
    counters: list[Tensor] = []
    if variant.endswith("counters"):
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.num_batches_tracked is not None:
                counters.append(layer.num_batches_tracked)
                layer.num_batches_tracked = None
    if variant.endswith("out of place"):
        for layer in model.modules():
            if isinstance(layer, (nn.ReLU6, nn.SiLU)):
                layer.inplace = False
    features: Any = torch.compile(model.features) if variant.endswith("compiled") else model.features
    optimizer, prototypes = SGD([param_group(model)], 0.01), torch.randn(10, 512, device="cuda")

    def step(images: Tensor, labels: Tensor) -> None:
        vectors = features(images)
        loss = nn.functional.cross_entropy(model.head(vectors), labels)
        loss = loss + 10 * nn.functional.mse_loss(vectors, prototypes[labels])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if counters:
            torch._foreach_add_(counters, 1)

    images = torch.randn(BATCH, *TASK.input_shape, device="cuda")
    if layout == "channels-last":
        images = images.contiguous(memory_format=torch.channels_last)
    return step, images, torch.randint(0, 10, (BATCH,), device="cuda")


def kernels_of(step: Step, *batch: Tensor) -> tuple[int, float]:
    """Return the number of kernels of a step and their seconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(*batch)
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return len(found), sum(event.device_time for event in found) / 1e6


def alone(architecture: str, variant: str) -> dict[str, Any]:
    """Measure a step of one network in this process."""
    begin = time.perf_counter()
    step, *batch = step_of(architecture, variant)
    step(*batch)
    torch.cuda.synchronize()
    start = time.perf_counter() - begin
    step(*batch)
    kernels, busy = kernels_of(step, *batch)
    with Recordings().graphed(step, torch.device("cuda")) as replayed:
        for _ in range(6):
            replayed(*batch)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            replayed(*batch)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / STEPS
    return {"network": architecture, "kernels": kernels, "busy": busy, "replay": seconds, "start": start}


def work(rank: int, variant: str, rounds: int, barrier: Any, seconds: Any) -> None:
    """Train all four networks in a process; they begin with different ones."""
    make_deterministic()
    with ExitStack() as recorded:
        steps = []
        for place in range(len(NETWORKS)):
            step, *batch = step_of(NETWORKS[(rank + place) % len(NETWORKS)], variant)
            replayed = recorded.enter_context(Recordings().graphed(step, torch.device("cuda")))
            for _ in range(6):
                replayed(*batch)
            steps.append((replayed, batch))
        torch.cuda.synchronize()
        barrier.wait()
        begin = time.perf_counter()
        for _ in range(rounds):
            for replayed, batch in steps:
                for _ in range(STEPS):
                    replayed(*batch)
                torch.cuda.synchronize()
        seconds.put(time.perf_counter() - begin)


def together(variant: str, processes: int, rounds: int) -> float:
    """Return the steps per second of several processes."""
    context = get_context("spawn")
    barrier, seconds = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=work, args=(rank, variant, rounds, barrier, seconds))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    longest: float = max(seconds.get(timeout=600) for _ in started)
    for process in started:
        process.join()
    return processes * rounds * len(NETWORKS) * STEPS / longest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=VARIANTS, action="append")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(NO_CARD)
        return 0
    introduce(f"{arguments.processes} processes of 1")
    make_deterministic()
    figures: list[dict[str, Any]] = []
    for variant in arguments.only or VARIANTS:
        networks = [alone(architecture, variant) for architecture in NETWORKS]
        for row in networks:
            print(
                f"{variant:<24} {row['network']:<16} {row['kernels']:5d} kernels, {1e3 * row['busy']:.2f} ms, "
                f"replayed in {1e3 * row['replay']:.2f} ms, start {row['start']:.1f} s",
                flush=True,
            )
        rate = together(variant, arguments.processes, arguments.rounds)
        print(f"{variant:<24} {rate:.0f} steps/s, {20 * STEPS / rate:.2f} s for 1,400", flush=True)
        figures.append({"variant": variant, "networks": networks, "steps per second": rate})
    write(arguments.out, arguments.processes, variants=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
