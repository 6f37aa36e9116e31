"""What a process keeps between messages changes no result; and the check before round 1 is a real step."""

import gc
import random
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.api import Resources, RunDirectory, federate, federate_app
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.flower.engines.only_run import only_run
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.strategies import FedProto, make_client_app
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import own_code
from tests.flower.inprocess import federation

NETS = '''
import random
from dataclasses import dataclass
from math import prod
import numpy as np
import torch
from torch import nn
from pbfl_flwr.methods.sharing import SharedWeights
from pbfl_flwr.models.mlp import mlp5
from pbfl_flwr.training.loop import classification, fit


class Net(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.d = task.feature_dim
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(prod(task.input_shape), task.feature_dim), nn.ReLU())
        self.head = nn.Linear(task.feature_dim, task.num_classes)

    def features(self, x):
        return self.body(x)


class Counting(Net):
    """Keeps a buffer that is not saved, a list and a counter, and has something that cannot be copied."""

    def __init__(self, task):
        super().__init__(task)
        self.register_buffer("mean", torch.zeros(task.feature_dim), persistent=False)
        self.seen, self.calls, self.draw = [], 0, torch.Generator().manual_seed(1)

    def features(self, x):
        z = self.body(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
            self.seen.append(float(z.detach().mean()))
            self.calls += 1
        return z - self.mean + 0.01 * len(self.seen) + 0.001 * self.calls


class Growing(Net):
    def __init__(self, task):
        super().__init__(task)
        self.register_buffer("bank", torch.zeros(0, task.feature_dim))

    def features(self, x):
        z = self.body(x)
        if self.training:
            self.bank = torch.cat([self.bank, z.detach()])
        return z


class Drawing(Net):
    """Draws from every global generator, when it is built and in training and scoring."""

    def __init__(self, task):
        super().__init__(task)
        with torch.no_grad():
            self.body[1].weight.mul_(random.random()).add_(float(np.random.rand()))

    def features(self, x):
        return self.body(x) * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * float(torch.rand(1)))


class Squeezed(Net):
    def features(self, x):
        return self.body(x).squeeze()


class Lazy(Net):
    def __init__(self, task):
        super().__init__(task)
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(task.feature_dim))


class Noting(Net):
    def get_extra_state(self):
        return {"seen": 3}


class Expanded(Net):
    def __init__(self, task):
        super().__init__(task)
        self.register_buffer("scale", torch.ones(1).expand(5))


class Sparse(Net):
    def __init__(self, task):
        super().__init__(task)
        self.register_buffer("edges", torch.eye(3).to_sparse())


class Complex(Net):
    def __init__(self, task):
        super().__init__(task)
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex128))


def adapted(task):
    """Net with its features in a function, and BatchNorm."""
    net = Net(task)
    net.body.append(nn.BatchNorm1d(task.feature_dim))
    net.features = lambda x: net.body(x)
    return net


class Normed(Net):
    def __init__(self, task):
        super().__init__(task)
        self.body.append(nn.BatchNorm1d(task.feature_dim))


class Hooked(Net):
    def __init__(self, task):
        super().__init__(task)
        kept = self.kept = {}
        self.body.register_forward_hook(lambda module, inputs, output: kept.update(z=output))

    def features(self, x):
        self.body(x)
        return self.kept["z"]


def same(task):
    return mlp5(task)


@dataclass(frozen=True)
class Warm(SharedWeights):
    """Trains the head alone in round 1, and what it does to the network it never takes back."""

    def train(self, client, received):
        if client.round == 1:
            client.model.requires_grad_(False).head.requires_grad_(True)
        client.model.head.register_forward_hook(lambda module, inputs, output: 1.1 * output)
        return fit(client, classification(client.model))


def warm(settings):
    return Warm.configured("warm", settings)


class Failing(Net):
    def features(self, x):
        if self.training:
            raise KeyError("only in training")
        return self.body(x)


def frozen(part):
    def build(task):
        net = Net(task)
        (net if part == "all" else getattr(net, part)).requires_grad_(False)
        return net
    return build


frozen_body, frozen_head, frozen_all = map(frozen, ("body", "head", "all"))
'''


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "kept_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of worker processes
    yield
    sys.modules.pop("kept_nets", None)


KEYS: dict[str, Any] = {
    "max-samples": 120,
    "batch-size": 16,
    "feature-dim": 16,
    "num-server-rounds": 3,
    "aggregation": "weighted",
}


@pytest.mark.parametrize("network", ["Counting", "Drawing"])
def test_what_a_users_network_keeps_or_draws_passes_to_nobody(tmp_path: Path, network: str) -> None:
    """One hash, whatever the workers, and whether or not the run was resumed."""
    keys = {**KEYS, "models": f"kept_nets:{network}"}
    federate(tmp_path / "a", keys, 3, Resources(workers=1))
    federate(tmp_path / "b", keys, 3, Resources(workers=2))
    federate(tmp_path / "c", {**keys, "num-server-rounds": 2}, 3, Resources(workers=1))
    federate(tmp_path / "c", {**keys, "resume": True}, 3, Resources(workers=1))
    results = {RunDirectory(tmp_path / name).result() for name in "abc"}
    assert len(results) == 1, results
    assert results != {""}


@pytest.mark.parametrize(
    ("method", "network", "equal"),
    [
        ("fedavg", "kept_nets:adapted", "kept_nets:Normed"),
        ("fedavg", "kept_nets:Hooked", "kept_nets:Net"),
        ("kept_nets:warm", "mlp5", "kept_nets:same"),
    ],
)
def test_equal_networks_give_equal_results_however_they_are_made(
    tmp_path: Path, method: str, network: str, equal: str
) -> None:
    """A function of one network does not run another's layers; nor does what a user's method does to one last."""
    for models in (network, equal):
        keys = {**KEYS, "method": method, "models": models, "aggregation": "auto"}
        federate(tmp_path / models, keys, 3, Resources(workers=1))
    results = {RunDirectory(tmp_path / models).result() for models in (network, equal)}
    assert len(results) == 1
    assert results != {""}


@pytest.mark.parametrize(
    ("method", "network"),
    [("fedavg", "kept_nets:adapted"), ("fedavg", "kept_nets:Net"), ("kept_nets:warm", "mlp5")],
)
def test_networks_of_earlier_messages_are_freed(method: str, network: str) -> None:
    """Also those that functions within them refer to: they may be large, and Python counts objects only."""
    worker, task, device = Worker(), Task(4, 6, (1, 8, 8)), torch.device("cpu")
    settings, name = parse({"method": method, "models": network}, SECTIONS), own_code(network, [network])
    handed_out: list[weakref.ref[Any]] = []
    gc.disable()
    try:
        for _ in range(5):
            model = worker.network(name, task, settings, device).network
            model.head.register_forward_hook(lambda module, inputs, output, model=model: output)
            handed_out.append(weakref.ref(model))
            del model
        alive = [each for each in handed_out if each() is not None]
    finally:
        gc.enable()
    assert len(alive) == 1


def test_a_users_method_gets_none_of_the_networks_of_others() -> None:
    worker, task, device = Worker(), Task(4, 6, (1, 8, 8)), torch.device("cpu")
    ours, theirs = (
        parse({"method": name, "models": "mlp5"}, SECTIONS) for name in ("fedavg", "kept_nets:warm")
    )
    shared = worker.network("mlp5", task, ours, device).network
    assert worker.network("mlp5", task, ours, device).network is shared
    shared.requires_grad_(False)
    assert all(p.requires_grad for p in worker.network("mlp5", task, theirs, device).network.parameters())


def test_a_run_leaves_the_users_random_states_as_they_were(tmp_path: Path) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(1))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    undisturbed = draws()
    seed()
    federate(tmp_path / "a", {**KEYS, "num-server-rounds": 1}, 3, Resources(workers=1))
    assert draws() == undisturbed


@pytest.mark.parametrize(
    ("method", "network", "reason"),
    [
        (
            "fedproto",
            "Growing",
            r"'bank' has the shape \(3, 16\) after .* and \(0, 16\) as built; .* keep its shape",
        ),
        ("fedproto", "Squeezed", r"features: expected output \(1, 16\), found \(16,\)"),
        (
            "fedproto",
            "Failing",
            r"a step of method 'fedproto' on 2 samples: KeyError: 'only in training' \(kept_nets",
        ),
        (
            "fedproto",
            "Lazy",
            "Lazy': 'body.1.weight' has no shape until the first input; its layer must be built",
        ),
        (
            "fedproto",
            "Noting",
            "'kept_nets:Noting': '_extra_state' of its state_dict is of type dict; must be a tensor, as all that lasts",
        ),
        (
            "fedproto",
            "Sparse",
            "'edges' of its state_dict is torch.sparse_coo of torch.float32, which safetensors does not store",
        ),
        (
            "fedproto",
            "Complex",
            "'waves' of its state_dict is torch.strided of torch.complex128, which safetensors does not store",
        ),
        (
            "fedproto",
            "Expanded",
            "'kept_nets:Expanded' cannot load its own state_dict, .* before every round: RuntimeError: .*clone()",
        ),
        (
            "fedproto",
            "frozen_all",
            "it trains body.1.weight, .*: at least one must have requires_grad = True",
        ),
        (
            "fedrep",
            "frozen_body",
            "it trains body.1.weight, body.1.bias: at least one must have requires_grad",
        ),
        (
            "fedrep",
            "frozen_head",
            "it trains head.weight, head.bias: at least one must have requires_grad = True",
        ),
    ],
)
def test_a_network_that_cannot_be_trained_ends_the_run_before_round_1(
    tmp_path: Path, method: str, network: str, reason: str
) -> None:
    run = federation(tmp_path, method, models=f"kept_nets:{network}", feature_dim=16)
    with pytest.raises(PbflError, match=reason) as error:
        run.run()
    assert "\n" not in str(error.value)
    assert run.strategy.history == []


@pytest.mark.parametrize("network", ["frozen_body", "frozen_head"])
def test_a_network_is_trained_where_it_can_be(tmp_path: Path, network: str) -> None:
    run = federation(tmp_path, models=f"kept_nets:{network}", feature_dim=16, num_server_rounds=1).run()
    assert run.strategy.history[0].failures == []


def test_a_second_run_in_one_process_is_refused(tmp_path: Path) -> None:
    begun, end = Event(), Event()

    def first() -> None:
        with only_run("the first"):
            begun.set()
            end.wait()

    settings: dict[str, Any] = {"num_clients": 3, "models": "mlp5", "feature_dim": 16, "num_server_rounds": 1}
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(first)
        begun.wait()
        reason = "this process is in the run 'the first' already; must wait until that one has ended"
        try:
            with pytest.raises(PbflError, match=reason):
                federate(tmp_path / "a", KEYS, 3, Resources(workers=1))
            strategy = FedProto(**settings)
            with pytest.raises(PbflError, match=f"'a strategy of fedproto': {reason}"):
                federate_app(strategy, make_client_app(None, strategy.settings))
        finally:
            end.set()
        running.result()
    federate(tmp_path / "a", {**KEYS, "num-server-rounds": 1}, 3, Resources(workers=1))
    assert RunDirectory(tmp_path / "a").result()


def test_a_failed_run_makes_room_for_the_next(tmp_path: Path) -> None:
    with pytest.raises(PbflError):
        federate(tmp_path / "a", {**KEYS, "models": "har-cnn"}, 3, Resources(workers=1))
    federate(tmp_path / "b", {**KEYS, "num-server-rounds": 1}, 3, Resources(workers=1))
