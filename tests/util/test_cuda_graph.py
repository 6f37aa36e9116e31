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


@pytest.mark.parametrize("name", ["running_mean", "weight"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_that_replaces_what_a_network_keeps_is_not_replayed(
    name: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(inputs: torch.Tensor) -> None:
        kept = getattr(network, name).data
        if in_place:
            kept.mul_(0.9).add_(inputs)
        elif name == "weight":
            network.weight.data = 0.9 * kept + inputs
        else:
            network.running_mean = 0.9 * kept + inputs

    network, other = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    graphed = cuda_graph.GraphedStep(step, cuda_graph.Recordings(), (network, other))
    for _ in range(cuda_graph.EAGER_STEPS):
        graphed(torch.ones(2))
    if in_place:
        graphed(torch.ones(2))
        return
    with pytest.raises(PbflError, match=rf"replaces '{name}' .*; must be changed in place"):
        graphed(torch.ones(2))
