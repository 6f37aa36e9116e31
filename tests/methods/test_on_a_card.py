"""Every method with its network and data on a card: nothing stays behind on the CPU, nothing comes out otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import app as client
from pbfl_flwr.flower.client import handshake, saving, session
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.method import Client, Method, Predictor, Round, Update, head_scores
from pbfl_flwr.methods import METHODS
from pbfl_flwr.payloads import Nothing, Prototypes, Weights, WeightsAndPrototypes
from pbfl_flwr.task import Task
from pbfl_flwr.testing import check_method
from pbfl_flwr.training import loop
from pbfl_flwr.training.loop import classification, fit
from tests.flower.inprocess import Federation, federation
from tests.pretend_card import CUDA, OnCard, card

needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GFPL: dict[str, Scalar] = {"gfpl.start": 1, "gfpl.interval": 1}
# What else moves tensors: masked and quantised prototypes, noise, kept state of an optimizer, several evaluations.
VARIANTS: dict[str, dict[str, Scalar]] = {
    "sparse": {
        "cps-dim": 8,
        "aggregation": "ppa",
        "cpkd": "sample",
        "wire-dtype": "int8",
    },
    "private": {"dp-clip": 1.0, "dp-noise": 0.5, "dp-randomness": "seed", "regularizer-form": "l2"},
    "adam": {"optimizer": "adam", "learning-rate": 0.001, "optimizer-state": "kept", "max-grad-norm": 1.0},
    "evaluated": {
        "per-class": True,
        "validation-share": 0.3,
        "local-epochs": 2,
        "collect": "last-epoch",
        "augmentation": "crop,flip",
    },
}


@contextmanager
def pretended() -> Iterator[None]:
    """Within the context all clients have the pretended card."""
    with (
        card(),
        patch.object(handshake, "choose_device", lambda wanted: CUDA),
        patch.object(session, "choose_device", lambda wanted: CUDA),
        patch.object(session, "make_deterministic"),
    ):
        yield


def alike(tmp_path: Path, method: str, keys: dict[str, Any], **how: Any) -> None:
    on_cpu = federation(tmp_path / "cpu", method, num_clients=2, device="cpu", **how, **keys).run()
    before = OnCard.operations
    # not filled, since the CPU that computes rounds differently with another size
    with pretended(), patch.object(loop, "_filled_size", min):
        on_card = federation(tmp_path / "card", method, num_clients=2, **how, **keys).run()
    assert [line.failures for line in on_card.strategy.history] == [[], []]
    assert on_card.fingerprint == on_cpu.fingerprint
    assert OnCard.operations > before + 100, "it was trained elsewhere"


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_on_a_card(name: str, tmp_path: Path) -> None:
    alike(tmp_path, "fedproto", VARIANTS[name])


@pytest.mark.parametrize("name", METHODS)
def test_method_on_a_card(name: str, tmp_path: Path) -> None:
    alike(tmp_path, name, GFPL if name == "gfpl" else {})


@dataclass(frozen=True)
class Plain(Method[Nothing, Nothing, WeightsAndPrototypes]):
    """A user's method, whose uploads stay where its network is."""

    name: str = "plain"

    state = down = Nothing
    up = WeightsAndPrototypes

    def init(self, task: Task, seed: int) -> Nothing:
        return Nothing()

    def local_update(self, client: Client, down: Nothing) -> Update[WeightsAndPrototypes]:
        report = fit(client, classification(client.model))
        weights = {name: weight.detach().clone() for name, weight in client.model.named_parameters()}
        classes = client.task.num_classes
        present = torch.bincount(client.data.train.labels, minlength=classes) > 0
        rows = present[:, None] * torch.ones(classes, client.task.feature_dim, device=client.device)
        payload = WeightsAndPrototypes(Weights(weights), Prototypes(rows, present))
        return Update(payload, {**report.optimizer, "rows": rows}, report.metrics())

    def predictors(self, client: Client, down: Nothing) -> dict[str, Predictor]:
        assert all(kept.device.type == "cpu" for kept in client.memory.values())
        return {"head": head_scores}

    def aggregate(self, state: Nothing, uploads: object, round_info: Round) -> Nothing:
        return state


def plain_method(settings: Settings) -> Plain:
    return Plain()


def test_uploads_and_memory_of_a_users_method_may_be_on_the_card(tmp_path: Path) -> None:
    alike(tmp_path, f"{__name__}:plain_method", {})


def test_check_method_passes_on_a_card() -> None:
    """Where the last batch of an evaluation is filled up."""
    with pretended():
        check_method(f"{__name__}:plain_method")


def on_a_real_card(tmp_path: Path, name: str, **keys: Scalar) -> Federation:
    """Return a run of two rounds in which nothing failed."""
    config: dict[str, Any] = {**(GFPL if name == "gfpl" else {}), "device": "cuda", **keys}
    run = federation(tmp_path, name, **config).run()
    assert [line.failures for line in run.strategy.history] == [[], []]
    assert run.strategy.history[-1].accuracy["head"].clients > 0
    return run


def losses(run: Federation) -> dict[str, float]:
    """Return the mean losses of the first round, before rounding grows."""
    metrics = run.strategy.history[0].client_metrics
    return {key: value for key, value in metrics.items() if key.startswith("loss.") and value is not None}


@needs_a_card
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {}) for name in METHODS),
        *((name, {"local-epochs": 2}) for name in METHODS),
        *(("fedproto", keys) for keys in VARIANTS.values()),
        ("fedfa", {"fedfa.anchor-mean": "all-batches"}),
    ],
)
def test_real_card(
    name: str, keys: dict[str, Scalar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's results within rounding, the same bits again, and with CUDA graphs."""
    replays: list[object] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    eager = on_a_real_card(tmp_path / "eager", name, **{"batch-size": 3, **keys})
    assert not replays
    on_cpu = losses(on_a_real_card(tmp_path / "cpu", name, **{"batch-size": 3, "device": "cpu", **keys}))
    assert losses(eager) == pytest.approx(on_cpu, rel=0.02, abs=1e-3)
    again = on_a_real_card(tmp_path / "again", name, **{"batch-size": 3, **keys})
    assert again.fingerprint == eager.fingerprint
    graphed = on_a_real_card(tmp_path / "graphed", name, **{"batch-size": 3, "cuda-graphs": True, **keys})
    assert replays
    assert graphed.fingerprint == eager.fingerprint


@needs_a_card
def test_step_that_waits_for_the_card_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waiting(*arguments: Any, **keywords: Any) -> torch.Tensor:
        value = cross_entropy(*arguments, **keywords)
        assert value.item() >= 0
        return value

    cross_entropy = torch.nn.functional.cross_entropy
    keys: dict[str, Any] = {"batch-size": 3, "num-clients": 1, "cuda-graphs": True}
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "cross_entropy", waiting)
        with pytest.raises(PbflError, match="cuda-graphs = true: a training step cannot be recorded"):
            federation(tmp_path / "waiting", "local", device="cuda", **keys).run()
    assert on_a_real_card(tmp_path / "next", "local", **keys).fingerprint == (
        on_a_real_card(tmp_path / "eager", "local", **{**keys, "cuda-graphs": False}).fingerprint
    )


@needs_a_card
def test_a_real_card_has_finished_when_the_seconds_of_a_training_are_taken(tmp_path: Path) -> None:
    finished: list[bool] = []
    original = client._check_usable

    def check(*given: Any) -> None:
        finished.append(torch.cuda.current_stream().query())
        original(*given)

    with patch.object(client, "_check_usable", check):
        on_a_real_card(tmp_path, "fedavg", **{"batch-size": 3, "num-clients": 2})
    assert finished == [True] * 4


@needs_a_card
def test_the_memory_of_a_real_card_does_not_grow_from_round_to_round(tmp_path: Path) -> None:
    held: dict[int, int] = {}

    def kept(opened: Any, *others: Any) -> Any:
        held[opened.client.round] = torch.cuda.memory_allocated()
        return saving.state_after_round(opened, *others)

    keys: dict[str, Any] = {"batch-size": 3, "num-clients": 2, "num-server-rounds": 6, "models": "cnn2"}
    with patch.object(client, "state_after_round", kept):
        run = federation(tmp_path, "fedproto", **keys, device="cuda").run()
    assert not any(line.failures for line in run.strategy.history)
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
    monkeypatch.setattr(Worker, "release_networks", lambda worker: dropped.append(1))
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
        assert (
            float(there[torch.tensor([0, 1])].sum() * torch.tensor(2.0)) == 4.0
        )  # indices and single numbers may cross
