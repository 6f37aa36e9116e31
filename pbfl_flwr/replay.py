"""A training step recorded once and replayed: on a GPU, one launch instead of hundreds.

The kernels of a small network's step take microseconds each, less than launching them from Python does. With ``compile
= "cuda-graph"`` the step after the batch was cut (forward, losses, backward, clipping, descent, sums of the losses) is
recorded as a CUDA graph, and complete batches are replays of it; an incomplete one is trained as usual. A worker
process keeps its recordings, so that of all clients with the same architecture, batch size, and number of classes
where that shapes a tensor, the first alone waits for one.

A recording holds operations and the tensors they read and write. What Python does around them is not in it, so only
methods whose steps are all alike may be recorded: :meth:`pbfl_flwr.method.Method.replayable`.
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
from pbfl_flwr.recording import NotReplayable, Run, StandIns, copy_some

Step = Callable[..., None]
"""Trains on a batch: inputs (B, ...), labels (B,), and more tensors that always have the same shapes."""

WARM_UP = 3  # steps before the first recording, in which libraries set themselves up; PyTorch's own number
AROUND = (str(Path(torch.__file__).parent), recording.__file__)  # code that runs a step, and is not it
KEPT = 32  # recordings of a process; of one that was pushed out the step is recorded again


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


def check_layers(name: str, network: nn.Module) -> None:
    """Check that the training steps of a network of this name may be recorded, as far as its layers tell.

    On a GPU the weights of a recurrent layer lie in one piece of memory, which cuDNN is given beside them: a stand-in
    of each would leave that piece as it was.

    Raises:
        PbflError: naming the layer that may not.
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
        replay: computes the step.
        tensors: the stand-ins it reads and writes.
        written: which of them it writes.
    """

    replay: Run
    tensors: list[Tensor]
    written: list[int]


_recordings: OrderedDict[Hashable, Recording] = OrderedDict()


def forget_recordings() -> None:
    """Drop all recordings of this process, with the memory that they hold."""
    _recordings.clear()
    _pool.cache_clear()  # once no recording uses it, torch refuses another one in it while a tensor is left there


class Replayed:
    """A client's step, replayed where there is a recording of its like, and recorded where there is none.

    Args:
        step: reads its batch, and otherwise tensors that stay where they are; writes in place.
        batch_size: B of what is recorded.
        device: a CUDA device.
    """

    def __init__(self, step: Step, batch_size: int, device: torch.device) -> None:
        self._step = step
        self._batch_size = batch_size
        self._device = device
        self._done = 0
        self._recording: Recording | None = None
        self._own: list[Tensor] = []  # what this client has in the places of the recording's tensors
        self._ahead = False  # whether the recording's tensors have been trained on since they were copied

    def __call__(self, *batch: Tensor) -> None:
        """Train on these samples."""
        if len(batch[1]) != self._batch_size:
            self.settle()
            self._step(*batch)
        elif self._recording is not None:
            self._replay(self._recording, batch)
        elif self._done == 0:  # makes the sums and the momentum that the others find
            aside(lambda: self._step(*batch), self._device)
            self._done += 1
        else:
            self._on_stand_ins(batch)
            self._done += 1

    def settle(self) -> None:
        """Copy what replays have written to the client's own tensors."""
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

    def _on_stand_ins(self, batch: Sequence[Tensor]) -> None:
        """Train a step on stand-ins, then look for a recording of it, or make one after the warm-up."""
        seen = StandIns(*batch)

        def within(stand_ins: StandIns) -> None:
            with stand_ins:
                self._step(*batch)

        warm = self._done + 1 >= WARM_UP
        with without_waiting(seen) if warm else nullcontext():
            aside(lambda: within(seen), self._device)
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


def aside(run: Run, device: torch.device) -> None:
    """Run on the stream that recordings are made on, as what is to be recorded must have been."""
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)


@contextmanager
def without_waiting(seen: StandIns) -> Iterator[None]:
    """Refuse, within, what has the CPU wait for the GPU.

    No recording may hold that, and a refusal within one is worse: what is half recorded may keep torch's random
    numbers, and its memory, from working for whoever comes next in this process.

    Args:
        seen: within which the step runs.

    Raises:
        NotReplayable: naming what waits.
    """
    before = torch.cuda.get_sync_debug_mode()
    _set_waiting("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise NotReplayable(f"{seen.last} has the CPU wait for the GPU{_where(error)}") from error
    finally:
        _set_waiting(before)


def _set_waiting(mode: int | str) -> None:
    with catch_warnings():  # torch's, that it does not know of everything that waits
        simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def record(run: Run, device: torch.device) -> Run:
    """Record what a function launches, which is not computed yet, and return what computes it.

    Raises:
        NotReplayable: if something in it cannot be recorded, naming that: CUDA then complains once more when the
            recording ends, of nothing but that it failed.
        torch.OutOfMemoryError: if there is too little memory.
    """
    graph = torch.cuda.CUDAGraph()
    # Not the error itself, which would keep this frame and all of the step's tensors.
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
        graph.reset()  # ends what torch has begun for it, also where the recording could not end
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
    """Return the line of the step, which is neither torch's nor that of the stand-ins."""
    lines = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(AROUND)]
    return f", {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""


def _why_not(error: Exception) -> str:
    """Return in one line why a step cannot be recorded."""
    return error.why if isinstance(error, NotReplayable) else pointed(error)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's one stream beside the default: memory freed on a stream serves that stream alone."""
    return torch.cuda.Stream(device)


@cache
def _pool() -> Any:
    """Return the memory that all recordings share for what lives within a step: one is replayed after the other."""
    return torch.cuda.graph_pool_handle()
