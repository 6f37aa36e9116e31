"""Training steps replayed as CUDA graphs: one launch for all kernels of a step.

Small networks leave a GPU idle while the CPU launches one kernel after the other (docs/performance.md). A replayed step
computes the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError, is_out_of_memory

Step = Callable[..., None]

EAGER_STEPS = 3  # before the recording, since libraries set themselves up in their first calls


class Recordings:
    """The recordings of a process's clients, one after the other: each takes over the memory of the last one."""

    def __init__(self) -> None:
        self._latest: torch.cuda.CUDAGraph | None = None
        self._streams: dict[
            torch.device, torch.cuda.Stream
        ] = {}  # libraries keep a workspace for every stream

    @contextmanager
    def graphed(self, step: Step, device: torch.device, networks: Sequence[nn.Module] = ()) -> Iterator[Step]:
        """Yield a function that records a training step as a CUDA graph, then replays it.

        The first EAGER_STEPS calls and those with other shapes run the step itself. The step must do the same
        operations on the same tensors whenever it is called with the same shapes, and must not wait for the GPU.

        Args:
            step: takes tensors on the device, returns nothing.
            device: a CUDA device.
            networks: whose parameters and buffers the step may change, in place.

        Raises:
            PbflError: from the yielded function, if the step cannot be recorded or replaces one of these.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                yield GraphedStep(step, self, networks)
        except BaseException:
            self._latest = None  # after a failure the memory is for other processes
            raise
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)

    def record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return the graph of a step; recording executes nothing.

        Raises:
            PbflError: if the step cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._latest.pool() if self._latest else None, capture_error_mode="thread_local")
        failure: BaseException | None = None
        try:
            step()
        except BaseException as error:
            failure = error
        try:
            graph.capture_end()
        except RuntimeError as error:  # as a consequence, if the step failed
            failure = failure or error
        if failure is None:
            self._latest = graph
            return graph
        if not isinstance(failure, RuntimeError) or is_out_of_memory(failure):
            raise failure
        reason = str(failure).partition("\n")[0]
        raise PbflError(
            f"cuda-graphs = true: a training step cannot be recorded ({reason}); must be false for this method"
        ) from failure


class GraphedStep:
    """A training step that runs as it is in its first calls, and then is replayed; see :meth:`Recordings.graphed`."""

    def __init__(self, step: Step, recordings: Recordings, networks: Sequence[nn.Module] = ()) -> None:
        self._step, self._recordings, self._networks = step, recordings, networks
        self._num_eager: Counter[tuple[torch.Size, ...]] = Counter()
        self._inputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Tensor) -> None:
        """Make the step on a batch, tensors on the device."""
        shapes = tuple(tensor.shape for tensor in batch)
        recorded = tuple(tensor.shape for tensor in self._inputs)
        if self._num_eager[shapes] < EAGER_STEPS or (self._graph and shapes != recorded):
            self._num_eager[shapes] += 1
            self._step(*batch)
            return
        if self._graph is None:
            self._inputs = [tensor.clone() for tensor in batch]
            before = self._addresses()
            self._graph = self._recordings.record(partial(self._step, *self._inputs))
            if replaced := before - self._addresses():
                raise PbflError(
                    f"cuda-graphs = true: a training step replaces '{min(replaced)[0]}' of the network, which a replay "
                    "does not; must be changed in place"
                )
        for static, tensor in zip(self._inputs, batch, strict=True):
            static.copy_(tensor)
        self._graph.replay()

    def _addresses(self) -> set[tuple[str, int]]:
        """Return the names and addresses of the networks' parameters and buffers."""
        named = (chain(network.named_parameters(), network.named_buffers()) for network in self._networks)
        return {(name, tensor.data_ptr()) for name, tensor in chain.from_iterable(named)}
