"""Records a training step once as a CUDA graph and replays it: one launch instead of hundreds.

The kernels of a small network's step take microseconds each, less than launching them from Python does. With ``compile
= "cuda-graph"`` the step after the batch was taken (forward, losses, backward, clipping, optimiser step, sums of the
losses) is recorded as a CUDA graph and replayed for all full batches; an incomplete batch is trained as usual. A worker
process keeps its recordings: among clients with the same architecture, batch size and, where it shapes a tensor,
number of classes, only the first waits for the recording.

A recording holds operations and the tensors they read and write, not the Python code around them. So only methods
whose steps are all the same operations may be recorded: :attr:`pbfl_flwr.method.Method.replayable`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from pbfl_flwr import recording
from pbfl_flwr.errors import PbflError, of_full_card, pointed
from pbfl_flwr.recording import NotReplayable, Run, StaticCopies, copy_some

Step = Callable[..., None]
"""Trains on a batch: inputs (B, ...), labels (B,), and more tensors that always have the same shapes."""

WARM_UP = 3  # steps before the first recording, in which libraries initialise; PyTorch's own number
AROUND = (str(Path(torch.__file__).parent), recording.__file__)  # frames that are not the step's own code
KEPT = 32  # recordings per process; the least recently used is dropped and recorded again when needed


def check_replayable(mode: str, method: str, replayable: bool) -> None:
    """Check that a method's steps can be recorded if ``compile`` asks for it.

    Raises:
        PbflError: if the method is not replayable.
    """
    if mode == "cuda-graph" and not replayable:
        raise PbflError(
            f"compile = 'cuda-graph': the training steps of '{method}' are not all the same operations, so one "
            "recording cannot replace them; allowed are 'off', 'default' and 'reduce-overhead'"
        )


def check_layers(name: str, network: nn.Module) -> None:
    """Check that a network's training steps can be recorded, as far as its layers show.

    On a GPU the weights of a recurrent layer share one block of memory, which is passed to cuDNN in addition to the
    weights: static copies of the weights would not replace that block.

    Raises:
        PbflError: naming the first recurrent layer.
    """
    for layer, module in network.named_modules():
        if isinstance(module, nn.RNNBase):
            raise PbflError(
                f"compile = 'cuda-graph': model '{name}', layer {layer} ({type(module).__name__}): recurrent layers "
                "cannot be recorded; allowed is 'off'"
            )


@dataclass(frozen=True)
class Recording:
    """A recorded step and the tensors it works on.

    Attributes:
        replay: runs the recorded step.
        tensors: the static copies it reads and writes.
        written: indices of the static copies that it writes.
    """

    replay: Run
    tensors: list[Tensor]
    written: list[int]


_recordings: OrderedDict[Hashable, Recording] = OrderedDict()


def forget_recordings() -> None:
    """Drop all recordings of this process and free their memory."""
    _recordings.clear()
    _pool.cache_clear()  # an unused pool in which a tensor is still alive cannot be used for a new recording


class Replayed:
    """A client's training step that is replayed if there is a matching recording, and recorded if there is none.

    Args:
        step: reads its batch and tensors that keep their memory; writes in place.
        batch_size: B; only batches of this size are recorded and replayed.
        device: a CUDA device.
    """

    def __init__(self, step: Step, batch_size: int, device: torch.device) -> None:
        self._step = step
        self._batch_size = batch_size
        self._device = device
        self._done = 0
        self._recording: Recording | None = None
        self._own: list[Tensor] = []  # this client's tensors, in the order of the recording's
        self._ahead = False  # whether the recording's tensors are newer than the client's own

    def __call__(self, *batch: Tensor) -> None:
        """Train on one batch."""
        if len(batch[1]) != self._batch_size:
            self.settle()
            self._step(*batch)
        elif self._recording is not None:
            self._replay(self._recording, batch)
        elif self._done == 0:  # creates the loss sums and the momentum, which must exist before the recording
            on_recording_stream(lambda: self._step(*batch), self._device)
            self._done += 1
        else:
            self._on_static_copies(batch)
            self._done += 1

    def settle(self) -> None:
        """Copy the tensors that replays have written to the client's own tensors."""
        if self._ahead and self._recording is not None:
            copy_some(self._recording.tensors, self._own, self._recording.written)
        self._ahead = False

    @torch.no_grad()
    def _replay(self, recording: Recording, batch: Sequence[Tensor]) -> None:
        if not self._ahead:
            copy_some(self._own, recording.tensors, range(len(batch), len(self._own)))
            self._ahead = True
        for there, here in zip(recording.tensors, batch, strict=False):
            there.copy_(here)
        recording.replay()

    def _on_static_copies(self, batch: Sequence[Tensor]) -> None:
        """Train one step on static copies, then look up its recording, or make one after the warm-up."""
        seen = StaticCopies(*batch)

        def within(copies: StaticCopies) -> None:
            with copies:
                self._step(*batch)

        warm = self._done + 1 >= WARM_UP
        with without_waiting(seen) if warm else nullcontext():
            on_recording_stream(lambda: within(seen), self._device)
        seen.bring_back()
        key = (self._device, seen.signature)
        if key not in _recordings and warm:
            replay = record(lambda: within(seen.again()), self._device)
            _recordings[key] = Recording(replay, seen.tensors, seen.written)
            if len(_recordings) > KEPT:
                _recordings.popitem(last=False)
        if key in _recordings:
            _recordings.move_to_end(key)
            self._recording, self._own = _recordings[key], seen.originals


def on_recording_stream(run: Run, device: torch.device) -> None:
    """Run on the recording stream, on which the operations must have run before they are recorded."""
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)


@contextmanager
def without_waiting(seen: StaticCopies) -> Iterator[None]:
    """Raise at operations within the context that make the CPU wait for the GPU.

    They cannot be recorded, and raising here is better than during a recording: an aborted recording may break torch's
    random generator and memory allocator for the rest of the process.

    Args:
        seen: the mode in which the step runs.

    Raises:
        NotReplayable: naming the operation that waits.
    """
    before = torch.cuda.get_sync_debug_mode()
    _set_waiting("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise NotReplayable(f"{seen.last} makes the CPU wait for the GPU{_where(error)}") from error
    finally:
        _set_waiting(before)


def _set_waiting(mode: int | str) -> None:
    with catch_warnings():  # torch warns that it does not detect every synchronising operation
        simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def record(run: Run, device: torch.device) -> Run:
    """Record the kernels that a function launches, without running them; return a function that runs them.

    Raises:
        NotReplayable: if something cannot be recorded. The message is that of the first error: when the recording
            ends, CUDA raises another one that says only that it failed.
        torch.OutOfMemoryError: if there is too little memory.
    """
    graph = torch.cuda.CUDAGraph()
    # Keep only the text: the exception would keep this frame and all of the step's tensors alive.
    refused, full = "", False
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=_pool(), stream=_stream(device)):
            try:
                run()
            except Exception as error:
                full = of_full_card(error)
                refused = str(error) if full else _why_not(error)
                raise
    except Exception as error:
        graph.reset()  # also ends a recording that failed to end by itself
        _pool.cache_clear()
        if of_full_card(error):
            raise
        if full:
            raise torch.cuda.OutOfMemoryError(refused) from error
        raise NotReplayable(refused or _why_not(error)) from error

    def replay() -> None:
        graph.replay()

    return replay


def _where(error: Exception) -> str:
    """Return the last traceback line in the step's own code, not in torch or the static copies."""
    lines = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(AROUND)]
    return f", {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""


def _why_not(error: Exception) -> str:
    """Return in one line why a step cannot be recorded."""
    return error.why if isinstance(error, NotReplayable) else pointed(error)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's one extra stream: the allocator reuses memory freed on a stream for that stream only."""
    return torch.cuda.Stream(device)


@cache
def _pool() -> Any:
    """Return the memory pool of all recordings for temporary tensors; they can share it as replays never overlap."""
    return torch.cuda.graph_pool_handle()
