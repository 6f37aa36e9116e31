"""Sinks: what they are given, what they write, that a resumed run goes on in them, and that they cost no run."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock
from urllib.request import urlopen

import pytest

from pbfl_flwr import sinks
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.console import screen
from pbfl_flwr.experiments.execute.progress import Follower
from pbfl_flwr.experiments.show import show_run
from pbfl_flwr.flower.deploy.processes import free_port
from pbfl_flwr.runs.directory import RunDirectory, RunRefused
from pbfl_flwr.runs.records import NOT_CONNECTED, RunRecord
from pbfl_flwr.util.atomic_files import UnsavedState
from tests.flower.inprocess import after_round, federation
from tests.small_runs import entry, rounds_of


def run(tmp_path: Path, names: str, rounds: int = 2, resume: bool = False) -> Path:
    keys: dict[str, Any] = {"num-clients": 2, "num-server-rounds": rounds, "models": "cnn4", "sinks": names}
    made = federation(tmp_path, on_disk=True, resume=resume, **keys).run()
    assert made.strategy.directory is not None
    return made.strategy.directory.path


def accuracies(run_dir: Path, predictor: str = "head") -> dict[int, float]:
    return {
        record.accuracy_of_round: record.accuracy[predictor].weighted
        for record in RunDirectory(run_dir).round_records()
    }


class Recording:
    """Remembers its steps, and breaks after so many, or when it is closed."""

    def __init__(self, most: int = 99, *, closes: bool = True) -> None:
        self.steps: list[tuple[int, Mapping[str, float]]] = []
        self.most, self.closes, self.ending = most, closes, ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if len(self.steps) == self.most:
            raise OSError("No space left on device")
        self.steps.append((step, metrics))

    def close(self, ending: str) -> None:
        if not self.closes:
            raise OSError("No space left on device")
        self.ending = ending


def register(monkeypatch: pytest.MonkeyPatch, name: str, sink: Recording) -> None:
    module = ModuleType(f"{name}_sink")
    module.__dict__["Sink"] = lambda run_dir, about: sink
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sinks.SINKS, name, ("json", f"{module.__name__}:Sink"))


def test_figures_stand_at_the_step_they_belong_to() -> None:
    (record,) = rounds_of(entry(3, 0.5, 0.25, server_metrics={"margin": 2.0, "lost": None}))
    ((step, figures),) = sinks.steps(record)
    assert step == 3
    assert figures["accuracy/head/weighted"] == 0.5
    assert figures["accuracy/global/std"] == 0.125
    assert figures["bytes/up/payload"] == 200
    assert figures["server/margin"] == 2.0
    assert figures["seconds/clients/fit"] == 1.0
    assert (figures["trained"], figures["failures"]) == (2, 0)
    assert "server/lost" not in figures

    before = entry(3, 0.5, 0.25, accuracy_of_round=2, final={"accuracy": {"head": {"weighted": 0.75}}})
    (first, early), (second, late) = sinks.steps(rounds_of(before)[0])
    assert (first, second) == (2, 3)
    assert early["accuracy/head/weighted"] == 0.5
    assert late["accuracy/head/weighted"] == 0.75
    assert early["test-loss"] == 0.25  # of the same pass
    assert "test-loss" not in late
    assert "bytes/up/payload" not in early


def test_unknown_sinks_and_missing_libraries_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sinks.names("wandb, ,mlflow,wandb, ") == ["wandb", "mlflow"]
    for library, _ in sinks.SINKS.values():
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(PbflError) as caught:
        sinks.check("tensorboard, paper,wandb")
    lines = str(caught.value).splitlines()
    assert (
        "on the server needs tensorboard, which is not installed: pip install 'pbfl-flwr[tensorboard]'"
        in lines[0]
    )
    assert "unknown sink 'paper'; must be one of tensorboard, wandb, mlflow, prometheus" in lines[1]
    assert "pbfl-flwr[wandb]" in lines[2]
    with pytest.raises(PbflError, match="needs mlflow, which is not installed"):
        run(tmp_path, "mlflow")
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_sink_needs_a_run_directory(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(PbflError, match="need a run directory"):
        federation(tmp_path, sinks="tensorboard").run()


@pytest.mark.parametrize(
    ("sink", "number"),
    [(Recording(most=1), 2), (Recording(most=3), 4), (Recording(closes=False), 4)],
    ids=["in a round", "in the last round", "at its end"],
)
def test_a_sink_that_fails_is_dropped_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sink: Recording,
    number: int,
) -> None:
    register(monkeypatch, "brittle", sink)
    run_dir = run(tmp_path, "brittle", rounds=4)
    message = f"after round {number}: sink brittle failed and is not used any more: OSError: No space left"
    assert [line[: len(message)] for line in RunDirectory(run_dir).record().warnings] == [message]
    assert len(sink.steps) == min(sink.most, 4)
    assert not sink.ending
    capsys.readouterr()
    Follower(run_dir, 0, screen(), from_start=True).update()
    show_run(run_dir, screen())
    assert capsys.readouterr().out.count(message) == 2


def test_the_warning_of_a_run_that_was_moved_is_written_into_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "brittle", Recording(closes=False))
    fed = federation(tmp_path, on_disk=True, sinks="brittle")

    def moved() -> None:
        if not (tmp_path / "moved").exists():  # for the other run, too, something happens
            shutil.move(fed.directory.path, tmp_path / "moved")
            federation(tmp_path, on_disk=True, seed=7).run()

    with after_round(1, moved), pytest.raises(RunRefused, match="was moved or removed"):
        fed.run()
    assert fed.directory.record().warnings == []


def test_only_warnings_of_this_start_are_told_while_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, "brittle", Recording(most=1))
    run_dir = run(tmp_path, "brittle")
    follower = Follower(run_dir, 0, screen())
    register(monkeypatch, "brittle", Recording(most=0))
    capsys.readouterr()
    follower.update()
    assert "warning" not in capsys.readouterr().out
    run(tmp_path, "brittle", rounds=3, resume=True)
    capsys.readouterr()
    follower.update()
    assert [
        line.split(": sink")[0] for line in capsys.readouterr().out.splitlines() if "warning: after" in line
    ] == ["  warning: after round 3"]


def test_a_warning_of_a_sink_that_cannot_be_kept_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "brittle", Recording(most=1))
    update = RunDirectory.update

    def full(self: RunDirectory, **changes: Any) -> None:
        if "warnings" in changes:
            raise UnsavedState("run.json cannot be written")
        update(self, **changes)

    monkeypatch.setattr(RunDirectory, "update", full)
    assert RunDirectory(run(tmp_path, "brittle")).result()


def test_a_strategy_that_goes_on_opens_its_sinks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Recording] = []

    def opening(run_dir: Path, about: RunRecord) -> Recording:
        opened.append(Recording())
        return opened[-1]

    register(monkeypatch, "closing", Recording())
    monkeypatch.setattr(sys.modules["closing_sink"], "Sink", opening)
    made = federation(tmp_path, on_disk=True, num_clients=2, models="cnn4", sinks="closing")
    for rounds in (1, 2):
        made.strategy.start(made.grid, num_rounds=rounds)
    assert [[step for step, _ in sink.steps] for sink in opened] == [[1], [2]]
    assert all(sink.ending == "finished" for sink in opened)


def test_a_sink_that_cannot_be_opened_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sinks.SINKS, "absent", ("json", "no_such_module_at_all:Sink"))
    register(monkeypatch, "open", sink := Recording())
    (warning,) = RunDirectory(run(tmp_path, "absent,open")).record().warnings
    assert warning.startswith("sink absent cannot be opened and is left out: ModuleNotFoundError")
    assert [step for step, _ in sink.steps] == [1, 2]


@pytest.mark.parametrize(("error", "ending"), [(ValueError, "failed"), (KeyboardInterrupt, "killed")])
def test_a_run_that_does_not_finish_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], ending: str
) -> None:
    register(monkeypatch, "open", sink := Recording())
    made = federation(tmp_path, on_disk=True, num_clients=2, models="cnn4", sinks="open")

    def end(number: int, arrays: object) -> None:
        raise error

    with pytest.raises(error):
        made.strategy.start(made.grid, evaluate_fn=end)
    assert sink.ending == ending


@pytest.mark.parametrize(
    "address", ["", "9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:65536"]
)
def test_the_address_of_prometheus_is_checked_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setitem(sinks.SINKS, "prometheus", ("json", sinks.SINKS["prometheus"][1]))
    monkeypatch.setenv("PBFL_PROMETHEUS", address)
    with pytest.raises(PbflError, match=f"^PBFL_PROMETHEUS = '{address}': must be HOST:PORT"):
        sinks.check("prometheus")
    monkeypatch.setenv("PBFL_PROMETHEUS", "[::1]:9464")
    assert sinks.prometheus_address() == ("::1", 9464)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = run(tmp_path, "tensorboard")
    run(tmp_path, "tensorboard", rounds=3, resume=True)
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    result = {item.step: item.value for item in events.Scalars("accuracy/head/weighted")}
    assert result == pytest.approx(accuracies(run_dir))
    assert sorted(result) == [1, 2, 3]
    assert "bytes/up/total" in events.Tags()["scalars"]
    assert len(events.Tensors("configuration/text_summary")) == 1
    assert stat.S_IMODE((run_dir / "tensorboard").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (run_dir / "tensorboard").iterdir()} == {0o600}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_is_found_at_the_step_that_tensorboard_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from pbfl_flwr.sinks import tensorboard

    sink = tensorboard.TensorBoard(tmp_path, MagicMock(configuration={}))
    monkeypatch.setattr(tensorboard, "private_opener", lambda _, flags: os.open("/dev/full", flags))
    with pytest.raises(OSError, match="No space left"):
        sink.log(1, {"accuracy": 0.5})


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    run_dir = run(tmp_path, "mlflow")
    run(tmp_path, "mlflow", rounds=3, resume=True)
    client = MlflowClient((run_dir / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("pbfl-flwr")
    assert experiment is not None
    (result,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(result.info.run_id, "accuracy/head/weighted")
    assert {item.step: item.value for item in history} == pytest.approx(accuracies(run_dir))
    assert len(history) == 3
    assert result.data.params["learning-rate"] == "0.01"
    assert result.info.status == "FINISHED"
    sink = sinks.Sinks("mlflow", run_dir, RunDirectory(run_dir).record())
    assert sink.close("killed") == []
    assert client.get_run(result.info.run_id).info.status == "KILLED"


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """A stand-in for the library, which need not be there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    library = MagicMock(MlflowException=RuntimeError)
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in ("mlflow", "mlflow.entities", "mlflow.exceptions", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.delitem(sys.modules, "pbfl_flwr.sinks.mlflow_store", raising=False)
    monkeypatch.setitem(sinks.SINKS, "mlflow", ("json", sinks.SINKS["mlflow"][1]))
    yield library
    del sys.modules["pbfl_flwr.sinks.mlflow_store"]


@pytest.mark.parametrize("found", [MagicMock(experiment_id="7"), None])
def test_mlflows_experiment_may_be_made_by_another_run_meanwhile(mlflow: MagicMock, found: Any) -> None:
    client = mlflow.MlflowClient.return_value
    client.get_experiment_by_name.side_effect = [None, found]
    client.create_experiment.side_effect = RuntimeError("Experiment(name=pbfl-flwr) already exists")
    opened = sinks.Sinks("mlflow", Path("mine"), MagicMock())
    if found:
        assert opened.left_out == []
        assert client.search_runs.call_args.args[0] == ["7"]
    else:
        (line,) = opened.left_out
        assert "already exists" in line


def test_a_run_that_mlflow_made_twice_is_resumed_with_its_figures(mlflow: MagicMock) -> None:
    """As a server does that answers late and is asked again."""
    client, about = mlflow.MlflowClient.return_value, MagicMock(experiment="mine", configuration={"seed": 1})
    unused, used = MagicMock(), MagicMock()
    unused.info.run_id, unused.data.params = "0", {}
    used.info.run_id, used.data.params = "1", {}
    client.create_run.return_value = used
    client.search_runs.side_effect = [[], [unused, used], [unused, used]]
    sinks.Sinks("mlflow", Path("mine"), about)
    client.delete_run.assert_called_once_with("0")
    assert client.log_batch.call_args.args == ("1",)
    used.data.params = {"seed": "1"}
    sinks.Sinks("mlflow", Path("mine"), about)  # even if the other one was made after that
    client.update_run.assert_called_once_with("1", "RUNNING")


def test_mlflow_takes_a_relative_run_directory(mlflow: MagicMock, tmp_path: Path) -> None:
    """Of a strategy's ``directory``."""
    sinks.Sinks("mlflow", Path("mine"), MagicMock())
    mlflow.MlflowClient.assert_called_once_with((tmp_path / "mine" / "mlruns").as_uri())
    assert stat.S_IMODE((tmp_path / "mine" / "mlruns").stat().st_mode) == 0o700
    attempts = 1 + int(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
    assert attempts * int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) < 30  # s, if the server is away


def test_prometheus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    scraped: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def scrape(sink: Any, ending: str = "") -> None:
        text = urlopen(f"http://127.0.0.1:{sink.port}/metrics").read().decode()
        for family in text_string_to_metric_families(text):
            scraped.update({(one.name, frozenset(one.labels.items())): one.value for one in family.samples})
        if ending:
            close(sink, ending)

    module = pytest.importorskip("pbfl_flwr.sinks.prometheus").Prometheus
    close = module.close
    monkeypatch.setattr(module, "close", scrape)
    monkeypatch.setenv("PBFL_PROMETHEUS", f"127.0.0.1:{free_port()}")
    opened = module(tmp_path / "new", MagicMock(clients=[]))
    scrape(opened)
    close(opened, "finished")
    counted = {name: value for (name, _), value in scraped.items() if name.endswith("_total")}
    assert counted == {"pbfl_bytes_total": 0, "pbfl_failures_total": 0}
    run_dir = run(tmp_path, "prometheus")
    records = RunDirectory(run_dir).round_records()

    def value(name: str, /, **labels: str) -> float:
        return scraped[name, frozenset({"run": run_dir.name, **labels}.items())]

    assert value("pbfl_round") == 2
    assert value("pbfl_clients_online") == 2
    assert value("pbfl_accuracy", predictor="head", statistic="weighted") == pytest.approx(
        accuracies(run_dir)[2]
    )
    total = sum(record.bytes_up.total for record in records)
    assert value("pbfl_bytes_total", direction="up", part="total") == total
    assert value("pbfl_seconds", part="clients/fit") == pytest.approx(records[-1].seconds.clients["fit"])
    assert value("pbfl_figure", name="trained") == 2


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("upload rejected: 'rows' holds NaN or infinity", "rejected"),
        ("no answer within 3 s", "timeout"),
        (NOT_CONNECTED, "disconnected"),
        ("Error: Node Unavailable, its heartbeats ended", "disconnected"),
        ("boom", "error"),
    ],
)
def test_failures_are_counted_by_kind(reason: str, kind: str) -> None:
    (record,) = rounds_of(entry(3, 0.5, 0.25, failures=[{"client": 1, "reason": reason}]))
    ((_, metrics),) = sinks.steps(record)
    assert metrics[f"failures-by-kind/{kind}"] == metrics["failures"] == 1


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: dict[int, Mapping[str, float]] = {}
    finished: list[int] = []

    class Run:
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            logged[step] = metrics

        def finish(self, exit_code: int) -> None:
            finished.append(exit_code)

    def init(**keywords: Any) -> Run:
        started.append(keywords)
        return Run()

    library = ModuleType("wandb")
    library.__spec__ = ModuleSpec("wandb", None)
    library.__dict__.update(init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delitem(sys.modules, "pbfl_flwr.sinks.weights_and_biases", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_dir = run(tmp_path, "wandb")
    assert stat.S_IMODE((run_dir / "wandb").stat().st_mode) == 0o700
    monkeypatch.setenv("WANDB_MODE", "online")
    run(tmp_path, "wandb", rounds=3, resume=True)
    about = RunDirectory(run_dir).record()
    assert [(one["id"], one["resume"]) for one in started] == [(about.experiment, "allow")] * 2
    assert [one["mode"] for one in started] == ["offline", "online"]
    assert started[1]["config"] == about.configuration
    assert {one["dir"] for one in started} == {str(run_dir)}
    weighted = {step: metrics["accuracy/head/weighted"] for step, metrics in logged.items()}
    assert weighted == pytest.approx(accuracies(run_dir))
    sinks.Sinks("wandb", run_dir, about).close("failed")
    assert finished == [0, 0, 1]
    monkeypatch.delitem(sys.modules, "pbfl_flwr.sinks.weights_and_biases")
