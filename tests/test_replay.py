"""A step that is recorded: what of it is replayed, and what may not be recorded."""

import pytest
import torch
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models import check_compiler
from pbfl_flwr.replay import WARM_UP, Replayed, check_replayable
from tests.pretend_card import CUDA, Recording, card


def test_complete_batches_are_replayed_and_others_trained_as_they_are() -> None:
    with card():
        numbers, total = torch.arange(10.0).to(CUDA), torch.zeros((), device=CUDA)
        called: list[int] = []

        def step(index: Tensor) -> None:
            called.append(len(index))
            total.add_(numbers[index].sum())

        replayed, before = Replayed(step, 2, CUDA), Recording.replayed
        drawn = [[0, 1], [2, 3], [9], [4, 5], [6, 7], [8, 8], [1], [0, 9]]
        for place, wanted in enumerate(drawn):
            replayed(torch.tensor(wanted).to(CUDA))
            assert float(total) == sum(sum(batch) for batch in drawn[: place + 1])
    # Three complete ones, then one that is recorded; between them the incomplete ones.
    assert called == [2, 2, 1, 2, 2, 1]
    assert WARM_UP == 3
    assert Recording.replayed == before + 3


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda x: float(x.sum()), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index.Tensor cannot be recorded"),
        (lambda x: torch.bincount(x.long()), "bincount"),
        (lambda x: x.cpu(), "a copy between CPU and card"),
        (lambda x: torch.ones(2).to(CUDA), "a copy between CPU and card"),
    ],
)
def test_the_pretended_recording_refuses_what_a_recording_refuses(step, said) -> None:
    with card():
        numbers = torch.ones(3).to(CUDA)
        replayed = Replayed(lambda index: step(numbers[index]), 2, CUDA)
        index = torch.tensor([0, 1]).to(CUDA)
        for _ in range(WARM_UP):
            replayed(index)
        with pytest.raises(RuntimeError, match=said):
            replayed(index)


def test_what_cannot_be_recorded_is_said_before_the_first_round() -> None:
    check_replayable("cuda-graph", "fedproto", True)
    check_replayable("reduce-overhead", "fedgen", False)
    with pytest.raises(
        PbflError, match=r"the training steps of 'fedgen' are not all alike.*'reduce-overhead'"
    ):
        check_replayable("cuda-graph", "fedgen", False)
    check_compiler("cuda-graph", torch.device("cuda"))
    with pytest.raises(PbflError, match=r"device 'cpu'; allowed here are 'off' and 'default'"):
        check_compiler("cuda-graph", torch.device("cpu"))
