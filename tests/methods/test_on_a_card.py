"""Every method with its network and data on a card: nothing stays behind on the CPU, nothing comes out otherwise."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pbfl_flwr import replay
from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.running import configuration
from pbfl_flwr.flower.client import app as client
from pbfl_flwr.flower.client import hello as client_hello
from pbfl_flwr.flower.client import saving, session
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.models import build_model
from pbfl_flwr.models.contract import random_inputs
from pbfl_flwr.recording import NotReplayable, StaticCopies
from pbfl_flwr.task import Task
from tests.flower.inprocess import federation
from tests.pretend_card import CUDA, OnCard, Recording, card
from tests.pretend_card import record as pretended_recording

needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = torch.device("cuda", 0)
GFPL: dict[str, Scalar] = {"gfpl.start": 1, "gfpl.interval": 1}
VARIANTS: dict[str, dict[str, Scalar]] = {
    "sparse": {
        "cps-dim": 8,
        "aggregation": "ppa",
        "cpkd": "sample",
        "wire-dtype": "int8",
        "dense-uploads": True,
    },
    "class-pull": {"cps-dim": 8, "aggregation": "aps-sum", "cpkd": "class", "cps-pull": "masked"},
    "norm": {"pull-form": "l2", "collect": "trajectory", "aggregation": "weighted"},
    "last-epoch": {"collect": "last-epoch", "local-epochs": 2},
    "before": {"collect": "before", "evaluate-moment": "before", "protocol": "pfl"},
    "private": {"dp-clip": 1.0, "dp-noise": 0.5, "dp-randomness": "seed"},
    "sgd": {"momentum": 0.9, "optimizer-state": "kept", "weight-decay": 0.01, "max-grad-norm": 1.0},
    # A recording has the rate as a float32, Adam's kernel takes a float64: bits agree where both can hold it.
    "adam": {"optimizer": "adam", "learning-rate": 2**-10, "optimizer-state": "kept", "max-grad-norm": 1.0},
    "adamw": {"optimizer": "adamw", "learning-rate": 2**-10, "weight-decay": 0.01},
    "held-out": {"validation-share": 0.3, "local-epochs": 2, "drop-last": "never"},
    "by-class": {"per-class": True, "both-moments": True, "eval-batch-size": 3},
    "augmented": {"augmentation": "crop,flip", "local-epochs": 2},
    "contiguous": {"layout": "contiguous", "models": "resnet6,shufflenet-v2"},
}


@contextmanager
def recording_card() -> Iterator[None]:
    """Give all clients the pretended card, which holds no recording yet."""
    with (
        card(),
        patch.object(session, "choose_device", lambda wanted: CUDA),
        patch.object(client_hello, "choose_device", lambda wanted: CUDA),
        patch.object(replay, "_recordings", OrderedDict()),
    ):
        yield


def alike(tmp_path: Path, method: str, keys: dict[str, Any], **how: Any) -> None:
    on_cpu = federation(tmp_path / "cpu", method, num_clients=3, **how, **keys).run()
    before = OnCard.operations
    with card(), patch.object(session, "choose_device", lambda wanted: CUDA):
        on_card = federation(tmp_path / "card", method, num_clients=3, **how, **keys).run()
    assert [line["failures"] for line in on_card.strategy.history] == [[], []]
    assert on_card.fingerprint == on_cpu.fingerprint
    assert OnCard.operations > before + 100, "it was trained elsewhere"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_on_a_card(name: str, tmp_path: Path) -> None:
    alike(tmp_path, "fedproto", VARIANTS[name])


def replayed(tmp_path: Path, method: str, keys: dict[str, Scalar]) -> int:
    """Trained by recorded steps on the card, and step by step on the CPU, in batches of three: some to replay.

    Returns:
        How many recordings were made.
    """
    config: dict[str, Any] = {"batch-size": 3, "num-clients": 1, **keys}
    on_cpu = federation(tmp_path / "cpu", method, **config).run()
    before, made = Recording.replayed, Recording.made
    with recording_card():
        on_card = federation(tmp_path / "card", method, **config, compile="cuda-graph").run()
    assert not any(line["failures"] for line in on_card.strategy.history)
    assert Recording.replayed > before + 4
    assert on_card.fingerprint == on_cpu.fingerprint
    return Recording.made - made


REPLAYABLE = [name for name in METHODS if build_method(parse({"method": name}, SECTIONS)).replayable]


# The others train on the card below, step by step and recorded.
@pytest.mark.parametrize("name", [name for name in METHODS if name not in REPLAYABLE])
def test_a_method_on_a_card(name: str, tmp_path: Path) -> None:
    alike(tmp_path, name, GFPL if name == "gfpl" else {})


# A head and a body phase, or a first round in which nothing is taught.
RECORDINGS = {
    **dict.fromkeys(["fedrep", "fedproto", "fedtgp", "tinyproto", "protonorm", "gfpl"], 2),
    **dict.fromkeys(["feddistill", "fedgen", "fedpa"], 2),
    "fedcpd": 3,
}


@pytest.mark.parametrize("name", REPLAYABLE)
def test_a_recorded_step_is_the_step_of_every_client(name: str, tmp_path: Path) -> None:
    """Three clients in two rounds, of one architecture with BatchNorm, share it; the variants below are of cnn4."""
    keys: dict[str, Scalar] = {"num-clients": 3, "models": "tests.methods.tiny_nets:normed"}
    made = replayed(tmp_path, name, {**(GFPL if name == "gfpl" else {}), **keys})
    assert made == RECORDINGS.get(name, 1)


def test_clients_share_the_recordings_of_a_variant(tmp_path: Path) -> None:
    """Masks, counts of classes and momentum are no reason for another recording; another network is."""
    keys = {**VARIANTS["sparse"], **VARIANTS["sgd"], "num-clients": 4, "models": "cnn2,mlp5"}
    assert replayed(tmp_path, "fedproto", keys) == 2 * 2


@pytest.mark.parametrize("name", VARIANTS)
def test_a_recorded_step_of_a_variant(name: str, tmp_path: Path) -> None:
    replayed(tmp_path, "fedproto", VARIANTS[name])


def test_a_learning_rate_that_falls_needs_no_other_recording(tmp_path: Path) -> None:
    assert replayed(tmp_path, "fedavg", {"learning-rate-decay": 0.5, "num-server-rounds": 3}) == 1


def test_where_the_memory_did_not_suffice_recordings_and_networks_are_dropped(tmp_path: Path) -> None:
    def kept(opened: Any, *others: Any) -> Any:
        if (opened.client.id, opened.client.round) == (1, 1):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return saving.state_after_round(opened, *others)

    keys: dict[str, Any] = {"batch-size": 3, "num-clients": 3, "models": "tests.methods.tiny_nets:normed"}
    with patch.object(client, "state_after_round", kept):
        on_cpu = federation(tmp_path / "cpu", "fedavg", **keys).run()
        made = Recording.made
        with recording_card():
            on_card = federation(tmp_path / "card", "fedavg", **keys, compile="cuda-graph").run()
            assert session._network.cache_info().currsize == 1
    failures = [[failure["client"] for failure in line["failures"]] for line in on_card.strategy.history]
    assert failures == [[1], []]
    assert on_card.fingerprint == on_cpu.fingerprint
    assert Recording.made - made == 2  # one for client 0, one for those after the failure


def test_a_network_that_cannot_be_recorded_costs_no_other_client_its_work(tmp_path: Path) -> None:
    """It is said in one line with what to set, before anything is recorded; the others share their recording."""
    asking, normed = "tests.methods.tiny_nets:Asking", "tests.methods.tiny_nets:normed"
    keys: dict[str, Any] = {"batch-size": 3, "num-clients": 3, "models": f"{asking},{normed},{normed}"}
    on_cpu = federation(tmp_path / "cpu", "fedproto", **keys).run()
    made = Recording.made
    with recording_card():
        on_card = federation(tmp_path / "card", "fedproto", **keys, compile="cuda-graph").run()
    assert [line["failures"] for line in on_cpu.strategy.history] == [[], []]
    failures = [line["failures"] for line in on_card.strategy.history]
    assert [[failure["client"] for failure in of_round] for of_round in failures] == [[0], [0]]
    for (failure,) in failures:
        assert "aten._local_scalar_dense.default makes the CPU wait for the GPU" in failure["reason"]
        assert "allowed is 'off'" in failure["reason"]
    assert Recording.made - made == 2  # of the first round, and of the second with a pull


@pytest.mark.parametrize(("method", "key"), [("fedproto", "models"), ("fml", "fml.auxiliary")])
def test_recurrent_layers_are_refused_before_anything_starts(method: str, key: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {key: "tests.methods.tiny_nets:Reading", "compile": "cuda-graph"}
    said = r"model 'tests.methods.tiny_nets:Reading', layer body \(GRU\): recurrent layers cannot be recorded"
    with (
        card(),
        patch.object(client_hello, "choose_device", lambda wanted: CUDA),
        pytest.raises(PbflError, match=said),
    ):
        federation(tmp_path, method, num_clients=2, **keys).run()
    requested = configuration.RequestedKeys({**keys, "method": method, "dataset": "digits", "num-clients": 2})
    with (
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.device_count", lambda: 1),
        pytest.raises(PbflError, match=said),
    ):
        configuration.preflight(configuration.check(requested), Resources(gpus_per_client=0.25))


def on_a_real_card(tmp_path: Path, name: str, compiled: str, **keys: Scalar) -> dict[str, float]:
    """Return the mean losses of the last round."""
    config: dict[str, Any] = {
        **(GFPL if name == "gfpl" else {}),
        **keys,
        "device": "cuda",
        "compile": compiled,
    }
    run = federation(tmp_path / compiled, name, **config).run()
    assert [line["failures"] for line in run.strategy.history] == [[], []]
    assert run.strategy.history[-1]["accuracy"]["head"]["clients"] > 0
    return {
        key: value for key, value in run.strategy.history[-1]["clients"].items() if key.startswith("loss.")
    }


@needs_a_card
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *product(METHODS, ["off"]),
        *product(
            ["fedproto", "fedrep", "fedcpd"], ["reduce-overhead"]
        ),  # a body that learns, rests, is taught
        *(pytest.param(name, "reduce-overhead", marks=pytest.mark.long) for name in METHODS),
    ],
)
def test_a_method_on_a_real_card(name: str, compiled: str, tmp_path: Path) -> None:
    on_a_real_card(tmp_path, name, compiled)


@needs_a_card
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *product(REPLAYABLE, [{}]),
        ("fedproto", {**VARIANTS["sgd"], "models": "cnn2"}),  # has dropout
        ("fedproto", {"precision": "bfloat16", "models": "resnet4"}),
        ("fedproto", {**VARIANTS["adam"], "models": "cnn2"}),
    ],
)
def test_recorded_steps_on_a_real_card_learn_the_same(
    name: str, keys: dict[str, Scalar], tmp_path: Path
) -> None:
    """Up to the order of sums, in small batches, of which there are enough to replay."""
    keys = {"batch-size": 3, "num-clients": 1, **keys}
    expected = on_a_real_card(tmp_path, name, "off", **keys)
    run = torch.cuda.CUDAGraph.replay
    with (
        patch.object(torch.cuda.CUDAGraph, "replay", autospec=True, side_effect=run) as replays,
        patch.object(replay, "_recordings", OrderedDict()),
    ):
        found = on_a_real_card(tmp_path, name, "cuda-graph", **keys)
    assert replays.call_count > 4
    assert found == pytest.approx(expected, rel=0.02, abs=0.002)


def losses(name: str, task: Task, device: torch.device, recorded: bool) -> list[float]:
    """Return those of eight steps on one batch."""
    inputs, labels = random_inputs(task, 4).to(device), torch.arange(4).to(device)
    model = build_model(name, task, 0).to(device).train()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
        if isinstance(layer, torch.nn.MultiheadAttention):
            layer.dropout = 0.0
    found, last = list[float](), torch.zeros(()).to(device)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        loss = torch.nn.functional.cross_entropy(model.head(model.features(inputs)), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)
        last.copy_(loss.detach())

    train = replay.Replayed(step, 4, device)
    for _ in range(8):
        (train if recorded else step)(inputs, labels)
        train.settle()
        found.append(float(last))
    return found


OF_TOKENS = Task(4, 8, (12,), 100)
OTHER_LAYERS = [("transformer-2-1", OF_TOKENS), ("textcnn", OF_TOKENS), ("vit-b-32", Task(4, 8, (3, 32, 32)))]


@pytest.mark.parametrize(("name", "task"), OTHER_LAYERS)
def test_recorded_steps_of_attention_and_embeddings(name: str, task: Task) -> None:
    before = Recording.replayed
    with card(), patch.object(replay, "_recordings", OrderedDict()):
        assert losses(name, task, CUDA, True) == losses(name, task, CUDA, False)
    assert Recording.replayed == before + 5


@needs_a_card
@pytest.mark.parametrize(("name", "task"), OTHER_LAYERS)
def test_recorded_steps_of_attention_and_embeddings_on_a_real_card(name: str, task: Task) -> None:
    """There torch takes fused kernels for attention, with tensors of their own between forward and backward."""
    made: OrderedDict[Hashable, replay.Recording] = OrderedDict()
    with patch.object(replay, "_recordings", made):
        assert losses(name, task, GPU, True) == pytest.approx(
            losses(name, task, GPU, False), rel=0.02, abs=0.002
        )
        assert len(made) == 1


@needs_a_card
def test_recordings_of_a_real_card_are_made_anew_while_a_tensor_of_the_last_ones_is_left() -> None:
    left, numbers = list[torch.Tensor](), torch.ones(4, device=GPU)
    replay.on_recording_stream(lambda: left.append(numbers + 1), GPU)
    replay.record(lambda: left.append(numbers + 1), GPU)
    replay.forget_recordings()
    torch.cuda.empty_cache()
    total = torch.zeros(4, device=GPU)

    def add() -> None:
        total.add_(numbers)

    replay.on_recording_stream(add, GPU)
    again = replay.record(add, GPU)
    again()
    assert total.tolist() == [2.0] * 4
    replay.forget_recordings()


@needs_a_card
def test_a_recording_that_a_real_card_refuses_spoils_nothing_for_the_next() -> None:
    numbers, total = torch.ones(4, device=GPU), torch.zeros(4, device=GPU)

    def waits() -> None:
        numbers.sum().item()

    def draws() -> None:
        total.copy_(torch.nn.functional.dropout(numbers, 0.5))

    replay.on_recording_stream(draws, GPU)
    current = torch.cuda.current_stream(GPU)
    with pytest.raises(NotReplayable, match="allowed is 'off'"):
        replay.record(waits, GPU)
    assert torch.cuda.current_stream(GPU) == current
    draws()
    again = replay.record(draws, GPU)
    again()
    assert set(total.tolist()) <= {0.0, 2.0}
    replay.forget_recordings()


@needs_a_card
def test_a_real_card_is_not_waited_for_unnoticed() -> None:
    numbers = torch.ones(4, device=GPU)
    with (
        StaticCopies(numbers) as seen,
        pytest.raises(NotReplayable, match=r"_local_scalar_dense.*makes the CPU wait"),
        replay.without_waiting(seen),
    ):
        numbers.sum().item()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert float(numbers.sum()) == 4


@needs_a_card
@pytest.mark.parametrize("compiled", ["off", "cuda-graph"])
def test_a_real_card_has_finished_when_the_seconds_of_a_training_are_taken(
    compiled: str, tmp_path: Path
) -> None:
    finished: list[bool] = []
    original = client._check_usable

    def check(*given: Any) -> None:
        finished.append(torch.cuda.current_stream().query())
        original(*given)

    with patch.object(client, "_check_usable", check):
        on_a_real_card(tmp_path, "fedavg", compiled, **{"batch-size": 3, "num-clients": 2})
    assert finished == [True] * 4


@needs_a_card
@pytest.mark.parametrize("compiled", ["off", "cuda-graph"])
def test_the_memory_of_a_real_card_does_not_grow_from_round_to_round(compiled: str, tmp_path: Path) -> None:
    held: dict[int, int] = {}

    def kept(opened: Any, *others: Any) -> Any:
        held[opened.client.round] = torch.cuda.memory_allocated()
        return saving.state_after_round(opened, *others)

    keys: dict[str, Any] = {"batch-size": 3, "num-clients": 2, "num-server-rounds": 6, "models": "cnn2"}
    with patch.object(client, "state_after_round", kept):
        run = federation(tmp_path, "fedproto", **keys, device="cuda", compile=compiled).run()
    assert not any(line["failures"] for line in run.strategy.history)
    assert held[6] == pytest.approx(held[3], rel=0.01, abs=2**16)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total of 8 GiB."
        ),
        RuntimeError("CUDA error: out of memory\nwhere a context is made. GPU 0 is another process's."),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` on GPU 0 there"
        ),
    ],
)
def test_a_card_that_is_too_full_is_said_with_what_to_do(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the worker keeps is dropped, whoever it was that asked for memory."""

    def full(*anything: object) -> None:
        raise error

    dropped: list[int] = []
    monkeypatch.setattr(client, "evaluate", full)
    monkeypatch.setattr(client, "clear_networks", lambda: dropped.append(1))
    with pytest.raises(PbflError, match=r"CUDA .* GPU 0 .*; lower batch-size or eval-batch-size"):
        federation(tmp_path, "local", num_clients=1).run()
    assert dropped


def test_the_pretended_card_refuses_what_a_card_refuses() -> None:
    with card():
        here, there = torch.ones(3), torch.ones(3).to(CUDA)
        assert (here.device.type, there.device) == ("cpu", CUDA)
        assert (
            (there + 1).device == torch.zeros(3, device=CUDA).device == torch.ones_like(there).device == CUDA
        )
        with pytest.raises(RuntimeError, match="on the CPU and tensors on the card"):
            here + there
        with pytest.raises(RuntimeError, match="on the CPU and tensors on the card"):
            here[there.long()]
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="Generator"):
            there.normal_(generator=torch.Generator())
        with pytest.raises(RuntimeError, match="a generator on the CPU"):
            torch.randn(3, device=CUDA, generator=torch.Generator())
        for together in (
            torch.stack,
            torch.cat,
        ):  # a number may enter a kernel, not be put beside its results
            with pytest.raises(RuntimeError, match="on the CPU and tensors on the card"):
                together([there.sum(), torch.tensor(2.0)])
        assert (here + there.cpu()).tolist() == [2, 2, 2]
        made: list[torch.Tensor] = []
        again = pretended_recording(lambda: made.append(torch.arange(3, device=CUDA) * there), CUDA)
        again()
        assert made[0].tolist() == [0, 1, 2]
        with pytest.raises(RuntimeError, match=r"a copy between CPU and card|not in a recording"):
            pretended_recording(lambda: made.append(torch.tensor([1.0], device=CUDA)), CUDA)
        assert (
            float(there[torch.tensor([0, 1])].sum() * torch.tensor(2.0)) == 4.0
        )  # indices and single numbers may cross
