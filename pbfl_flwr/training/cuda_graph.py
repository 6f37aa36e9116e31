"""Training steps replayed as CUDA graphs: one launch for all kernels of a step.

Small networks leave a GPU idle while the CPU launches one kernel after the other (docs/performance.md). A replayed step
computes the same bits.
"""

from __future__ import annotations

from collections import Counter
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
    finally:
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
        self._num_eager: Counter[tuple[torch.Size, ...]] = Counter()
        self._inputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Tensor) -> None:
        shapes = tuple(tensor.shape for tensor in batch)
        recorded = tuple(tensor.shape for tensor in self._inputs)
        if self._num_eager[shapes] < EAGER_STEPS or (self._graph and shapes != recorded):
            self._num_eager[shapes] += 1
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
        failure: BaseException | None = None
        try:
            self._step(*self._inputs)
        except BaseException as error:
            failure = error
        try:
            graph.capture_end()
        except RuntimeError as error:  # as a consequence, if the step failed
            failure = failure or error
        if failure is None:
            _LATEST[:] = [graph]
            return graph
        if not isinstance(failure, RuntimeError) or is_out_of_memory(failure):
            raise failure
        reason = str(failure).partition("\n")[0]
        raise PbflError(
            f"cuda-graphs = true: a training step cannot be recorded ({reason}); must be false for this method"
        ) from failure
