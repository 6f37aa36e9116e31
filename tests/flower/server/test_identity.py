"""Whose a client-id is, and which devices a run has if they contradict each other."""

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pbfl_flwr.config import RunSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server import membership as memberships
from pbfl_flwr.flower.server.grid import PollingGrid
from pbfl_flwr.flower.server.handshake import send_handshake
from pbfl_flwr.flower.server.membership import Membership
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.runs.records import ClientRecord
from tests.flower.inprocess import Federation, InProcessGrid, federation, plain, raises, silent
from tests.flower.server.test_membership import member
from tests.flower.sites import run, sites

MINE, THEIRS = b"the key of site-2", b"another registered key"


def attacked(tmp_path: Path, *, registered: bool = True, **keys: Any) -> Federation:
    """Three devices, and a fourth one with a key of its own that declares the client-id of the second one."""
    nodes = sites(tmp_path, "site-1", "site-2", "site-3")
    (thief,) = sites(tmp_path / "thief", "site-2")
    fed = run(tmp_path, [*nodes, thief], **{"num_clients": 3, "join_timeout": 1.0, **keys})
    fed.grid.keys = dict(zip(fed.grid.nodes, (b"1", MINE, b"3", THEIRS), strict=True))
    if registered:
        fed.grid.registered = dict(zip(fed.grid.nodes, ("site-1", "site-2", "site-3", "site-4"), strict=True))
    return fed


def there(fed: Federation, rounds: Callable[[int], Sequence[int]]) -> Federation:
    """Let devices be connected: finished rounds -> positions."""
    fed.grid.online = lambda: [fed.grid.nodes[n] for n in rounds(fed.strategy.done)]
    return fed


def refused(fed: Federation) -> list[list[str]]:
    return [[note for note in line.warnings if "not used" in note] for line in fed.strategy.history]


def kinds(fed: Federation, position: int) -> set[str]:
    return {kind for client, _, kind in fed.grid.asked if client == position}


@pytest.mark.parametrize("registered", [True, False])
def test_another_key_does_not_get_the_name_of_a_client_that_failed(tmp_path: Path, registered: bool) -> None:
    fed = attacked(tmp_path, registered=registered, num_server_rounds=4, faults={(1, 2): raises})
    there(fed, lambda done: range(3) if done < 2 else range(4)).run()
    mine, theirs = fed.grid.nodes[1], fed.grid.nodes[3]
    why = (
        f"client-id site-2 belongs to another key in this run, registered as site-2, than that of node {theirs}"
        if registered
        else f"client-id site-2 is used by two nodes, {mine} and {theirs}"
    )
    assert refused(fed) == [[], [], [f"a new node is not used: {why}"], []]
    assert [line.trained for line in fed.strategy.history] == [[0, 1, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    assert kinds(fed, 3) == {"query"}
    assert fed.strategy.roster is not None
    assert fed.strategy.roster.clients[1].node == mine


def test_name_of_an_absent_client_waits_for_its_key(tmp_path: Path) -> None:
    fed = attacked(tmp_path, num_server_rounds=5, faults={(1, 2): raises})
    there(fed, lambda done: (0, 2, 3) if done in (2, 3) else range(4) if done else range(3)).run()
    lines = fed.strategy.history
    assert [line.trained for line in lines] == [[0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 1, 2]]
    gone = [{"client": 1, "name": "site-2", "reason": "its node is not connected"}]
    assert [plain(line.failures) for line in lines[2:4]] == [gone, gone]
    assert "belongs to another key" in refused(fed)[2][0]
    assert kinds(fed, 3) == {"query"}


def test_resumed_run_knows_its_clients_by_their_keys(tmp_path: Path) -> None:
    there(attacked(tmp_path, num_server_rounds=1), lambda done: range(3)).run()
    first, second, third = attacked(tmp_path).directory.record().clients
    assert [len(client.key) for client in (first, second, third)] == [32, 32, 32]
    assert (second.name, second.registered) == ("site-2", "site-2")
    # Without site-2: its place stays empty.
    fed = there(attacked(tmp_path, num_server_rounds=2, resume=True), lambda done: (0, 2, 3)).run()
    assert fed.strategy.history[1].trained == [0, 2]
    assert "client-id site-2 belongs to another key" in refused(fed)[1][0]
    # The other one is there first; the run waits for site-2.
    fed = attacked(tmp_path, num_server_rounds=3, resume=True)
    first_look = iter([[0, 2, 3]])
    there(fed, lambda done: next(first_look, range(4))).run()
    assert (fed.strategy.history[2].trained, fed.strategy.history[2].failures) == ([0, 1, 2], [])
    assert "client-id site-2 belongs to another key" in refused(fed)[2][0]
    # Both come at once, and the other one's reply is the first.
    for order in range(3):
        resumed = attacked(tmp_path, num_server_rounds=4 + order, resume=True, order=order).run()
        assert resumed.strategy.history[-1].trained == [0, 1, 2]
        assert kinds(resumed, 3) == {"query"}
    needs_all = attacked(tmp_path, num_server_rounds=9, resume=True, failure_policy="stop")
    with pytest.raises(PbflError, match=r"missing: site-2\nclient-id site-2 belongs to another key"):
        there(needs_all, lambda done: (0, 2, 3)).run()


def test_name_of_a_key_that_flower_has_forgotten_stays_its_own(tmp_path: Path) -> None:
    there(attacked(tmp_path, num_server_rounds=1), lambda done: range(3)).run()
    forgotten = attacked(tmp_path, registered=False, num_server_rounds=2, resume=True)
    second = there(forgotten, lambda done: range(3)).run().directory.record().clients[1]
    assert second.registered == "site-2"
    fed = there(attacked(tmp_path, num_server_rounds=3, resume=True), lambda done: (0, 2, 3)).run()
    assert "client-id site-2 belongs to another key" in refused(fed)[2][0]


def test_client_without_a_registered_name_may_come_back_with_another_key(tmp_path: Path) -> None:
    """As a SuperNode without a key of its own does, but only once its old node is gone."""
    faults = {(1, 2): raises, (1, 4): silent}
    fed = attacked(tmp_path, registered=False, num_server_rounds=5, faults=faults)
    there(fed, lambda done: (0, 2, 3) if done > 2 else range(4) if done else range(3)).run()
    lines = fed.strategy.history
    assert [line.trained for line in lines] == [[0, 1, 2], [0, 2], [0, 1, 2], [0, 2], [0, 1, 2]]
    warning = (
        "client site-2 came back with another key: the first one has no registered name, so nobody can tell whether "
        "it is the same device"
    )
    assert [warning in line.warnings for line in lines] == [False] * 4 + [True]
    assert fed.strategy.roster is not None
    assert fed.strategy.roster.clients[1].node == fed.grid.nodes[3]


def test_simulation_knows_no_keys(tmp_path: Path) -> None:
    """Flower gives virtual nodes random bytes, others in every run."""
    for rounds in (1, 2):
        fed = federation(tmp_path, on_disk=True, num_server_rounds=rounds, resume=rounds > 1)
        fed.grid.keys = {node: f"{rounds} {node}".encode() for node in fed.grid.nodes}
        fed.run()
        assert fed.strategy.history[-1].warnings == fed.strategy.history[0].warnings
        assert {client.key for client in fed.directory.record().clients} == {""}


def test_handshake_takes_key_and_name_from_flower(tmp_path: Path) -> None:
    fed = attacked(tmp_path)
    grid = PollingGrid(fed.grid, str)
    clients, refused, lost = send_handshake(grid, fed.grid.nodes, fed.strategy.experiment, 9.0)
    assert refused == lost == {}
    assert [client.registered for client in clients] == ["site-1", "site-2", "site-3", "site-4"]
    assert len({client.key for client in clients}) == 4
    gone = fed.grid.nodes.pop(0)
    fed.grid._process = lambda *_: pytest.fail("nobody")  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessGrid, "send_and_receive", lambda self, messages, timeout: [])
        assert send_handshake(fed.grid, [gone], fed.strategy.experiment, 9.0)[0] == []


# At the start ------------------------------------------------------------------------------------------------


def started(
    monkeypatch: pytest.MonkeyPatch,
    clients: Sequence[ClientRecord],
    check: Any = lambda roster: None,
    **keys: Any,
) -> Membership:
    """Return the membership of a new run whose devices reply in this order."""
    monkeypatch.setattr(memberships, "send_handshake", lambda *_: ([*clients], {}, {}))
    grid: Any = SimpleNamespace(get_node_ids=lambda: [client.node for client in clients])
    settings = RunSettings(**{"num_clients": len(clients), "min_clients": 2, "join_timeout": 0.01, **keys})
    membership = Membership(settings, "e", check)
    membership.collect(grid, None)
    return membership


def devices(*names: str | int, odd: dict[str | int, dict[str, Any]]) -> list[ClientRecord]:
    return [member(name, 10 + n, **odd.get(name, {})) for n, name in enumerate(names)]


K5 = {"num-classes": 5, "labels": []}


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (K5, "num classes K: client b has 3, a has 5"),
        ({"labels": ["0", "2", "1"]}, "label names: client b has ('0', '1', '2'), a has ('0', '2', '1')"),
        ({"input-shape": [3, 8]}, "input shape: client b has (2,), a has (3, 8)"),
        ({"feature-dim": 7}, "feature-dim d: client b has 4, a has 7"),
        ({"columns": "x"}, "feature columns: those of client b and a differ"),
        ({"simulated": True}, "being simulated: client b has False, a has True"),
    ],
)
def test_device_that_most_contradict_is_refused_alone(
    odd: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes first in every order."""
    columns = {"columns": "y"} if "columns" in odd else {}
    clients = devices("a", "b", "c", odd={"a": odd, "b": columns, "c": columns})
    for replies in permutations(clients):
        membership = started(monkeypatch, replies)
        assert {number: client.label for number, client in membership.roster.clients.items()} == {
            0: "b",
            1: "c",
        }
        (warning,) = membership.warnings
        assert warning.startswith(
            "a new node is not used: client-id a on node 10 cannot join the run: clients "
        )
        assert f"disagree on {reason}" in warning
    with pytest.raises(PbflError, match=r"^client-id a on node 10 cannot join the run: clients disagree on"):
        started(monkeypatch, clients, min_clients=0)
    with pytest.raises(
        PbflError, match=r"^min-clients = 3, but only 2 of 3 devices can take part\nclient-id a"
    ):
        started(monkeypatch, clients, min_clients=3)


def test_of_equally_many_those_with_the_lowest_label_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = devices("d", "c", "b", 3, odd={"b": K5, 3: K5})
    for replies in permutations(clients):
        membership = started(monkeypatch, replies)
        assert membership.roster.names == {0: "b"}
        assert [*membership.roster.clients] == [0, 3]
        assert len(membership.warnings) == 2


def test_device_that_the_method_refuses_does_not_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = sites(tmp_path, "a", "b", "c")
    nodes[0]["model"] = "cnn2"
    fed = run(tmp_path, nodes, method="fedavg", min_clients=2, num_server_rounds=1).run()
    assert fed.strategy.roster is not None
    assert fed.strategy.roster.names == {0: "b", 1: "c"}
    assert "client-id a on node" in refused(fed)[0][0]
    assert "cannot join the run: method 'fedavg'" in refused(fed)[0][0]

    def no_mlp(roster: Roster) -> None:
        if "mlp" in roster.architectures:
            raise PbflError("no mlp")

    kinds = {name: {"architecture": name} for name in ("cnn4", "mlp", "cnn2")}
    membership = started(monkeypatch, devices("cnn4", "mlp", "cnn2", odd=kinds), no_mlp)  # type: ignore[arg-type]
    assert sorted(membership.roster.architectures) == ["cnn2", "cnn4"], "the method takes different ones"


def test_more_devices_than_the_run_has_do_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    membership = started(monkeypatch, devices("a", "b", "c", 7, odd={}), num_clients=3)
    assert membership.roster.names == {0: "a", 1: "b", 2: "c"}
    (warning,) = membership.warnings
    assert "client-id 7 on node 13 cannot join the run: client-ids must be 0 to 2" in warning


@pytest.mark.parametrize("names", [("", ""), ("b", "b"), ("x", "y")])
def test_none_of_two_devices_with_one_name_is_used(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = [member("b", 20, **K5).with_key("1", names[0]), member("b", 21).with_key("2", names[1])]
    clients = [*devices("a", "c", odd={}), *claims]
    for replies in permutations(clients):
        membership = started(monkeypatch, replies)
        assert membership.roster.names == {0: "a", 1: "c"}
        assert membership.warnings == [
            "a new node is not used: client-id b is used by two nodes, 20 and 21, and not exactly one of their keys is "
            "registered under this name: none is used"
        ]
    with pytest.raises(PbflError, match=r"^client-id b is used by two nodes, 20 and 21, and not"):
        started(monkeypatch, clients, min_clients=0)


def test_name_is_that_of_the_key_registered_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [member("b", 20 + n).with_key(str(n), name) for n, name in enumerate(("c", "b", ""))]
    for replies in permutations([*devices("a", odd={}), *claims]):
        membership = started(monkeypatch, replies)
        assert membership.roster.clients[1].node == 21
        assert membership.warnings == [
            "a new node is not used: client-id b is used by 3 nodes, 20, 21 and 22, and only the key of 21 is "
            "registered under this name"
        ]
