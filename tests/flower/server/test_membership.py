"""Which clients a run has: the handshake, clients that join it, and nodes that go and come back."""

import json
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from pbfl_flwr.config import RunSettings, Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import report, results
from pbfl_flwr.experiments.run_export import as_csv
from pbfl_flwr.flower.client import handshake as client_handshake
from pbfl_flwr.flower.client import session
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server import membership as memberships
from pbfl_flwr.flower.server.membership import Membership
from pbfl_flwr.flower.server.roster import NO_NODE, Roster, client_from_reply
from pbfl_flwr.method import Round
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs.directory import RunDirectory, RunRefused
from pbfl_flwr.runs.records import NOT_CONNECTED, ClientRecord
from pbfl_flwr.task import Task
from tests.flower.inprocess import (
    KINDS,
    SHORT,
    Answer,
    Fault,
    Federation,
    InProcessGrid,
    Killed,
    after_round,
    altered,
    federation,
    flower_error,
    handshake_reply,
    plain,
    raises,
    shown,
    silent,
    stored_rounds,
    tiny_client,
    unreported,
)
from tests.flower.sites import run, sites, write_site

TASK = Task(3, 4, (2,))


def coming(fed: Federation, arrivals: Mapping[int, Sequence[int]]) -> Federation:
    """Let devices come: round -> positions of those that are there from this round on; 1 is before the handshake."""
    nodes = [*fed.grid.get_node_ids()]
    online = [nodes[n] for n in arrivals.get(1, [])]
    fed.grid.online = lambda: online

    def look(asked: Sequence[Message], replies: Sequence[Message]) -> None:
        group = asked[0].metadata.group_id if asked else ""
        if group.isdigit():
            online.extend(node for n in arrivals.get(int(group) + 1, []) if (node := nodes[n]) not in online)

    fed.grid.watchers.append(look)
    return fed


def begun(
    tmp_path: Path, nodes: list[dict[str, Scalar]], arrivals: Mapping[int, Sequence[int]], **keys: Any
) -> Federation:
    base: dict[str, Any] = {"num_server_rounds": 3, "min_clients": 2, "join_timeout": 0.01}
    return coming(run(tmp_path, nodes, **{**base, **keys}), arrivals).run()


def test_clients_join_in_any_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = sites(tmp_path, "m", "b", "z", "a")
    fed = begun(tmp_path, nodes, {1: [0, 2], 2: [3], 3: [1]})
    assert "fedproto: 2 to 4 clients, cnn4" in caplog.text
    lines = fed.strategy.history
    assert [line.trained for line in lines] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [[n for n in line.warnings if "joined" in n] for line in lines] == [
        [],
        ["client a has joined the run"],
        ["client b has joined the run"],
    ]
    assert [line.failures for line in lines] == [[], [], []]
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert {m["name"]: m["client"] for m in about["clients"]} == {"m": 0, "z": 1, "a": 2, "b": 3}
    columns = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert [line["client"] for line in columns] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert (tmp_path / "run/result.txt").exists()
    output = shown(tmp_path / "run")
    assert "client b has joined the run" in output
    late = "joined during the run: client a in round 2, client b in round 3; accuracies of earlier rounds exclude them"
    assert late in output.splitlines()
    assert {row.split(",")[2] for row in as_csv(tmp_path / "run").splitlines()[1:]} == set("mbza")
    assert late in report.overviews(results.load([tmp_path / "run"]))[0]["warnings"]


def test_one_device_more_than_clients_is_left_out_with_a_warning(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "m", "b", "z", "a")
    fed = begun(tmp_path, nodes, {1: [0, 1, 2, 3]}, min_clients=0, num_clients=3)
    about = RunDirectory(tmp_path / "run").record()
    assert [client.name for client in about.clients] == ["a", "b", "m"]
    told = [n for n in fed.strategy.history[0].warnings if "already has its num-clients = 3" in n]
    assert len(told) == 1
    assert "client-id z" in told[0]
    assert [line.trained for line in fed.strategy.history] == [[0, 1, 2]] * 3


def test_warns_once_of_clients_with_other_pretrained_weights(tmp_path: Path) -> None:
    """When they differ at the start, and when one that joins changes the line."""
    nodes = sites(tmp_path, "a", "b", "c")
    answers = iter("121")
    with (
        patch.object(client_handshake, "digest_of_weights", lambda name: next(answers)),
        patch.object(session, "check_network"),
    ):
        fed = begun(tmp_path, nodes, {1: [0, 1], 3: [2]})
    line = "'cnn4' does not begin with the same weights everywhere: 1 on client {}; 2 on client b"
    notes = [[n for n in record.warnings if "same weights" in n] for record in fed.strategy.history]
    assert notes == [[line.format("a")], [], [line.format("a, c")]]


def test_warns_of_a_device_that_joins_with_other_code(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b")
    with patch.object(client_handshake, "code_version", lambda: "0.1.0-other"):
        fed = begun(tmp_path, nodes, {1: [0], 3: [1]}, min_clients=1)
    notes = [[n for n in record.warnings if "0.1.0-other on client" in n] for record in fed.strategy.history]
    assert [len(lines) for lines in notes] == [1, 0, 1]
    assert "on client a, b, " in notes[2][0]


@pytest.mark.parametrize("method", KINDS)
def test_clients_join_with_every_kind_of_payload(tmp_path: Path, method: str) -> None:
    nodes = sites(tmp_path, "a", "b", "c")
    short = SHORT.get(method, {})
    fed = begun(tmp_path, nodes, {1: [0, 1], 2: [2]}, method=method, num_server_rounds=2, **short)
    assert [line.trained for line in fed.strategy.history] == [[0, 1], [0, 1, 2]]
    assert fed.strategy.history[1].failures == []


def test_device_keeps_its_number(tmp_path: Path) -> None:
    nodes = sites(tmp_path, 0, 3, "x", 2)
    fed = begun(tmp_path, nodes, {1: [0, 1], 2: [2, 3]}, method="fesem")
    assert [line.trained for line in fed.strategy.history] == [[0, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert len(fed.strategy.state.assigned) == 4
    score = results.FinishedRun.load(tmp_path / "run").scores["head"]
    assert (score.best[0], score.best[1].clients) == (1, 4)  # not the first, which two of them were not in


@pytest.mark.parametrize("method", ["fedproto", "fesem", "gfpl"])
def test_unused_client_numbers_do_no_harm(tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"method": method, "num_clients": 6}
    fed = begun(tmp_path, sites(tmp_path, 1, 4, "x"), {1: [0, 1]}, **keys)
    assert [line.trained for line in fed.strategy.history] == [[1, 4]] * 3
    assert "not cover all participating clients" not in shown(tmp_path / "run")
    begun(tmp_path, sites(tmp_path, 4, 1), {1: [0, 1]}, num_server_rounds=4, resume=True, **keys)


def test_resumed_run_keeps_joined_clients(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "m", "b", "z")
    begun(tmp_path, nodes[:2], {1: [0, 1]}, num_clients=4, num_server_rounds=1)
    begun(tmp_path, nodes, {1: [0, 1, 2]}, num_clients=4, num_server_rounds=2, resume=True)
    alone = begun(tmp_path, nodes[2:], {1: [0]}, num_clients=4, num_server_rounds=3, resume=True)
    assert alone.strategy.roster is not None
    assert alone.strategy.roster.names == {0: "b", 1: "m", 2: "z"}
    assert [line.trained for line in alone.directory.round_records()] == [[0, 1], [0, 1, 2], [2]]
    assert [failure.name for failure in alone.strategy.history[2].failures] == ["b", "m"]


def test_unfit_client_is_reported_once_and_not_admitted(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b", "c")
    nodes[2]["model"] = "cnn2"
    fed = begun(tmp_path, nodes, {1: [0, 1], 2: [2]}, method="fedavg")
    assert [line.trained for line in fed.strategy.history] == [[0, 1]] * 3
    messages = [note for line in fed.strategy.history for note in line.warnings if "not used" in note]
    (note,) = messages
    assert "client-id c on node" in note
    assert "cannot join the run: method 'fedavg'" in note


def test_device_without_data_does_not_prevent_the_start(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b", "c")
    Path(str(nodes[1]["data-path"])).unlink()
    fed = begun(tmp_path, nodes, {1: [0, 1, 2]}, num_server_rounds=1)
    (line,) = fed.strategy.history
    assert line.trained == [0, 1]
    assert any("client-id = 'b'" in note and "data.npz" in note for note in line.warnings)
    with pytest.raises(PbflError, match=r"^1 of 3 clients: client-id = 'b'"):
        begun(tmp_path, nodes, {1: [0, 1, 2]}, min_clients=3, run_dir=str(tmp_path / "other"))


def test_too_few_clients_name_min_clients(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b", "c")
    with pytest.raises(PbflError, match=r"^min-clients = 2, but only 1 nodes joined within 0 s$"):
        begun(tmp_path, nodes, {1: [0]})
    with pytest.raises(PbflError, match=r"^num-clients = 3, but only 1 nodes .* 0 s; a deployment needs 3"):
        begun(tmp_path, nodes, {1: [0]}, min_clients=0)
    fed = federation(tmp_path, min_clients=2, join_timeout=0.01)
    with pytest.raises(PbflError, match=r"^min-clients = 2: must be 0 in a simulation, .* 3 did$"):
        coming(fed, {1: [0, 1, 2]}).run()
    assert federation(tmp_path, min_clients=2).run().strategy.done == 2


@pytest.mark.parametrize(
    "keys", [{"num_clients": 7}, {"num_clients": 7, "min_clients": 2}, {"num_clients": 3}]
)
def test_a_simulation_of_another_size_ends_at_once(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Flower's simulation has all its nodes soon after the start, so there is nothing to wait for."""
    fed, begin = federation(tmp_path, join_timeout=180.0, partitions=range(5), **keys), time.monotonic()
    fed.grid.pull_interval = 0.1  # type: ignore[attr-defined]
    says = rf"^num-clients = {keys['num_clients']}, but the simulation has num-supernodes = 5: must be the same number"
    with pytest.raises(PbflError, match=says):
        fed.run()
    assert time.monotonic() - begin < 20
    assert fed.grid.asked == []


def test_new_node_is_asked_at_once_after_a_failure(tmp_path: Path) -> None:
    """It may be the client whose old node is not known to be gone yet."""
    nodes = sites(tmp_path, "a", "b")
    nodes.append(nodes[1])
    fed = run(
        tmp_path, nodes, num_clients=3, num_server_rounds=4, min_clients=2, join_timeout=0.01,
        faults={(1, 3): silent},
    )  # fmt: skip
    coming(fed, {1: [0, 1], 2: [2]}).run()
    lines = fed.strategy.history
    assert [line.trained for line in lines] == [[0, 1], [0, 1], [0], [0, 1]]
    assert fed.strategy.roster is not None
    assert fed.strategy.roster.clients[1].node == fed.grid.nodes[2]


@pytest.mark.parametrize("at", [1, 2])
def test_client_joined_in_an_unfinished_round_is_recorded_in_it(tmp_path: Path, at: int) -> None:
    """The server is killed when it has asked somebody new; who joined earlier is not said a second time."""

    def kill(message: Message, answer: Answer) -> Message:
        raise Killed

    nodes = sites(tmp_path, "a", "b", "c", "d")
    arrivals = {1: [0, 1], 2: [2], 3: [3]}
    with pytest.raises(Killed):
        begun(tmp_path, nodes, arrivals, faults={(1 + at, 1 + at): kill})
    resumed = begun(tmp_path, nodes, {1: range(2 + at), 3: [3]}, resume=True)
    records = resumed.directory.round_records()
    assert [record.joined for record in records] == [[], ["c"], ["d"]]
    output = [warning for record in records for warning in record.warnings if "joined" in warning]
    assert output == ["client c has joined the run", "client d has joined the run"]


def test_numbers_of_joining_clients_do_not_depend_on_reply_order(tmp_path: Path) -> None:
    """Own numbers first, then names in ascending order."""
    nodes = sites(tmp_path, "a", "b", "z", "m", 3, "k")
    arrivals = {1: [0, 1], 2: [2, 3, 4, 5]}
    result = [
        begun(tmp_path, nodes, arrivals, place=f"run{order}", order=order, num_server_rounds=2)
        for order in range(4)
    ]
    assert [one.strategy.history[1].joined for one in result] == [["k", "3", "m", "z"]] * 4
    assert result[0].strategy.roster is not None
    assert result[0].strategy.roster.names == {0: "a", 1: "b", 2: "k", 4: "m", 5: "z"}
    assert len({one.fingerprint for one in result}) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedproto", "aggregation": "ppa", "total_examples": 80},
        {"method": "tinyproto", "aps_scale": 3 / 80, "cps_dim": 0},
    ],
    ids=["ppa", "aps"],
)
def test_configured_constants_do_not_change_when_clients_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """Unlike the number of clients, which is that of those that have joined."""
    aggregate, rounds = Pipeline.aggregate, []

    def watched(self: Pipeline, state: Any, uploads: Any, round_info: Round) -> Any:
        new = aggregate(self, state, uploads, round_info)
        rounds.append((len(uploads), round_info.num_clients))
        sums = torch.stack([upload.values for upload in uploads.values()]).sum(0)
        factor = 3 / (20 * len(uploads))  # K/n: the 80 samples of four clients are 20 of each that answers
        if keys["method"] == "tinyproto":
            factor /= 3 / 80  # the client multiplies by μ
        torch.testing.assert_close(new.broadcast.values, factor * sums)
        return new

    monkeypatch.setattr(Pipeline, "aggregate", watched)
    nodes = sites(tmp_path, "a", "b", "c")
    begun(tmp_path, nodes, {1: [0, 1], 3: [2]}, num_clients=4, **keys)
    resume: dict[str, Any] = {"num_server_rounds": 4, "resume": True, "min_clients": 0}
    begun(tmp_path, nodes, {1: [0, 1, 2]}, num_clients=4, **resume, **keys)
    assert rounds == [(2, 2), (2, 2), (3, 3), (3, 3)]


def test_client_joining_in_the_last_round_is_scored(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b", "c")
    keys: dict[str, Any] = {"num_server_rounds": 1, "evaluate_moment": "before"}
    fed = begun(tmp_path, nodes, {1: [0, 1], 2: [2]}, **keys)
    (line,) = fed.strategy.history
    assert line.final is not None
    assert line.final.accuracy["head"].clients == 3
    assert "client c has joined the run" in line.warnings
    assert "client c has joined the run" in RunDirectory(tmp_path / "run").round_records()[0].warnings
    assert RunDirectory(tmp_path / "run").round_records()[0].joined == ["c"]
    assert len(RunDirectory(tmp_path / "run").record().clients) == 3


def member(client: int | str, node: int = 9, **properties: Any) -> ClientRecord:
    reply = {**handshake_reply(0, TASK), "simulated": False, **properties, "client": client}
    return client_from_reply(node, ConfigRecord(reply))


@pytest.mark.parametrize(
    ("came", "numbers"),
    [
        (["b", "c", "a"], {"a": 0, "b": 1, "c": 2}),
        (["b", 0, "a"], {"a": 1, "b": 2, "0": 0}),  # a number is its own, names take what is free
        (["b", 1, "a"], {"a": 0, "b": 2, "1": 1}),
        (["A", "a", "B"], {"A": 0, "B": 1, "a": 2}),  # the order of code points
    ],
)
def test_assigns_numbers_to_names(came: list[str | int], numbers: dict[str, int]) -> None:
    membership = membership_of({})
    assert (
        placed(membership, *(member(client, node) for node, client in enumerate(came)), online=range(3)) == {}
    )
    assert {m.label: number for number, m in membership.roster.clients.items()} == numbers


def membership_of(members: Mapping[int, ClientRecord], size: int = 3, **run: Any) -> Membership:
    """Return that of a run of so many clients, whose method takes every network."""
    settings = RunSettings(num_clients=size, round_timeout=60.0, join_timeout=1.0, **run)
    return Membership(settings, "e", lambda roster: None, roster=Roster(members))


def placed(membership: Membership, *clients: ClientRecord, online: Collection[int] = ()) -> dict[int, str]:
    return {node: str(error) for node, error in membership._place(clients, online).items()}


@pytest.mark.parametrize(
    ("taken", "client", "message", "reason"),
    [
        ([0, 1, 2], "x", {}, "the run already has its num-clients = 3 clients"),
        ([0], 1, {"simulated": True}, "simulated clients cannot join a running federation"),
        ([0], 3, {}, "client-ids must be 0 to 2, since num-clients = 3"),
        (["a"], 0, {}, r"number 0 \(of client-ids a and 0\) is used by two nodes"),
        (
            [0, 1],
            2,
            {"num-classes": 5, "labels": []},
            "clients disagree on num classes K: client 0 has 3, 2 has 5",
        ),
        ([0, 1], 2, {"feature-dim": 7}, "clients disagree on feature-dim d: client 0 has 4, 2 has 7"),
        ([0, 1], 2, {"input-shape": [3, 8]}, r"disagree on input shape: client 0 has \(2,\), 2 has \(3, 8\)"),
        ([0, 1], 2, {"labels": ["0", "2", "1"]}, r"label names: client 0 has \('0', '1', '2'\), 2 has"),
    ],
)
def test_rejects_clients_that_cannot_join(
    taken: list[int | str], client: int | str, message: dict[str, Any], reason: str
) -> None:
    members = [member(who) for who in taken]
    membership = membership_of({n: m.numbered(n) for n, m in enumerate(members)}, min_clients=1)
    refused = placed(membership, member(client, 10, **message))
    assert re.search(reason, refused.pop(10))
    assert list(membership.roster.clients) == list(range(len(taken)))


def test_silent_node_is_asked_less_and_less_often() -> None:
    grid = InProcessGrid(
        lambda message, context: pytest.fail("nobody is there"), {}, nodes=[9, 101], partitions=[0, 1]
    )
    grid.faults = {(1, 0): silent}  # 9 is the client's, the other one never answers
    membership = membership_of({0: member(0)}, 2, min_clients=1)
    greeted = []
    for number in range(1, 103):
        grid.nodes[1:] = [101] if number != 101 else []
        before, now = len(grid.sent), grid.clock.now
        assert membership.absent(grid, number) == {}
        greeted += [(number, grid.clock.now - now) for _ in grid.sent[before:]]
    # The pause grows to 32 rounds; a node that was away is greeted as soon as it is back.
    assert greeted == [(number, 60.0) for number in (1, 2, 4, 8, 16, 32, 64, 96, 102)]
    assert membership.warnings == ["a new node is not used: node 101: no answer within 60 s"]


# The handshake -----------------------------------------------------------------------------------------------


def test_counts_clients_that_cannot_start_by_reason(tmp_path: Path) -> None:
    def some_data(settings: Any, client: int) -> Any:
        if client in (1, 3):
            raise PbflError("the data is not there; it belongs at /data/x")
        return tiny_client(client)

    fed = federation(tmp_path, data=some_data)
    with pytest.raises(
        PbflError, match=r"^2 of 5 clients: the data is not there; it belongs at /data/x \(on node "
    ) as error:
        fed.run()
    assert str(error.value).endswith(f"(on node {fed.grid.nodes[1]}, {fed.grid.nodes[3]})")
    assert {kind for _, _, kind in fed.grid.asked} == {"query"}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (silent, "1 of 5 clients: no answer within 1 s (on node "),
        (altered(lambda content: content.clear()), "its handshake reply is empty"),
        (
            altered(lambda content: wire.content(config=ConfigRecord({"client": 1}))),
            "its handshake reply lacks 'input-shape'",
        ),
        # Its name stands in tables, which a spreadsheet may open.
        (
            altered(lambda c: c.config_records[wire.CONFIG].update(architecture="=HYPERLINK(1)")),
            "'=HYPERLINK(1)' is not a network",
        ),
        (flower_error(""), "error code 8"),
    ],
)
def test_failed_handshake_is_one_line(tmp_path: Path, fault: Fault, text: str) -> None:
    with pytest.raises(PbflError) as error:
        federation(tmp_path, faults={(1, 0): fault}, round_timeout=1.0).run()
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_rejects_experiment_that_is_no_directory_name(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    fed.strategy.experiment = "../../elsewhere"
    with pytest.raises(PbflError, match=r"experiment = '\.\./\.\./elsewhere': must be letters"):
        fed.run()


# Nodes that go and come back ---------------------------------------------------------------------------------


def test_client_continues_on_another_node(tmp_path: Path) -> None:
    fed = federation(tmp_path, num_server_rounds=3, faults={(1, 2): unreported})

    def restarted() -> None:  # its SuperNode was started again, without a key: Flower gives it another id
        fed.grid.nodes[1] = 99

    with after_round(2, restarted):
        fed.run()
    assert fed.strategy.history[2].trained == [0, 1, 2, 3, 4]
    assert fed.strategy.roster is not None
    assert fed.strategy.roster.clients[1].node == 99
    assert stored_rounds(fed)[1] == (3, 2)  # its own state, two participations


def test_a_client_on_another_node_counts_what_it_declared_at_first() -> None:
    """More than twice as many samples are rejected until the run is resumed, also if it declares them anew."""
    counts = {"num-train": 2**30, "num-test": 2**30, "num-validation": 2**30}
    for before, declared in ((12, 2**20), (NO_NODE, 2**30)):  # after a resume a new declaration counts
        membership = membership_of({1: member(1, 12).on_node(before)}, 2)
        assert placed(membership, member(1, 22, **counts), online={22}) == {}
        client = membership.roster.clients[1]
        assert client.node == 22
        assert {client.num_train, client.num_test, client.num_validation} == {declared}


def test_a_client_that_joins_with_nearly_all_test_samples_is_named(tmp_path: Path) -> None:
    fed = begun(tmp_path, sites(tmp_path, "a", "b", "c"), {1: [0, 1], 2: [2]}, num_clients=4)
    assert "decides the weighted accuracy" not in str(fed.strategy.history)
    huge = altered(declares({"num-test": 10**9}))
    nodes = sites(tmp_path / "huge", "a", "b", "c")
    fed = begun(tmp_path / "huge", nodes, {1: [0, 1], 2: [2]}, num_clients=4, faults={(2, 0): huge})
    (named,) = (line for line in fed.strategy.history[1].warnings if "decides the weighted accuracy" in line)
    assert named.startswith("client c declares 1000000000 of 10000000")


def test_other_numbers_of_samples_are_told_in_the_first_round_that_has_them(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b", "c")
    run(tmp_path, nodes, num_server_rounds=1).run()
    for name, samples in (("a", 20), ("c", 25)):
        write_site(tmp_path / name, 1, samples)
    fed = run(tmp_path, nodes, num_server_rounds=3, resume=True).run()
    told = [
        [line.split(" has ")[0] for line in record.warnings if "number of samples" in line]
        for record in fed.strategy.history
    ]
    assert told == [[], ["client a, c"], []]


def declares(fields: dict[str, Any]) -> Callable[[RecordDict], RecordDict]:
    """The content of a handshake's reply with these fields in place of its own."""

    def changed(content: RecordDict) -> RecordDict:
        return RecordDict({"c": ConfigRecord({**content.config_records["c"], **fields})})

    return changed


def test_disconnected_node_is_reported_and_not_asked(tmp_path: Path) -> None:
    faults = {(1, 1): silent, (1, 2): silent}
    fed = federation(tmp_path, num_server_rounds=3, faults=faults, fraction_train=0.6)
    gone = fed.grid.nodes[1]
    fed.grid.online = lambda: [node for node in fed.grid.nodes if node != gone or fed.strategy.done != 2]
    fed.run()
    third = fed.strategy.history[2]
    assert plain(third.failures) == [{"client": 1, "reason": "its node is not connected"}]
    assert len(third.trained) == 3  # 60 % of five, of those who are there
    assert not any(client == 1 and number == 3 for client, number, _ in fed.grid.asked)


def test_second_node_of_a_connected_client_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fed = federation(tmp_path, num_server_rounds=3, faults={(1, 1): raises})

    def connected() -> None:
        fed.grid.nodes.append(99)
        fed.grid.partitions.append(3)

    with after_round(1, connected):
        fed.run()
    first = fed.grid.nodes[3]
    assert f"a new node is not used: client-id 3 is used by two nodes, {first} and 99" in caplog.text
    assert fed.strategy.history[2].trained == [0, 1, 2, 3, 4]
    assert stored_rounds(fed)[3] == (3, 3)


def test_client_reconnecting_with_another_architecture_is_refused() -> None:
    membership = membership_of({0: member(0, 11), 1: member(1, 12)}, 2)
    roster, membership.failed = membership.roster, frozenset({1})
    refused = placed(membership, member(1, 22, architecture="resnet4"), member(5, 23), online={11, 22, 23})
    assert membership.roster == roster
    assert refused == {
        22: "client 1: a run keeps its clients, but this one has architecture = resnet4, it had cnn4",
        23: "client-id 5 on node 23 is not part of this run",
    }


@pytest.mark.parametrize("key", [b"1", b"2"], ids=["same key", "other key"])
def test_every_round_after_a_resume_says_how_a_device_has_changed(tmp_path: Path, key: bytes) -> None:
    """Unless it has another key: then the client may be another device, which is not connected."""
    nodes = sites(tmp_path, "a", "b")
    start = run(tmp_path, nodes, num_server_rounds=1)
    start.grid.keys[start.grid.nodes[1]] = b"1"
    start.run()
    nodes[1] |= {"model": "mlp", "state-dir": str(tmp_path / "empty")}
    fed = run(tmp_path, nodes, num_server_rounds=3, resume=True, join_timeout=0.01)
    fed.grid.keys[fed.grid.nodes[1]] = key
    fed.run()
    changed = "client b: a run keeps its clients, but this one has architecture = mlp, it had cnn4"
    reason = changed if key == b"1" else NOT_CONNECTED
    failures = [(f.name, f.reason) for record in fed.strategy.history[1:] for f in record.failures]
    assert failures == [("b", reason)] * 2
    assert fed.strategy.history[1].warnings[0] == f"a new node is not used: {changed}"


def test_one_of_two_new_nodes_of_a_failed_client_is_used() -> None:
    membership = membership_of({1: member(1, 12)}, 2)
    membership.failed = frozenset({1})
    refused = placed(membership, member(1, 23), member(1, 22), online={12, 22, 23})
    assert membership.roster.clients[1].node == 22
    assert refused == {23: "client-id 1 is used by two nodes, 22 and 23"}


def scripted_nodes(
    monkeypatch: pytest.MonkeyPatch,
    seen: Sequence[Sequence[int]],
    replies: Sequence[Mapping[int, int | str | None]],
    connected: Sequence[int] = (11, 12, 21, 22),
) -> Any:
    """Return a grid with these nodes at each look and after each handshake, which has these replies.

    ``replies`` are node -> client, or the reason why it is refused; None for a node that was lost.
    """
    looks, answers = iter(seen), iter(replies)

    def send(
        grid: Any, asked: Sequence[int], *_: Any
    ) -> tuple[list[ClientRecord], dict[int, str], dict[int, str]]:
        result = next(answers)
        assert [*result] == [*asked]
        refused = {node: answer for node, answer in result.items() if isinstance(answer, str)}
        lost = {node: "Error: Node Unavailable" for node, answer in result.items() if answer is None}
        return (
            [member(answer, node) for node, answer in result.items() if isinstance(answer, int)],
            refused,
            lost,
        )

    monkeypatch.setattr(memberships, "send_handshake", send)
    monkeypatch.setattr(memberships, "wait_for_nodes", lambda *_, **__: next(looks))
    return SimpleNamespace(get_node_ids=lambda: connected)


@pytest.mark.parametrize(
    ("seen", "replies", "nodes"),
    [
        ([[11], [21], [21, 22]], [{11: 0}, {21: 0}, {22: 1}], {0: 21, 1: 22}),
        ([[11, 12], [11, 12]], [{11: 0, 12: None}, {12: 1}], {0: 11, 1: 12}),
    ],
    ids=["restarted", "lost during the handshake"],
)
def test_device_that_comes_back_during_resume_is_one_client(
    seen: list[list[int]],
    replies: list[dict[int, int | None]],
    nodes: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = scripted_nodes(monkeypatch, seen, replies)
    membership = membership_of({}, min_replies=2)
    membership.collect(grid, [member(0, 1), member(1, 1)])
    assert {client: at.node for client, at in membership.roster.clients.items()} == nodes
    assert membership.warnings == []


@pytest.mark.parametrize("answer", [None, "ClientApp stopped responding."], ids=["lost", "ended"])
@pytest.mark.parametrize("back", [12, 22], ids=["same node", "other node"])
def test_new_run_waits_for_a_device_that_dies_during_the_handshake(
    answer: str | None, back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [[11, 12], [11, 12], [11, back]]
    grid = scripted_nodes(monkeypatch, seen, [{11: 0, 12: answer}, {back: 1}], connected=[11])
    membership = membership_of({}, 2)
    membership.collect(grid, None)
    assert {client: at.node for client, at in membership.roster.clients.items()} == {0: 11, 1: back}
    assert membership.warnings == []


def test_new_run_goes_on_without_a_lost_device_only_if_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is lost again when it comes back, and then the time is over."""
    seen, reason = [[11, 12], [11, 12], [11, 12], [11]], "Error: Node Unavailable"
    replies: list[dict[int, int | str | None]] = [{11: 0, 12: None}, {12: None}]
    with pytest.raises(PbflError, match=rf"^1 of 2 clients: {reason} \(on node 12\)$"):
        membership_of({}, 2).collect(scripted_nodes(monkeypatch, seen, replies), None)
    membership = membership_of({}, 2, min_clients=1)
    membership.collect(scripted_nodes(monkeypatch, seen, replies), None)
    assert [*membership.roster.clients] == [0]
    assert membership.warnings == [f"a new node is not used: node 12: {reason}"]


def test_new_run_needs_the_devices_that_have_answered_and_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answers and dies while the server waits for another, which was lost and comes back."""
    seen = [[11, 12], [11, 12], [12], [12]]
    grid = scripted_nodes(monkeypatch, seen, [{11: 0, 12: None}, {12: 1}])
    with pytest.raises(PbflError, match=r"^2 clients are needed, but only 1 were still connected after the"):
        membership_of({}, 2).collect(grid, None)


def test_lost_device_is_not_asked_again_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = scripted_nodes(monkeypatch, [[11, 12]] * 3, [{11: 0, 12: None}])
    membership = membership_of({}, 2, min_clients=1)
    times = iter([0.0, 0.5, 1.5])
    monkeypatch.setattr(memberships, "time", SimpleNamespace(monotonic=lambda: next(times)))
    membership.collect(grid, None)
    assert [*membership.roster.clients] == [0]


def test_new_run_ends_at_once_if_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = scripted_nodes(monkeypatch, [[11, 12]] * 3, [{11: 0, 12: "it has no samples"}])
    with pytest.raises(PbflError, match=r"^1 of 2 clients: it has no samples \(on node 12\)$"):
        membership_of({}, 2).collect(grid, None)


def test_a_device_that_joins_is_written_into_no_other_run(tmp_path: Path) -> None:
    """One that has taken the place of the run meanwhile."""
    fed = run(tmp_path, sites(tmp_path, "a", "b", "c"), min_clients=2, num_server_rounds=3)
    late = fed.grid.nodes[2]
    fed.grid.online = lambda: [node for node in fed.grid.nodes if node != late or fed.strategy.done]

    def moved() -> None:
        if not (tmp_path / "moved").exists():  # for the other run, too, something happens
            shutil.move(fed.directory.path, tmp_path / "moved")
            run(tmp_path, sites(tmp_path, "x", "y"), num_server_rounds=2).run()

    with after_round(1, moved), pytest.raises(RunRefused, match=r"the run ended before round 2 counted$"):
        fed.run()
    assert [client.name for client in fed.directory.record().clients] == ["x", "y"]


def test_a_device_that_has_not_reconnected_keeps_its_node_in_the_record(tmp_path: Path) -> None:
    nodes = sites(tmp_path, "a", "b")
    before = run(tmp_path, nodes, num_server_rounds=1).run().directory.record().clients
    fed = run(tmp_path, nodes, num_server_rounds=2, resume=True, join_timeout=0.01)
    fed.grid.online = lambda: fed.grid.nodes[:1]
    after = fed.run().directory.record().clients
    assert [client.node for client in after] == [client.node for client in before]
