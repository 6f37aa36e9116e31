"""Flower mods around the clients: the key ``mods`` and the parameter of make_client_app."""

import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from pbfl_flwr.config import parse
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan.configuration import RequestedKeys, check, preflight
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes
from tests.flower.inprocess import (
    NUM_CLIENTS,
    Federation,
    InProcessGrid,
    configuration,
    federation,
    plain,
    raises,
    tiny_data,
)
from tests.real_runs import PBFL, ROOT, result_of, sets, start
from tests.small_runs import pbfl

PAGE = """
import random

import numpy as np
import torch
from flwr.app import Message

from pbfl_flwr.flower.messages import wire

passed = []

def named(name):
    def mod(message, context, call_next):
        passed.append((name, message.metadata.message_type, context.node_config["partition-id"]))
        return call_next(message, context)
    return mod

outer, inner = named("outer"), named("inner")

def noisy(message, context, call_next):
    before = random.random() + np.random.rand() + float(torch.rand(1))
    reply = call_next(message, context)
    if message.metadata.message_type == "train":
        tensors = wire.decode_tensors(reply.content.array_records[wire.PAYLOAD])
        tensors["rows"] *= before + random.random() + np.random.rand() + float(torch.rand(1))
        reply.content[wire.PAYLOAD] = wire.encode_tensors(tensors)
    return reply

def greedy(message, context, call_next):
    random.random(), np.random.rand(), torch.rand(1)
    return call_next(message, context)

def nothing(message, context, call_next):
    call_next(message, context)

def breaks(message, context, call_next):
    raise ValueError("no\\nway")

number = 3
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of mods, which clients can import."""
    (tmp_path / "mods_page.py").write_text(PAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("mods_page")
    del sys.modules["mods_page"]


def with_given(directory: Path, given: list[Mod], **keys: Any) -> Federation:
    """Return a federation whose app was given mods."""
    config = configuration(directory, **keys)
    grid = InProcessGrid(make_client_app(tiny_data, mods=given), config)
    return Federation(MethodStrategy(parse(config, SECTIONS)), grid, config)


def test_mods_are_around_every_message_the_given_ones_outermost(tmp_path: Path, page: Any) -> None:
    keys: dict[str, Any] = {"mods": "mods_page:outer, mods_page:inner", "fraction_train": 0.4}
    run = with_given(tmp_path / "a", [page.named("given")], num_server_rounds=1, **keys).run()
    messages = [(kind, client) for client, _, kind in run.grid.asked]
    assert {kind for kind, _ in messages} == {"query", "train", "evaluate"}
    assert page.passed == [(name, *message) for message in messages for name in ("given", "outer", "inner")]


def test_mods_that_only_draw_change_no_result(tmp_path: Path, page: Any) -> None:
    results = [
        federation(tmp_path / f"{number}", "gfpl", mods=mods, num_server_rounds=10).run().fingerprint
        for number, mods in enumerate(("", "mods_page:outer", "mods_page:greedy"))
    ]
    assert len(set(results)) == 1


def test_what_mods_draw_depends_on_seed_client_and_round_alone(tmp_path: Path, page: Any) -> None:
    def run(name: str, **options: Any) -> str:
        random.seed(name), np.random.seed(len(name)), torch.manual_seed(len(name))
        keys = {"mods": "mods_page:noisy", "num_server_rounds": 3, **options}
        return federation(tmp_path / name, on_disk=True, **keys).run().fingerprint

    one = run("one")
    assert run("in another order", order=5) == one
    assert run("more around", mods="mods_page:outer,mods_page:noisy") == one
    run("resumed", num_server_rounds=1)
    assert run("resumed", resume=True) == one
    assert run("seed", seed=1) != one
    assert run("none", mods="") != one


def _states() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def test_mods_leave_the_random_states_of_the_process(tmp_path: Path, page: Any) -> None:
    states: list[Any] = []

    def outermost(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        before = _states()
        reply = call_next(message, context)
        after = _states()
        states.append(before == after)
        return reply

    with_given(tmp_path, [outermost], mods="mods_page:greedy", num_server_rounds=1).run()
    assert states.count(False) == 2 * NUM_CLIENTS, "the mod inside draws"
    states.clear()
    with_given(tmp_path / "b", [outermost], num_server_rounds=1).run()
    assert states == [True] * 2 * NUM_CLIENTS, "the handler's draws are its own"


def test_mod_may_replace_the_reply_and_the_state_stays_the_clients_own(tmp_path: Path) -> None:
    def halves(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 2:
            tensors = wire.decode_tensors(reply.content.array_records[wire.PAYLOAD])
            reply.content[wire.PAYLOAD] = wire.encode_tensors({**tensors, "rows": tensors["rows"] / 2})
        return reply

    seen: list[dict[int, Prototypes]] = []

    class Recorder(MethodStrategy):
        def aggregate_fit(self, server_round: int, uploads: Any, *late: Any) -> Any:
            seen.append(dict(uploads))
            return super().aggregate_fit(server_round, uploads, *late)

    for mods in ([], [halves]):
        config = configuration(tmp_path / f"{len(mods)}", num_server_rounds=1)
        Recorder(parse(config, SECTIONS)).start(InProcessGrid(make_client_app(tiny_data, mods=mods), config))
    before, after = seen
    for client, upload in before.items():
        assert torch.equal(after[client].values, upload.values / (2 if client == 2 else 1))


def test_flowers_own_mods(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = "flwr.clientapp.mod:message_size_mod, flwr.clientapp.mod:arrays_size_mod"
    run = federation(tmp_path / "a", mods=own, faults={(1, 2): raises}).run()
    assert run.fingerprint == federation(tmp_path / "b", faults={(1, 2): raises}).run().fingerprint
    assert caplog.text.count("Incoming message size: ") == 3 * NUM_CLIENTS
    assert caplog.text.count("Outgoing message size: ") == 3 * NUM_CLIENTS - 1, "but for the one that failed"
    assert "Total array elements sent: " in caplog.text


def test_mod_that_raises_costs_its_client_one_line(tmp_path: Path) -> None:
    def raising(error: BaseException) -> Mod:
        def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
            if message.metadata.message_type == "train" and context.node_config["partition-id"] == 3:
                raise error
            return call_next(message, context)

        return mod

    errors = [
        (PbflError("not today"), "not today"),
        (ValueError("a\nb"), "ValueError: a b (test_mods.py:"),
        (SystemExit(3), "SystemExit: 3 (test_mods.py:"),
    ]
    for number, (error, reason) in enumerate(errors):
        run = with_given(tmp_path / f"{number}", [raising(error)], num_server_rounds=1).run()
        (failure,) = plain(run.strategy.history[0].failures)
        assert failure["client"] == 3
        assert failure["reason"].startswith(reason)


MISSING: list[tuple[str, str]] = [
    ("nopage:outer", r"^mods = 'nopage:outer': cannot import 'nopage' .*PYTHONPATH"),
    ("mods_page:outer,mods_page:f", "^mods = 'mods_page:f': 'mods_page' has no function 'f'$"),
    ("mods_page:number", "^mods = 'mods_page:number': 'mods_page' has no function 'number'$"),
]


@pytest.mark.parametrize(("mods", "says"), MISSING)
def test_mods_that_are_missing_are_refused_before_anything_starts(
    tmp_path: Path, page: Any, mods: str, says: str
) -> None:
    keys: dict[str, Any] = {"num-clients": 3, "models": "cnn2", "max-samples": 300, "mods": mods}
    settings = check(RequestedKeys(keys))
    with pytest.raises(PbflError, match=says) as error:
        preflight(settings, Resources(workers=1), LoadedData())
    assert "\n" not in str(error.value)
    run = federation(tmp_path, mods=mods)  # as federate does, without preflight
    with pytest.raises(PbflError, match=f"5 of 5 clients: {says.strip('^$')}"):
        run.run()
    assert {kind for _, _, kind in run.grid.asked} == {"query"}


@pytest.mark.parametrize("mods", ["outer", "mods_page.outer", "a:b:c", "a:b,,c", "../a:b", ","])
def test_mods_are_named_by_module_and_function(mods: str) -> None:
    says = f"^mods = '{mods}': must be empty, or a comma list of my_package.module:function$"
    with pytest.raises(PbflError, match=says):
        parse({"mods": mods})


@pytest.mark.parametrize(
    ("mods", "says"),
    [
        ("mods_page:nothing", r"nothing \(mods_page.py:\d+\) returned None; must return a Message"),
        ("mods_page:breaks", r"ValueError: no way \(mods_page.py:\d+\)"),
    ],
)
def test_mod_that_cannot_pass_the_handshake_ends_the_run(
    tmp_path: Path, page: Any, mods: str, says: str
) -> None:
    with pytest.raises(PbflError, match=f"^5 of 5 clients: {says}"):
        federation(tmp_path, mods=mods).run()


@pytest.mark.parametrize("mod", [3, None, "mods_page:outer"])
def test_given_mods_must_be_callable(mod: Any) -> None:
    with pytest.raises(PbflError, match=r"^mods: .* is no mod; must be functions mod\(message, context"):
        make_client_app(mods=[mod])


def test_device_imports_only_mods_that_it_allows(tmp_path: Path, page: Any) -> None:
    def devices(allowed: Callable[[int], str]) -> list[dict[str, Any]]:
        place = str(tmp_path / "state")
        return [
            {"client-id": n, "partition-id": n, "state-dir": place, "allow-code": allowed(n)}
            for n in range(NUM_CLIENTS)
        ]

    both = "mods_page:outer, mods_page:inner"
    run = federation(tmp_path / "a", mods=both, node_configs=devices(lambda n: both), num_server_rounds=1)
    assert run.run().strategy.history[0].failures == []
    assert len(page.passed) == 2 * 2 * NUM_CLIENTS
    page.passed.clear()
    nodes = devices(lambda n: both if n else "mods_page:outer")
    run = federation(tmp_path / "b", mods=both, node_configs=nodes)
    with pytest.raises(PbflError) as error:
        run.run()
    assert str(error.value) == (
        "1 of 5 clients: client-id = 0: mods = 'mods_page:inner' names code to import; a process imports only what its "
        "own configuration names, a device what its own --node-config names as model, as dataset or in allow-code"
    )
    assert ("outer", "query", 0) not in page.passed
    assert {kind for _, _, kind in run.grid.asked} == {"query"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mods_give_the_same_bits_on_every_engine(tmp_path: Path) -> None:
    (tmp_path / "mods_page.py").write_text(PAGE)
    program = ["env", f"PYTHONPATH={tmp_path}:{ROOT}", *PBFL]
    words = sets("num-clients=3", "models=cnn4", "feature-dim=16", "max-samples=300", "num-server-rounds=2")
    results = {}
    for engine, workers in (("processes", 1), ("processes", 2), ("ray", 2), ("flower", 2)):
        run_dir = tmp_path / f"{engine}-{workers}"
        run = ("run", "--engine", engine, "--workers", workers, "--run-dir", run_dir, *words)
        process = start(run_dir, *run, *sets("mods=mods_page:noisy"), program=program)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        results[run_dir.name] = result_of(run_dir)
    assert len(set(results.values())) == 1, results
    plainly = pbfl("run", "--engine", "processes", "--workers", 1, "--run-dir", tmp_path / "plain", *words)
    assert plainly.exit_code == 0
    assert result_of(tmp_path / "plain") not in results.values()


def test_no_two_messages_have_the_same_draws(tmp_path: Path) -> None:
    """Noise that came again in the next round could be subtracted."""
    drawn: list[float] = []

    def draws(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        drawn.append(float(torch.rand(1, dtype=torch.float64)))
        return call_next(message, context)

    for seed in (0, 1):
        with_given(tmp_path / f"{seed}", [draws], seed=seed, num_server_rounds=2).run()
    assert len({*drawn}) == len(drawn) > 0
