"""Every method with its network and data on a card: nothing stays behind on the CPU, nothing comes out otherwise."""

from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pbfl_flwr import replay
from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower import client, introduction, keeping, opening
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from tests.flower.inprocess import federation
from tests.pretend_card import CUDA, OnCard, Recording, card

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


def alike(tmp_path: Path, method: str, keys: dict[str, Any], **how: Any) -> None:
    on_cpu = federation(tmp_path / "cpu", method, num_clients=3, **how, **keys).run()
    before = OnCard.operations
    with card(), patch.object(opening, "choose_device", lambda wanted: CUDA):
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
    with (
        card(),
        patch.object(opening, "choose_device", lambda wanted: CUDA),
        patch.object(introduction, "choose_device", lambda wanted: CUDA),
        patch.object(replay, "_recordings", OrderedDict()),
    ):
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
        return keeping.kept(opened, *others)

    keys: dict[str, Any] = {"batch-size": 3, "num-clients": 3, "models": "tests.methods.tiny_nets:normed"}
    with patch.object(client, "kept", kept):
        on_cpu = federation(tmp_path / "cpu", "fedavg", **keys).run()
        made = Recording.made
        with (
            card(),
            patch.object(opening, "choose_device", lambda wanted: CUDA),
            patch.object(introduction, "choose_device", lambda wanted: CUDA),
            patch.object(replay, "_recordings", OrderedDict()),
        ):
            on_card = federation(tmp_path / "card", "fedavg", **keys, compile="cuda-graph").run()
            assert opening._network.cache_info().currsize == 1
    failures = [[failure["client"] for failure in line["failures"]] for line in on_card.strategy.history]
    assert failures == [[1], []]
    assert on_card.fingerprint == on_cpu.fingerprint
    assert Recording.made - made == 2  # one for client 0, one for those after the failure


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "keys"),
    [*product(REPLAYABLE, [{}]), ("fedproto", {**VARIANTS["sgd"], "models": "cnn2"})],  # the last has dropout
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


def test_a_card_that_is_too_full_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*anything: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total of 8 GiB."
        )

    monkeypatch.setattr(client, "evaluate", full)
    with pytest.raises(
        PbflError, match=r"Tried to allocate 2.00 GiB. GPU 0 .*; lower batch-size or eval-batch-size"
    ):
        federation(tmp_path, "local", num_clients=1).run()


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
        assert (here + there.cpu()).tolist() == [2, 2, 2]
        assert (
            float(there[torch.tensor([0, 1])].sum() * torch.tensor(2.0)) == 4.0
        )  # indices and single numbers may cross
