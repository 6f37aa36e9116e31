"""A node's own configuration: what a device may say, and what the server's run configuration may not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import device
from pbfl_flwr.flower.client.device import choose_device, identify, in_worker, own_settings, peak_gpu_memory
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.client_store import ClientStore
from pbfl_flwr.sinks import steps
from tests.flower.inprocess import federation

RUN = parse(
    {"num-clients": 3, "run-dir": "/server/run", "data-dir": "/server/data", "models": "cnn4,resnet4"},
    SECTIONS,
)


def context(node: dict[str, Any]) -> Context:
    return Context(run_id=7, node_id=1, node_config=node, state=RecordDict(), run_config={})


def test_simulated_client_uses_the_run_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "in_worker", lambda: True)
    node = {"partition-id": 2, "num-partitions": 3}
    assert own_settings(RUN, node) == RUN
    identity = identify(context(node), RUN, "e")
    assert (identity.client, identity.simulated, identity.own_data) == (2, True, False)
    assert identity.state_dir == Path("/server/run/clients/e")


@pytest.mark.parametrize("node", [{"client-id": 2}, {"partition-id": 2, "num-partitions": 3}])
def test_device_ignores_paths_of_the_server(node: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's pages start SuperNodes with a partition-id; this process is no worker of Ray all the same."""
    monkeypatch.setenv("PBFL_HOME", "/device/home")
    settings, identity = own_settings(RUN, node), identify(context(node), RUN, "e")
    assert (settings.data.data_dir, settings.models) == ("", RUN.models)
    assert (identity.client, identity.simulated) == (2, False)
    assert identity.state_dir == Path("/device/home/state/e")


@pytest.mark.long
def test_detects_ray_workers() -> None:
    import ray

    quiet: dict[str, Any] = {
        "include_dashboard": False,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    ray.init("local", num_cpus=5, **quiet)  # not a cluster that this machine may belong to
    try:

        @ray.remote
        class Worker:
            def is_one(self) -> tuple[bool, int]:
                from pbfl_flwr.flower.client.device import in_worker, share_of_cores

                return in_worker(), share_of_cores()

        worker: Any = Worker  # Ray's decorator hides what it made of the class
        assert ray.get(worker.options(num_cpus=3).remote().is_one.remote()) == (True, 3)
        assert not in_worker()  # a process that merely talks to Ray
    finally:
        ray.shutdown()


def test_node_config_overrides_settings(tmp_path: Path) -> None:
    node: dict[str, Any] = {
        "client-id": 0,
        "data-path": str(tmp_path / "mine.npz"),
        "model": "resnet8",
        "batch-size": 4,
        "eval-batch-size": 32,
        "threads": 3,
        "layout": "contiguous",
        "precision": "bfloat16",
        "state-dir": "/var/lib/pbfl",
    }
    settings = own_settings(RUN, node)
    assert (settings.data.dataset, settings.data.data_dir) == ("npz", str(tmp_path / "mine.npz"))
    how = settings.training
    assert (settings.models.models, how.batch_size, how.threads) == ("resnet8", 4, 3)
    assert settings.evaluation.eval_batch_size == 32
    assert (how.layout, how.precision) == ("contiguous", "bfloat16")
    identity = identify(context(node), settings, "e")
    assert identity.own_data
    assert identity.state_dir == Path("/var/lib/pbfl/e")
    assert own_settings(RUN, {"client-id": 0, "data-path": str(tmp_path)}).data.dataset == "image-folder"


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"client-id": 0, "modle": "resnet8"}, "unknown key 'modle'; must be one of client-id"),
        ({"client-id": 0, "batch-size": 0}, "batch-size = 0: must be"),
        ({"client-id": 0, "threads": 0}, "threads = 0: must be"),
        (
            {"client-id": 0, "data-path": "relative"},
            "data-path = 'relative' in --node-config: must be an absolute path",
        ),
    ],
)
def test_rejects_invalid_node_config(node: dict[str, Any], message: str) -> None:
    with pytest.raises(PbflError, match=message):
        own_settings(RUN, node)


@pytest.mark.parametrize(
    "client", [-1, True, 1.5, "", "0", "17", "a b", "a/b", "..\\x", "é", "x" * 65, "a\n"]
)
def test_client_id_is_a_whole_number_or_a_name(client: Any) -> None:
    with pytest.raises(
        PbflError, match=r"client-id = .* must be a whole number from 0, or a name of 1 to 64"
    ):
        identify(context({"client-id": client}), RUN, "e")


def test_paths_of_node_config_are_absolute_or_start_with_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/pi")
    node = {"client-id": 0, "data-path": "~/mine.npz", "state-dir": "~/state"}
    settings = own_settings(RUN, node)
    assert settings.data.data_dir == "/home/pi/mine.npz"
    assert identify(context(node), settings, "e").state_dir == Path("/home/pi/state/e")
    for path in ("state", ""):
        with pytest.raises(PbflError, match=f"state-dir = '{path}' in --node-config: must be an absolute"):
            identify(context({"client-id": 0, "state-dir": path}), RUN, "e")


@pytest.mark.parametrize("name", ["site-a", "St.Mary_3", "0x", "x" * 64, ".."])
def test_device_may_have_a_name(name: str) -> None:
    identity = identify(context({"client-id": name, "data-path": "/d", "state-dir": "/s"}), RUN, "e")
    assert (identity.client, identity.simulated, identity.own_data) == (name, False, True)
    assert ClientStore(identity.state_dir, "e", name, "cnn4").path == Path(f"/s/e/named-{name}.safetensors")


def test_named_device_needs_one_architecture() -> None:
    node = {"client-id": "site-a", "data-path": "/d"}
    with pytest.raises(
        PbflError,
        match=r"models = 'cnn4,resnet4' assigns cnn4, resnet4 by client number, .* add model='cnn4'",
    ):
        own_settings(RUN, node)
    assert own_settings(RUN, {**node, "model": "resnet4"}).models.models == "resnet4"


@pytest.mark.parametrize(
    ("cuda", "visible", "chosen"),
    [(True, "", "cpu"), (True, "0", "cuda"), (True, None, "cuda"), (False, None, "cpu")],
)
def test_hidden_gpu_is_not_used(
    cuda: bool, visible: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a process that has asked for cards before, as one that runs clients itself may have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device("auto") == torch.device(chosen)
    if chosen == "cpu":
        with pytest.raises(PbflError, match="this client sees no CUDA device"):
            choose_device("cuda")


def test_reports_peak_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_gpu_memory() == 0.0
    silent = federation(tmp_path / "cpu", num_server_rounds=1).run().strategy.history[0]
    assert silent.gpu_mb == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**19)
    assert peak_gpu_memory() == 1.5
    line = federation(tmp_path / "gpu", num_server_rounds=1).run().strategy.history[0]
    assert line.failures == []
    assert line.gpu_mb == 1.5
    reported = Report(4, 3, 1, {"head": 1}, metrics={}, gpu_mb=1.5)
    assert Report.from_record(reported.to_record()) == reported
    assert steps(line)[-1][1]["gpu-mb"] == 1.5


def test_a_device_deals_its_own_data_to_itself_whatever_the_run_deals_by() -> None:
    run = parse({"num-clients": 3, "partition": "natural"}, SECTIONS)
    assert own_settings(run, {"client-id": 0, "data-path": "/d/x.npz"}).data.partition == "iid"
    assert own_settings(run, {"client-id": 0}).data.partition == "natural"


def test_a_device_names_its_label_column_and_processor() -> None:
    node = {
        "client-id": 0,
        "data-path": "/d/x.csv",
        "label-column": "kind",
        "device": "cpu",
        "input-shape": "1,2,2",
    }
    settings = own_settings(parse({"num-clients": 3, "device": "cuda"}, SECTIONS), node)
    assert (settings.data.label_column, settings.training.device) == ("kind", "cpu")
    assert settings.data.input_shape == "1,2,2"


def test_a_server_makes_no_device_download() -> None:
    run = parse({"num-clients": 3, "download": True}, SECTIONS)
    assert run.data.download
    assert not own_settings(run, {"client-id": 0}).data.download
