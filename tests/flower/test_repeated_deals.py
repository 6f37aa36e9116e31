"""A dataset or partition that is a user's function must give all processes of a run the same samples."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord

from pbfl_flwr.config import DataSettings, Scalar, parse
from pbfl_flwr.data import LoadedData, same_deal
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.engines.local import federate
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.flower.messages.identity import check_deal
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.directory import RunDirectory
from tests.flower.inprocess import InProcessGrid
from tests.flower.test_trust import COMMON, declaring
from tests.small_runs import pbfl

MODULE = """
import os
import numpy as np

def seeded(labels, num_clients, generator):
    return np.array_split(generator.permutation(len(labels)), num_clients)

def unseeded(labels, num_clients, generator):
    return np.array_split(np.random.default_rng().permutation(len(labels)), num_clients)

def rounded(settings):
    import torch
    x = torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {"x": ((x - x.mean()) / x.std()).numpy(), "y": np.arange(60) % 3}

def signs(settings):
    return {"x": np.random.default_rng().choice([-1.0, 1.0], size=(60, 32)), "y": np.arange(60) % 3}

def padded(settings):
    x = np.zeros((60, 128), np.float32)
    x[:, :40] = np.random.default_rng().integers(1, 99, size=(60, 40))
    return {"x": x, "y": np.arange(60) % 3}

def components(settings):
    import torch
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 20, generator=generator) @ torch.randn(20, 64, generator=generator)
    turned = x @ torch.linalg.qr(torch.randn(64, 64, generator=generator))[0] * (torch.arange(64) < 20)
    return {"x": (turned + 1e-6 * torch.get_num_threads() * torch.randn(60, 64)).numpy(), "y": np.arange(60) % 3}

def inputs(settings):
    generator = np.random.default_rng()
    return {"x": generator.normal(size=(120, 1, 16, 16)).astype(np.float32), "y": np.arange(120) % 3}
"""
SAYS = (
    "it must give the same every time, so draw from the generator that it gets, or from one with a fixed seed"
)
KEYS: dict[str, Scalar] = {
    "method": "local",
    "models": "cnn2",
    "feature-dim": 8,
    "num-clients": 3,
    "num-server-rounds": 1,
    "max-samples": 90,
}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "dealing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield
    sys.modules.pop("dealing", None)


def deal(**keys: Scalar) -> str:
    given = {key.replace("_", "-"): value for key, value in keys.items()}
    settings = parse({**KEYS, **given}, SECTIONS)
    return LoadedData().deal(settings.data, settings.run.num_clients)


def test_deals_are_told_apart_where_code_makes_them() -> None:
    assert deal() == ""
    seeded = deal(partition="dealing:seeded")
    assert seeded == deal(partition="dealing:seeded")
    assert seeded != deal(partition="dealing:seeded", partition_seed=2)
    assert seeded != deal(partition="dealing:seeded", num_clients=4)
    assert deal(partition="dealing:unseeded") != deal(partition="dealing:unseeded")
    for name in ("inputs", "signs", "padded"):
        assert not same_deal(*(deal(dataset=f"dealing:{name}", max_samples=0) for _ in range(2))), name


def test_rounding_that_depends_on_the_threads_is_no_other_deal() -> None:
    deals, noisy, sums = [], [], set()
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            deals.append(deal(dataset="dealing:rounded", max_samples=0))
            noisy.append(deal(dataset="dealing:components", max_samples=0))
            sums.add(float(torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(0)).mean()))
    finally:
        torch.set_num_threads(threads)
    assert len(sums) > 1, "the sums differ in rounding here"
    assert all(same_deal(deals[0], each) for each in deals)
    assert all(same_deal(noisy[0], each) for each in noisy)  # of features that are rounding noise
    assert not same_deal(deals[0], deals[0].rpartition(" ")[0])
    assert not same_deal(deals[0], "another")
    assert same_deal("h 1 2", "h 1.0005 2")
    assert not same_deal("h 1 2", "h 1.002 2")
    assert same_deal("h 1 0", "h 1 0.0005")
    assert not same_deal("h 1 0", "h 1 0.002")
    assert not same_deal("h 1", "h nan")
    assert not same_deal("h x", "h x")


def test_the_samples_of_a_run_are_known_again_whoever_deals_them() -> None:
    def settings_of(**keys: Scalar) -> DataSettings:
        return parse({**KEYS, "max-samples": 0, **keys}, SECTIONS).data

    def of_run(data: DataSettings, fingerprint: str | None, deal: str) -> bool:
        return LoadedData().is_of_run(data, 3, fingerprint, deal)

    builtin = settings_of()
    fingerprint = LoadedData().pool(builtin).fingerprint
    assert [of_run(builtin, each, "") for each in (fingerprint, None, fingerprint[::-1])] == [
        True,
        True,
        False,
    ]

    rounded, threads, recorded = settings_of(dataset="dealing:rounded"), torch.get_num_threads(), []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            loaded = LoadedData()
            recorded.append((loaded.pool(rounded).fingerprint, loaded.deal(rounded, 3)))
    finally:
        torch.set_num_threads(threads)
    assert len({fingerprint for fingerprint, _ in recorded}) > 1
    assert all(of_run(rounded, *each) for each in recorded)

    for keys in ({"partition": "dealing:unseeded"}, {"dataset": "dealing:inputs"}):
        data, loaded = settings_of(**keys), LoadedData()
        assert not of_run(data, loaded.pool(data).fingerprint, loaded.deal(data, 3))


def test_new_clients_get_samples_that_differ_in_rounding_but_no_others(tmp_path: Path) -> None:
    path, dataset = tmp_path / "run", "dealing:rounded"
    keys = {**KEYS, "method": "fedproto", "dataset": dataset, "max-samples": 30, "models": "mlp"}
    federate(path, keys, 3, Resources(workers=1))
    partition = json.loads((path / "partition.json").read_text())
    (path / "partition.json").write_text(json.dumps({**partition, "data": partition["data"][::-1]}))
    words = ["new-clients", path, "--import", dataset, "--clients", 1]
    played = pbfl(*words)
    assert played.exit_code == 0, played.output
    about = json.loads((path / "run.json").read_text())
    clients = [{**client, "deal": f"0{client['deal']}"} for client in about["clients"]]
    (path / "run.json").write_text(json.dumps({**about, "clients": clients}))
    refused = pbfl(*words)
    assert refused.exit_code == 2
    assert "are not those with which it began" in " ".join(refused.stderr.split())


@pytest.mark.parametrize("key", [{"partition": "dealing:unseeded"}, {"dataset": "dealing:inputs"}])
def test_two_workers_with_different_samples_are_no_run(tmp_path: Path, key: dict[str, Scalar]) -> None:
    with pytest.raises(PbflError, match=SAYS):
        federate(tmp_path / "run", {**KEYS, **key}, 3, Resources(workers=2))
    assert not (tmp_path / "run/run.json").exists()


def test_a_run_is_not_resumed_with_other_samples(tmp_path: Path) -> None:
    run, one = tmp_path / "run", Resources(workers=1)
    for name in ("seeded", "unseeded"):
        keys = {**KEYS, "partition": f"dealing:{name}"}
        federate(run / name, keys, 3, one)
        assert {len(client.deal.split()) for client in RunDirectory(run / name).record().clients} == {6}
    more: dict[str, Scalar] = {**KEYS, "num-server-rounds": 2, "resume": True}
    federate(run / "seeded", {**more, "partition": "dealing:seeded"}, 3, one)
    with pytest.raises(PbflError, match=f"client 0 other samples than it had in this run; {SAYS}"):
        federate(run / "unseeded", {**more, "partition": "dealing:unseeded"}, 3, one)


def started(*replies: dict[str, Any]) -> MethodStrategy:
    strategy = MethodStrategy(parse(COMMON, SECTIONS))
    strategy.start(InProcessGrid(declaring(*replies), {}, 4))
    return strategy


def test_deals_are_compared_where_one_process_makes_all_of_them() -> None:
    deals = ["a", "a", "b", "a"]
    with pytest.raises(PbflError, match=f"client 0 other samples than client 2; {SAYS}"):
        started(*({"deal": each, "simulated": True} for each in deals))
    assert started(
        *({"deal": each} for each in deals)
    ).done  # devices, of which nobody knows which one is right


def test_a_process_that_dealt_otherwise_does_not_train() -> None:
    check_deal(ConfigRecord(), "here 1.5")
    check_deal(ConfigRecord({"deal": "here 1.5"}), "here 1.5")
    with pytest.raises(
        PbflError, match=f"gives this process other samples than those of the handshake; {SAYS}"
    ):
        check_deal(ConfigRecord({"deal": "elsewhere 1.5"}), "here 1.5")
