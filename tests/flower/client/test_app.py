"""The ClientApp: what a device loads, and messages that come twice, late, or to two processes."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
from filelock import Timeout
from flwr.app import ConfigRecord, Message

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client import app as client_module
from pbfl_flwr.flower.client import session
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs.client_store import ClientStore
from tests.flower import sites
from tests.flower.inprocess import NUM_CLIENTS, Answer, federation, plain

ANSWER = """
import sys

sys.modules["ray"] = None  # as on a device: importing it raises ImportError
sys.modules["flwr.simulation"] = None

from pathlib import Path
from client_app.app import app

# On a device every message has a new process, and these take it from seconds to tens of seconds.
slow = {"matplotlib", "scipy", "sklearn", "torchvision", "torch._dynamo"}
assert not slow & set(sys.modules), slow & set(sys.modules)

from pbfl_flwr.config import parse
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import METHODS, SECTIONS
from tests.flower.inprocess import InProcessGrid

place = sys.argv[1]
base = {"num-clients": 1, "num-server-rounds": 1, "models": "cnn2", "feature-dim": 64, "partition": "iid"}
for method in METHODS:
    auxiliary = {f"{method}.auxiliary": "cnn2"} if method in ("fml", "fedkd", "fedmrl") else {}
    config = {**base, "method": method, "max-samples": 100, "seed": 1, **auxiliary}
    if method == "gfpl":
        config |= {"gfpl.start": 1, "gfpl.interval": 1}
    grid = InProcessGrid(app, config, 1, node_configs=[{"client-id": 0, "state-dir": place}])
    strategy = MethodStrategy(parse(config, SECTIONS), None)
    strategy.start(grid)
    assert strategy.history[0].trained == [0], strategy.history
    assert [path for path in Path(place).rglob("*") if strategy.experiment in str(path) and path.is_file()]
unwanted = ("ray", "torch._dynamo")
loaded = [name for name, module in sys.modules.items() if module and name.startswith(unwanted)]
assert not loaded, loaded
print("answered")
"""


def test_device_answers_in_every_method_without_slow_libraries(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(tmp_path / "state")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PBFL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "answered\n"


def test_repeated_message_is_answered_without_training_again(tmp_path: Path) -> None:
    calls: list[int] = []
    update = Pipeline.local_update

    def counting(self: Pipeline, client: Any, down: Any) -> Any:
        calls.append(client.id)
        return update(self, client, down)

    def twice(message: Message, answer: Answer) -> Message:
        first, second = answer(), answer()
        assert first.content.array_records["p"]["s"].data == second.content.array_records["p"]["s"].data
        reports: list[dict[str, Any]] = [dict(reply.content.metric_records["m"]) for reply in (first, second)]
        loss_and_seconds = [report.pop("t") for report in reports]
        assert reports[0] == reports[1]
        assert "loss.ce" in reports[0]
        assert loss_and_seconds[0][0] == loss_and_seconds[1][0]
        return second

    with patch.object(Pipeline, "local_update", counting):
        asked_twice = federation(tmp_path / "a", faults={(2, 1): twice, (2, 2): twice}).run()
    assert calls.count(2) == 2
    assert asked_twice.fingerprint == federation(tmp_path / "b").run().fingerprint


def test_refuses_a_round_before_that_of_its_state(tmp_path: Path) -> None:
    def backwards(message: Message, answer: Answer) -> Message:
        answer()
        message.content[wire.CONFIG] = ConfigRecord(
            {**message.content.config_records[wire.CONFIG], "round": 1}
        )
        return answer()

    run = federation(tmp_path, faults={(0, 2): backwards}).run()
    (failure,) = run.strategy.history[1].failures
    assert plain(failure) == {"client": 0, "reason": "asked for round 1, but its state is already of round 2"}


def test_client_holds_the_lock_of_its_state_while_training(tmp_path: Path) -> None:
    """A SuperNode that still works for a run that was killed, and the one that resumes it: the file is locked."""
    run = federation(tmp_path, num_server_rounds=1)
    locked: list[bool] = []
    trained = client_module._train_and_save

    def watching(opened: Any, message: Message, worker: Worker) -> Message:
        lock = opened.store.locked()
        with pytest.raises(Timeout):
            lock.acquire(timeout=0)
        locked.append(True)
        return trained(opened, message, worker)

    with patch.object(client_module, "_train_and_save", watching):
        run.run()
    assert locked == [True] * NUM_CLIENTS


def test_client_says_that_it_waits_for_an_earlier_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = federation(tmp_path, num_server_rounds=1)
    frozen: list[str] = []

    def held(*arguments: Any) -> ClientStore:
        store = session.store_of(*arguments)
        if not frozen:
            frozen.append(store.locked().lock_file)
            descriptor = os.open(frozen[0], os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            Timer(0.2, os.close, [descriptor]).start()
        return store

    with patch.object(client_module, "store_of", held):
        run.run()
    assert [line for line in caplog.messages if "waiting for" in line] == [
        f"waiting for an earlier process of this client, which holds {frozen[0]}"
    ]
    assert run.strategy.history[0].trained == [*range(NUM_CLIENTS)]


def leaky(*arguments: object) -> Any:
    raise ValueError("Ann Smith")


def leaks_in_round_2(method: Pipeline, client: Any, down: Any, update: Any = Pipeline.local_update) -> Any:
    return leaky() if client.round == 2 else update(method, client, down)


# name -> node, data of the app, training, what the server is told
LEAKS: dict[str, tuple[dict[str, str], Any, Any, str]] = {
    "table": ({"data-path": "TMP/x.csv"}, None, None, "the data at TMP/x.csv cannot be used"),
    "labels": ({"labels": "TMP/x.csv"}, None, None, "dataset = 'digits' cannot be used; "),
    "names": ({"labels": "TMP/names"}, None, None, "labels = 'TMP/names' in --node-config cannot be used; "),
    "function": (
        {"dataset": f"{__name__}:leaky"},
        None,
        None,
        "leaky' cannot be used: ValueError (test_app.py:",
    ),
    "app": ({}, leaky, None, "ValueError (test_app.py:"),
    "trial": ({"data-path": "TMP/data.npz"}, None, leaky, "on 2 samples: ValueError (test_app.py:"),
    "round": ({"data-path": "TMP/data.npz"}, None, leaks_in_round_2, "client 0: ValueError (test_app.py:"),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_text_that_may_quote_its_data_stays_on_a_device(
    tmp_path: Path, leak: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    node, data, training, told = LEAKS[leak]
    sites.write_site(tmp_path, 1)
    (tmp_path / "x.csv").write_text("x,label\n1,cat\nAnn Smith,dog\n")
    (tmp_path / "names").write_text("Ann Smith\nAnn Smith\n")
    where = {key: text.replace("TMP", str(tmp_path)) for key, text in node.items()}
    whole: dict[str, Scalar] = {"client-id": 0, "state-dir": str(tmp_path / "state"), **where}
    with (
        patch.object(Pipeline, "local_update", training or Pipeline.local_update),
        pytest.raises(PbflError) as caught,
    ):
        sites.run(tmp_path, [whole], data=data, num_server_rounds=2).run()
    assert told.replace("TMP", str(tmp_path)) in str(caught.value)
    assert "; see the device's log" in str(caught.value)
    assert "Ann" not in str(caught.value)
    assert "Ann Smith" in caplog.text + capsys.readouterr().err
