"""What a failed recording says. That a replay computes the bits of its step is tested on a card (test_on_a_card.py)."""

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.util import cuda_graph


class PretendedGraph:
    """A recording that executes the step, as CUDA's does not."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def pool(self) -> None:
        pass


class FailingGraph:
    """A recording in which something failed: its end fails as well, as CUDA's does."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ..."),
            PbflError,
            r"cannot be recorded \(CUDA error: operation not permitted when stream is capturing\); must be false",
        ),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, "CUDA out of memory."),
        (KeyboardInterrupt("by hand"), KeyboardInterrupt, "by hand"),
    ],
)
def test_failed_recording(
    error: BaseException, kind: type[BaseException], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(inputs: torch.Tensor) -> None:
        calls.append(inputs)
        if len(calls) > cuda_graph.EAGER_STEPS:
            raise error

    calls: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FailingGraph)
    graphed = cuda_graph.GraphedStep(step, cuda_graph.Recordings())
    for _ in range(cuda_graph.EAGER_STEPS):
        graphed(torch.ones(2))
    with pytest.raises(kind, match=message):
        graphed(torch.ones(2))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_that_replaces_a_buffer_is_not_replayed(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(inputs: torch.Tensor) -> None:
        assert network.running_mean is not None
        if in_place:
            network.running_mean.mul_(0.9).add_(inputs)
        else:
            network.running_mean = 0.9 * network.running_mean + inputs

    network, other = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    graphed = cuda_graph.GraphedStep(step, cuda_graph.Recordings(), (network, other))
    for _ in range(cuda_graph.EAGER_STEPS):
        graphed(torch.ones(2))
    if in_place:
        graphed(torch.ones(2))
        return
    with pytest.raises(PbflError, match=r"replaces 'running_mean' .*; must be changed in place"):
        graphed(torch.ones(2))
