"""A step that is recorded: what of it is replayed, for whom, and what may not be recorded."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pbfl_flwr import replay
from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.models import build_model, check_compiler
from pbfl_flwr.recording import NotReplayable, StaticCopies, copy_some
from pbfl_flwr.replay import WARM_UP, Replayed, check_layers, check_replayable
from pbfl_flwr.task import Task
from tests.pretend_card import CUDA, OnCard, Recording, card, record

LABELS = torch.zeros(2, dtype=torch.int64)


@pytest.fixture(autouse=True)
def nothing_recorded_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_recordings", OrderedDict())


class Sum:
    """total <- total + factor * sum of the batch."""

    def __init__(self, factor: float | Tensor, start: float = 0.0) -> None:
        self.total = torch.tensor([start]).to(CUDA)
        self.factor = factor
        self.called: list[int] = []
        self.train = Replayed(self.step, 2, CUDA)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.called.append(len(labels))
        self.total.add_(inputs.sum() * self.factor)

    def add(self, *batches: list[float]) -> float:
        for batch in batches:
            self.train(torch.tensor(batch).to(CUDA), LABELS[: len(batch)].to(CUDA))
        self.train.settle()
        return float(self.total)


@pytest.fixture
def replays() -> Iterator[Callable[[], tuple[int, int]]]:
    """Return how many (recordings, replays) there were within this test."""
    made, replayed = Recording.made, Recording.replayed
    with card():
        yield lambda: (Recording.made - made, Recording.replayed - replayed)


def test_complete_batches_are_replayed_and_others_trained_as_they_are(replays) -> None:
    one = Sum(1.0)
    drawn = [[0.0, 1.0], [2.0, 3.0], [9.0], [4.0, 5.0], [6.0, 7.0], [8.0, 8.0], [1.0], [0.0, 9.0]]
    for place in range(len(drawn)):
        assert one.add(drawn[place]) == sum(sum(batch) for batch in drawn[: place + 1])
    # Three complete ones, the third of which is then recorded; between them the incomplete ones.
    assert one.called == [2, 2, 1, 2, 2, 1]
    assert WARM_UP == 3
    assert replays() == (1, 3)


def test_what_replays_have_written_comes_back_when_it_is_asked_for(replays) -> None:
    one = Sum(1.0)
    for _ in range(WARM_UP + 2):
        one.train(torch.ones(2).to(CUDA), LABELS.to(CUDA))
    assert float(one.total) == 2 * WARM_UP
    one.train.settle()
    assert float(one.total) == 2 * (WARM_UP + 2)


def test_the_next_client_replays_the_recording_of_the_first(replays) -> None:
    first, second = Sum(1.0), Sum(1.0, start=100.0)
    batches = [[1.0, 2.0]] * 6
    assert first.add(*batches) == 18
    assert second.add(*batches) == 118
    assert second.called == [2, 2], "one step as it is, one on static copies"
    assert replays() == (1, 3 + 4)
    assert first.add([1.0, 1.0]) == 20, "the second has not touched the first one's sum"
    assert float(second.total) == 118


def test_a_number_that_differs_is_another_step(replays) -> None:
    assert Sum(1.0).add(*[[1.0, 2.0]] * 6) == 18
    assert Sum(2.0).add(*[[1.0, 2.0]] * 6) == 36
    assert replays() == (2, 6)


def test_so_is_one_of_the_cpu(replays) -> None:
    for factor in (1.0, 2.0):
        one = Sum(0.0)
        one.factor = torch.tensor(factor)
        assert one.add(*[[1.0, 2.0]] * 6) == 18 * factor
    assert replays() == (2, 6)


def test_recordings_are_pushed_out_by_others(replays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "KEPT", 2)
    for factor in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):
        assert Sum(factor).add(*[[1.0, 2.0]] * 4) == 12 * factor
    # 1 and 2 are made, 1 found, 3 pushes 2 out, 1 found, 2 made again.
    assert replays()[0] == 4


def test_views_of_one_tensor_are_read_but_not_written(replays) -> None:
    both = torch.tensor([1.0, 2.0, 2.0, 3.0]).to(CUDA)
    head, tail = both[:2], both[2:]
    total = torch.zeros(2).to(CUDA)

    def reads(inputs: Tensor, labels: Tensor) -> None:
        total.add_(inputs * head + tail)

    def writes(inputs: Tensor, labels: Tensor) -> None:
        head.add_(tail)

    train = Replayed(reads, 2, CUDA)
    for _ in range(5):
        train(torch.ones(2).to(CUDA), LABELS.to(CUDA))
    train.settle()
    assert total.tolist() == [15.0, 25.0]
    train = Replayed(writes, 2, CUDA)
    train(torch.ones(2).to(CUDA), LABELS.to(CUDA))
    with pytest.raises(NotReplayable, match=r"also reads through another view.*allowed is 'off'"):
        train(torch.ones(2).to(CUDA), LABELS.to(CUDA))


def test_a_step_that_finds_other_tensors_than_before_is_refused(replays) -> None:
    total = torch.zeros(2).to(CUDA)
    seen: list[Tensor] = []

    def step(inputs: Tensor, labels: Tensor) -> None:
        seen.append(inputs + 1)
        total.add_(seen[-2] if len(seen) > 1 else inputs)

    train = Replayed(step, 2, CUDA)
    train(torch.ones(2).to(CUDA), LABELS.to(CUDA))
    train(torch.ones(2).to(CUDA), LABELS.to(CUDA))
    with pytest.raises(
        NotReplayable, match=r"reads tensors that the previous step did not read.*allowed is 'off'"
    ):
        train(torch.ones(2).to(CUDA), LABELS.to(CUDA))


def test_static_copies_share_no_memory_with_the_originals() -> None:
    weight, mean = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0])
    with StaticCopies(mean) as seen:
        loss = (weight * 3).sum()
        loss.backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight.sub_(weight.grad)
            mean.mul_(0).add_(weight)
    assert (weight.tolist(), mean.tolist()) == ([2.0], [5.0])
    assert [tensor.tolist() for tensor in seen.tensors] == [[-1.0], [-1.0]]
    assert (seen.originals[0] is mean, seen.originals[1] is weight) == (True, True)
    assert seen.written == [0, 1]
    seen.bring_back()
    assert (weight.tolist(), mean.tolist()) == ([-1.0], [-1.0])


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
        batch = torch.ones(2).to(CUDA)
        with pytest.raises(RuntimeError, match=said):
            record(lambda: step(batch), CUDA)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            lambda x: float(x.sum()),
            r"aten._local_scalar_dense.default makes the CPU wait for the GPU, \w+.py:",
        ),
        (lambda x: x[x > 0], "aten.index.Tensor makes the CPU wait"),
        (lambda x: torch.bincount(x.long()), "aten.bincount.default makes the CPU wait"),
        (lambda x: (x * 2).cpu(), ".* makes the CPU wait"),
    ],
)
def test_what_would_spoil_a_recording_is_refused_before_it_begins(step, said, replays) -> None:
    """The one after it, in the same process, is none the worse."""
    train = Replayed(lambda inputs, labels: step(inputs), 2, CUDA)
    batch = torch.ones(2).to(CUDA), LABELS.to(CUDA)
    for _ in range(WARM_UP - 1):
        train(*batch)
    with pytest.raises(NotReplayable, match=rf"could not be recorded \({said}.*allowed is 'off'"):
        train(*batch)
    assert replays() == (0, 0)
    assert not OnCard.may_not_wait
    assert Sum(1.0).add(*[[1.0, 2.0]] * 6) == 18
    assert replays() == (1, 3)


def test_the_pretended_recording_keeps_nothing_alive() -> None:
    with card():
        total, kept, *others = (torch.zeros(2).to(CUDA) + number for number in range(3))
        add = record(lambda: total.add_(kept * 2), CUDA)
        add()
        assert total.tolist() == [2.0, 2.0]
        add = record(lambda: total.add_(others[0] * 2), CUDA)
        others.clear()
        with pytest.raises(RuntimeError, match="memory that has been freed"):
            add()


class Pools:
    """Stands in for torch's recordings: which memory they asked for, and who is still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_well: bool = True) -> None:
        self.handles, self.asked, self.reset = 0, list[int](), list[int]()
        self.left: list[weakref.ref[object]] = []
        pools = self

        class Graph:
            def __init__(self) -> None:
                pools.left.append(weakref.ref(self))

            def reset(self) -> None:
                pools.reset.append(len(pools.left))

        @contextmanager
        def graph(made: object, pool: int, stream: object) -> Iterator[None]:
            pools.asked.append(pool)
            try:
                yield
            finally:
                if not ends_well:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        def handle() -> int:
            pools.handles += 1
            return pools.handles

        stand_ins = {"CUDAGraph": Graph, "graph": graph, "device": lambda device: nullcontext()}
        for name, stand_in in {**stand_ins, "graph_pool_handle": handle}.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(replay, "_stream", lambda device: None)
        replay.forget_recordings()


@pytest.fixture
def no_pool_left() -> Iterator[None]:
    yield
    replay._pool.cache_clear()


@pytest.mark.usefixtures("no_pool_left")
@pytest.mark.parametrize("ends_well", [True, False])
def test_what_a_gpu_refuses_to_record_is_said_in_one_line(
    ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused operation makes the recording's end fail, too, and that says less. Nothing of it is left."""
    pools, used = Pools(monkeypatch, ends_well), list[weakref.ref[object]]()

    def refused() -> None:
        gradient = torch.ones(2)
        used.append(weakref.ref(gradient))
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")

    said = r"a training step could not be recorded \(RuntimeError: CUDA error: operation not permitted when stream is"
    gc.disable()  # what only a search for cycles finds may stay for long
    try:
        with pytest.raises(NotReplayable, match=said) as caught:
            replay.record(refused, torch.device("cuda", 0))
        del caught
        assert [left() for left in (*pools.left, *used)] == [None, None]
    finally:
        gc.enable()
    assert pools.reset == [1]
    if ends_well:
        replay.record(lambda: None, torch.device("cuda", 0))
        assert pools.asked == [1, 2], "not in the memory of the one that failed"


@pytest.mark.usefixtures("no_pool_left")
@pytest.mark.parametrize("ends_well", [True, False])
def test_too_little_memory_for_a_recording_is_said_as_such(
    ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pools(monkeypatch, ends_well)

    def full() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 2.00 GiB.$"
    ):
        replay.record(full, torch.device("cuda", 0))


@pytest.mark.usefixtures("no_pool_left")
def test_recordings_share_their_memory_until_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses a pool that was given up while a tensor is left in it: use_count > 0."""
    pools, gpu = Pools(monkeypatch), torch.device("cuda", 0)
    for _ in range(2):
        replay.record(lambda: None, gpu)
    replay.forget_recordings()
    replay.record(lambda: None, gpu)
    assert pools.asked == [1, 1, 2]


def test_a_tensor_whose_storage_is_accessed_directly_cannot_be_copied() -> None:
    """So cuDNN's recurrent layers find their weights in one piece."""
    weights = torch.ones(4)
    with StaticCopies(), pytest.raises(NotReplayable, match=r"storage directly.*allowed is 'off'"):
        torch.empty(0).set_(weights.untyped_storage())


@pytest.mark.parametrize("name", ["lstm", "gru", "bilstm"])
def test_recurrent_layers_are_refused_before_the_first_round(name: str) -> None:
    task = Task(4, 8, (12,), 100)
    said = (
        rf"compile = 'cuda-graph': model '{name}', layer stages\.0\..*\((LSTM|GRU)\): recurrent layers cannot"
    )
    with pytest.raises(PbflError, match=said):
        check_layers(name, build_model(name, task, 0))
    check_layers("transformer-2-1", build_model("transformer-2-1", task, 0))


def test_what_the_cards_own_batch_norm_writes_is_noted() -> None:
    """On a GPU torch takes other operations than on a CPU: cuDNN's say of nothing that they write it."""
    with FakeTensorMode():  # which asks no card
        with torch.device("cuda"):
            norm, inputs = nn.BatchNorm2d(3), torch.ones(2, 3, 4, 4)
        with StaticCopies() as seen:
            norm(inputs)
        written = [seen.originals[place] for place in seen.written]
    assert all(any(buffer is tensor for tensor in written) for buffer in norm.buffers())
    assert not any(parameter is tensor for parameter in norm.parameters() for tensor in written)


def test_tensors_are_copied_type_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several types at once torch copies on a GPU one after the other."""
    here = [torch.ones(2), torch.tensor(3), torch.ones(1), torch.tensor(4)]
    there = [torch.zeros_like(tensor) for tensor in here]
    launched: list[int] = []
    copied = torch._foreach_copy_

    def copying(to: list[Tensor], of: list[Tensor]) -> None:
        launched.append(len({tensor.dtype for tensor in of}))
        copied(to, of)

    monkeypatch.setattr(torch, "_foreach_copy_", copying)
    copy_some(here, there, [0, 1, 3])
    assert [tensor.tolist() for tensor in there] == [[1.0, 1.0], 3, [0.0], 4]
    assert launched == [1, 1]
    copy_some(here, there, [])


def test_what_cannot_be_recorded_is_said_before_the_first_round() -> None:
    check_replayable("cuda-graph", "fedproto", True)
    check_replayable("reduce-overhead", "fedfa", False)
    with pytest.raises(
        PbflError, match=r"the training steps of 'fedfa' are not all the same operations.*'reduce-overhead'"
    ):
        check_replayable("cuda-graph", "fedfa", False)
    check_compiler("cuda-graph", torch.device("cuda"))
    with pytest.raises(PbflError, match=r"device 'cpu'; allowed here are 'off' and 'default'"):
        check_compiler("cuda-graph", torch.device("cpu"))


def test_every_method_but_one_can_be_recorded() -> None:
    found = {name for name in METHODS if not build_method(parse({"method": name}, SECTIONS)).replayable}
    assert found == {"fedfa"}
