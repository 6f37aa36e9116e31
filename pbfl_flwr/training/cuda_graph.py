"""Training steps replayed as CUDA graphs: one launch for all kernels of a step.

Small networks leave a GPU idle while the CPU launches one kernel after the other (docs/performance.md). A replayed step
computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from pbfl_flwr.errors import PbflError, is_out_of_memory

Step = Callable[..., None]

EAGER_STEPS = 3  # before the recording, since libraries set themselves up in their first calls
_LATEST: list[torch.cuda.CUDAGraph] = []  # the next recording takes over its memory


@contextmanager
def graphed(step: Step, device: torch.device) -> Iterator[Step]:
    """Yield a function that records a training step as a CUDA graph, then replays it.

    The first EAGER_STEPS calls and those with other shapes run the step itself. The step must do the same operations
    on the same tensors whenever it is called with the same shapes, and must not wait for the GPU.

    Args:
        step: takes tensors on the device, returns nothing.
        device: a CUDA device.

    Raises:
        PbflError: from the yielded function, if the step cannot be recorded.
    """
    stream = _stream(device)  # libraries keep a workspace for every stream
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield _GraphedStep(step)
    except BaseException:
        clear_graphs()  # after a failure the memory is for other processes
        raise
    torch.cuda.current_stream(device).wait_stream(stream)


def clear_graphs() -> None:
    """Let torch reuse or release the memory of the latest recording."""
    _LATEST.clear()


@lru_cache(maxsize=1)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _GraphedStep:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._shapes: list[torch.Size] = []
        self._num_eager = 0
        self._inputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Tensor) -> None:
        shapes = [tensor.shape for tensor in batch]
        if shapes != self._shapes and self._graph is None:
            self._shapes, self._num_eager = shapes, 0
        if shapes != self._shapes or self._num_eager < EAGER_STEPS:
            self._num_eager += 1
            self._step(*batch)
            return
        if self._graph is None:
            self._inputs = [tensor.clone() for tensor in batch]
            self._graph = self._recorded()
        for static, tensor in zip(self._inputs, batch, strict=True):
            static.copy_(tensor)
        self._graph.replay()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """Return the graph of a step on the static inputs; recording executes nothing."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(_LATEST[0].pool() if _LATEST else None, capture_error_mode="thread_local")
        try:
            try:
                self._step(*self._inputs)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a failed recording fails as well
            if not isinstance(cause, Exception) or is_out_of_memory(cause):
                raise cause from None
            reason = str(cause).partition("\n")[0]
            raise PbflError(
                f"cuda-graphs = true: a training step cannot be recorded ({reason}); must be false for this method"
            ) from error
        _LATEST[:] = [graph]
        return graph
