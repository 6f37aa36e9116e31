"""A trial outside the package: clients of one architecture stacked and trained as one model.

    python benchmarks/stacking.py [--architecture cnn4] [--clients 5] [--device cpu] [--graph] [--out stacking.json]

Every client trains an epoch of FedProto (cross-entropy plus λ · mean squared distance to the global prototypes), first
one client after the other with plain autograd, then all at once: parameters and BatchNorm's buffers stacked along a new
first axis, ``vmap`` over ``grad`` of ``functional_call``. Clients differ in their number of batches; one that has none
left keeps its weights. Both ways take the same batches, so their weights must agree within rounding: checked
in float64, since ReLUs and maxima that flip make float32 runs drift apart.
``--graph`` also records the stacked step with ``torch.cuda.graph`` over static inputs and replays it (CUDA only).
Printed are seconds of both ways in float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from machine import introduce, write
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from pbfl_flwr.models.build import build_model
from pbfl_flwr.task import Task

K, D, BATCH, RATE, WEIGHT = 10, 512, 32, 0.01, 10.0
TOLERANCE = 1e-9  # of the largest weight of a tensor, in float64; in float32 rounding grows from step to step
Tensors = dict[str, Tensor]


class Round(nn.Module):
    """A network whose forward pass is the loss of one batch."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
        features = self.network.features(inputs)  # type: ignore[operator]
        logits = self.network.head(features)  # type: ignore[operator]
        distance = nn.functional.mse_loss(features, prototypes[labels])
        return nn.functional.cross_entropy(logits, labels) + WEIGHT * distance


def batches_of(client: int, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a client's batches, (steps, B, ...) and (steps, B); clients have 5 to 15 of them."""
    generator = torch.Generator().manual_seed(client)
    steps = 5 + int(torch.randint(0, 11, (), generator=generator))
    inputs = torch.randn(steps, BATCH, *shape, generator=generator)
    return inputs.to(device, dtype), torch.randint(0, K, (steps, BATCH), generator=generator).to(device)


def train_in_turn(networks: list[Round], data: list[tuple[Tensor, Tensor]], prototypes: Tensor) -> None:
    """Train client after client, in place."""
    for network, (inputs, labels) in zip(networks, data, strict=True):
        optimizer = torch.optim.SGD(network.parameters(), RATE)
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            network(x, y, prototypes).backward()
            optimizer.step()


class Stacked:
    """All clients as one model; ``step`` trains those that have a batch left."""

    def __init__(self, networks: list[Round], prototypes: Tensor) -> None:
        parameters, buffers = stack_module_state(networks)
        self.parameters: Tensors = {name: tensor.detach() for name, tensor in parameters.items()}
        self.buffers: Tensors = dict(buffers)
        skeleton = deepcopy(networks[0]).to("meta")

        def loss(
            parameters: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor
        ) -> tuple[Tensor, Tensors]:
            buffers = {name: tensor.clone() for name, tensor in buffers.items()}  # BatchNorm writes in place
            value = functional_call(skeleton, (parameters, buffers), (inputs, labels, prototypes))
            return value, buffers

        self._gradients = vmap(grad(loss, has_aux=True), randomness="different")

    @torch.no_grad()
    def step(self, inputs: Tensor, labels: Tensor, active: Tensor) -> None:
        """Train on inputs (clients, B, ...), labels (clients, B); where ``active`` (clients,) is false, not."""
        gradients, buffers = self._gradients(self.parameters, self.buffers, inputs, labels)
        for name, parameter in self.parameters.items():
            share = active.view(-1, *[1] * (parameter.dim() - 1)).to(parameter.dtype)
            parameter.sub_(RATE * share * gradients[name])
        for name, buffer in self.buffers.items():
            share = active.view(-1, *[1] * (buffer.dim() - 1))
            buffer.copy_(torch.where(share, buffers[name], buffer))


def padded(data: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (steps, clients, B, ...), labels (steps, clients, B) and active (steps, clients)."""
    steps = max(len(labels) for _, labels in data)
    inputs = torch.stack([torch.cat([x, x[:1].expand(steps - len(x), *x.shape[1:])]) for x, _ in data], 1)
    labels = torch.stack([torch.cat([y, y[:1].expand(steps - len(y), BATCH)]) for _, y in data], 1)
    active = torch.stack([torch.arange(steps, device=y.device) < len(y) for _, y in data], 1)
    return inputs, labels, active


def recorded(step: Callable[..., None], *examples: Tensor) -> Callable[..., None]:
    """Return a function that replays the step as a CUDA graph, with its inputs copied into static ones."""
    static = [example.clone() for example in examples]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*static)

    def replay(*inputs: Tensor) -> None:
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        graph.replay()

    return replay


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds that a function takes, the GPU's work included."""
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(
    architecture: str, shape: tuple[int, ...], clients: int, device: str, dtype: torch.dtype, graph: bool
) -> dict[str, float]:
    """Return seconds of both ways, and the largest difference of a weight relative to its tensor's largest."""
    task = Task(K, D, shape)
    networks = [
        Round(build_model(architecture, task, client)).to(device, dtype).train() for client in range(clients)
    ]
    data = [batches_of(client, shape, device, dtype) for client in range(clients)]
    prototypes = torch.randn(K, D, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    initial = deepcopy(networks)
    stacked = Stacked(initial, prototypes)
    steps = list(zip(*padded(data), strict=True))
    figures = {
        "in turn, s": seconds(lambda: train_in_turn(networks, data, prototypes), device),
        "stacked, s": seconds(lambda: [stacked.step(*step) for step in steps], device),
    }
    tensors = {**stacked.parameters, **stacked.buffers}
    figures["largest difference"] = max(
        float((weight - tensors[name][client]).abs().max() / weight.abs().max().clamp(min=1e-6))
        for client, network in enumerate(networks)
        for name, weight in network.state_dict().items()
    )
    if graph and device == "cuda":
        replay = recorded(Stacked(initial, prototypes).step, *steps[0])
        figures["stacked and recorded, s"] = seconds(lambda: [replay(*step) for step in steps], device)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="cnn4")
    parser.add_argument("--shape", default="1,28,28")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    introduce(torch.get_num_threads())
    shape = tuple(int(side) for side in chosen.shape.split(","))
    exact = measure(chosen.architecture, shape, chosen.clients, chosen.device, torch.float64, False)
    if exact["largest difference"] > TOLERANCE:
        sys.exit(f"{chosen.architecture}: stacked and single training differ: {exact}")
    figures = measure(chosen.architecture, shape, chosen.clients, chosen.device, torch.float32, chosen.graph)
    figures["largest difference, float64"] = exact["largest difference"]
    for name, value in figures.items():
        print(f"{name:25} {value}")
    write(chosen.out, torch.get_num_threads(), architecture=chosen.architecture, **figures)


if __name__ == "__main__":
    main()
