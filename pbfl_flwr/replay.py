"""A training step recorded once and replayed: on a GPU, one launch instead of hundreds.

The kernels of a small network's step take microseconds each, less than launching them from Python does. With ``compile
= "cuda-graph"`` a client's first complete batches are trained as usual, then one step is recorded as a CUDA graph
(batch by index, forward, losses, backward, clipping, SGD, sums of the losses), and every further complete batch is a
replay of it. An incomplete one is trained as usual.

A recording holds operations and the tensors they read and write. What Python does around them is not in it, so only
methods whose steps are all alike may be recorded: :meth:`pbfl_flwr.method.Method.replayable`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pbfl_flwr.errors import PbflError

Step = Callable[[Tensor], None]
"""Trains on the samples whose indices (B,) are given."""
Run = Callable[[], None]

WARM_UP = 3  # steps before the recording, in which libraries set themselves up; PyTorch's own number


def check_replayable(mode: str, method: str, replayable: bool) -> None:
    """Check that a method's steps may be recorded if they are to be.

    Raises:
        PbflError: if they differ from each other.
    """
    if mode == "cuda-graph" and not replayable:
        raise PbflError(
            f"compile = 'cuda-graph': the training steps of '{method}' are not all alike, so that one recording cannot "
            "stand for them; allowed are 'off', 'default' and 'reduce-overhead'"
        )


class Replayed:
    """A step that is recorded when it has been done a few times.

    Args:
        step: reads the index, and otherwise tensors that stay where they are; writes in place.
        batch_size: B of what is recorded.
        device: a CUDA device.
    """

    def __init__(self, step: Step, batch_size: int, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._index = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._done = 0
        self._replay: Run | None = None

    def __call__(self, index: Tensor) -> None:
        """Train on these samples, by the recording if there is one for so many."""
        if len(index) != len(self._index):
            self._step(index)
            return
        self._index.copy_(index)
        if self._done < WARM_UP:
            aside(lambda: self._step(self._index), self._device)
            self._done += 1
            return
        if self._replay is None:
            self._replay = record(lambda: self._step(self._index), self._device)
        self._replay()


def aside(run: Run, device: torch.device) -> None:
    """Run on the stream that recordings are made on, as what is to be recorded must have been."""
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)


def record(run: Run, device: torch.device) -> Run:
    """Record what a function launches, which is not computed yet, and return what computes it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=_stream(device)):
        run()

    def replay() -> None:
        graph.replay()

    return replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's one stream beside the default: memory freed on a stream serves that stream alone."""
    return torch.cuda.Stream(device)
