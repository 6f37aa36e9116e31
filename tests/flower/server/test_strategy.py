"""The strategy: aggregation, failures and poison, sampling, resuming. Most rounds here have no training in them."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from pbfl_flwr.config import DataSettings, Scalar, parse
from pbfl_flwr.data import check_data, client_data, load_pool
from pbfl_flwr.errors import LONGEST, PbflError
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.membership import checked_roster
from pbfl_flwr.flower.server.roster import Roster, client_from_reply
from pbfl_flwr.flower.server.stopping import RunEnded
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.method import Method, Round, Update
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes, Weights
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs import directory as history
from pbfl_flwr.runs.directory import ERROR, RunDirectory, RunRefused
from pbfl_flwr.task import Task
from pbfl_flwr.util.atomic_files import DamagedState
from server_app import app as server_app
from tests.flower.inprocess import (
    NUM_CLIENTS,
    Answer,
    Fault,
    Federation,
    InProcessGrid,
    altered,
    federation,
    flower_error,
    handshake_reply,
    lost,
    numbers,
    plain,
    raises,
    reply_of,
    same_tensors,
    scripted,
    silent,
    tiny_client,
    upload,
)

TASK = Task(num_classes=4, feature_dim=6, input_shape=(1, 16, 16))


def strategy_of(**keys: Scalar) -> MethodStrategy:
    config = {"num-clients": 4, "num-server-rounds": 1, "feature-dim": 6, "join-timeout": 0.2}
    given = {key.replace("_", "-"): value for key, value in keys.items()}
    return MethodStrategy(parse({**config, **given}, SECTIONS))


def prototypes(seed: int, labels: list[int], counts: list[int] | None = None) -> Prototypes:
    values = torch.zeros(4, 6)
    values[labels] = torch.randn(len(labels), 6, generator=torch.Generator().manual_seed(seed))
    present = torch.zeros(4, dtype=torch.bool)
    present[labels] = True
    table = None
    if counts is not None:
        table = torch.zeros(4, dtype=torch.int64)
        table[labels] = torch.tensor(counts)
    return Prototypes(values, present, table)


# Aggregation against NumPy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["mean", "weighted"])
def test_prototypes_are_averaged_as_numpy_does(rule: str) -> None:
    held = {0: [0, 1], 1: [1, 2], 2: [1, 3]}
    n = {0: [5, 1], 1: [9, 4], 2: [2, 7]}  # class 1 is held by three clients with 1, 9 and 2 samples
    weighted = rule == "weighted"
    uploads = {i: prototypes(i, held[i], n[i] if weighted else None) for i in held}
    strategy = strategy_of(method="fedproto", aggregation=rule)
    strategy.begin(TASK)

    state = strategy.aggregate_fit(1, uploads)

    for j in range(4):
        holders = [i for i in held if j in held[i]]
        rows = np.array([uploads[i].values[j].numpy() for i in holders], dtype=np.float64)
        w = np.array([n[i][held[i].index(j)] if weighted else 1.0 for i in holders])
        expected = (w[:, None] * rows).sum(0) / w.sum()
        np.testing.assert_allclose(state.broadcast.values[j].numpy(), expected, atol=1e-6)


def test_the_two_averages_differ() -> None:
    uploads = {0: prototypes(0, [1], [1]), 1: prototypes(1, [1], [9])}
    found = {}
    for rule in ("mean", "weighted"):
        strategy = strategy_of(method="fedproto", aggregation=rule)
        strategy.begin(TASK)
        sent = uploads if rule == "weighted" else {i: replace(up, counts=None) for i, up in uploads.items()}
        found[rule] = strategy.aggregate_fit(1, sent).broadcast.values[1]
    # (a + 9b)/10 lies four fifths of the way from the mean (a + b)/2 to b
    b = uploads[1].values[1]
    torch.testing.assert_close(found["weighted"] - found["mean"], 0.8 * (b - found["mean"]))
    assert float((found["weighted"] - found["mean"]).abs().max()) > 0.1


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weights_are_averaged_as_numpy_does(weighting: str) -> None:
    strategy = strategy_of(method="fedavg", models="cnn2", weighting=weighting)
    strategy.begin(TASK)
    n = {0: 1, 1: 30, 2: 3}
    uploads = {}
    for i in n:
        g = torch.Generator().manual_seed(i)
        named = {name: torch.randn(t.shape, generator=g) for name, t in strategy.state.tensors.items()}
        uploads[i] = Weights(named, n[i])
    share = {i: (n[i] if weighting == "samples" else 1.0) for i in n}

    state = strategy.aggregate_fit(1, uploads)

    for name in state.tensors:
        stacked = np.stack([share[i] * uploads[i].tensors[name].double().numpy() for i in n])
        np.testing.assert_allclose(state.tensors[name], stacked.sum(0) / sum(share.values()), atol=1e-6)


def test_an_aggregate_that_is_not_finite_ends_the_run_and_keeps_the_state() -> None:
    strategy = strategy_of(method="fedproto")
    strategy.begin(TASK)
    before = strategy.state
    bad = replace(prototypes(0, [1]), values=torch.full((4, 6), float("nan")))
    with pytest.raises(RunEnded, match="round 1: after aggregation 'rows' of the broadcast holds NaN"):
        strategy.aggregate_fit(1, {0: bad})
    assert strategy.state is before


# Poison -----------------------------------------------------------------------------------------------------

ROWS = torch.arange(12, dtype=torch.float32).reshape(2, 6)
LABELS = torch.tensor([0, 2], dtype=torch.uint8)
COUNTS = torch.tensor([3, 4])


def tampered(value: float) -> Tensor:
    rows = ROWS.clone()
    rows[1, 3] = value
    return rows


POISON: dict[str, tuple[str, dict[str, Tensor], str]] = {
    "nan": ("mean", {"labels": LABELS, "rows": tampered(float("nan"))}, "'rows' holds NaN or infinity"),
    "inf": ("mean", {"labels": LABELS, "rows": tampered(float("inf"))}, "'rows' holds NaN or infinity"),
    "huge": (
        "mean",
        {"labels": LABELS, "rows": tampered(1e30)},
        "'rows' holds 1e+30, allowed is up to 1e+08",
    ),
    "narrow": ("mean", {"labels": LABELS, "rows": ROWS[:, :5]}, "rows are 5 wide, expected 6"),
    "wide": ("mean", {"labels": LABELS, "rows": torch.ones(2, 7)}, "rows are 7 wide, allowed is 1..6"),
    "flat": ("mean", {"labels": LABELS, "rows": ROWS.flatten()}, "'rows' has 1 dimensions, expected 2"),
    "class out of range": (
        "mean",
        {"labels": torch.tensor([0, 4], dtype=torch.uint8), "rows": ROWS},
        "class id 4 is outside 0..3",
    ),
    "negative class": (
        "mean",
        {"labels": torch.tensor([-1, 2]), "rows": ROWS},
        "class id -1 is outside 0..3",
    ),
    "doubled class": ("mean", {"labels": torch.tensor([2, 2]), "rows": ROWS}, "a class is sent twice"),
    "labels without rows": ("mean", {"labels": LABELS, "rows": ROWS[:1]}, "2 labels for 1 rows"),
    "no rows at all": ("mean", {"labels": LABELS}, "'rows' is missing"),
    "zero count": (
        "weighted",
        {"labels": LABELS, "rows": ROWS, "counts": torch.tensor([3, 0])},
        "a row with a count of zero or less",
    ),
    "counts without rows": (
        "weighted",
        {"labels": LABELS[:1], "rows": ROWS[:1], "counts": COUNTS},
        "2 counts for 1 rows",
    ),
    "no counts": ("weighted", {"labels": LABELS, "rows": ROWS}, "counts are missing of rule 'weighted'"),
    "enormous count": (
        "weighted",
        {"labels": LABELS, "rows": ROWS, "counts": torch.tensor([3, 2**62])},
        f"a count of {2**62}",
    ),
    "unwanted counts": (
        "mean",
        {"labels": LABELS, "rows": ROWS, "counts": COUNTS},
        "counts are not part of rule 'mean'",
    ),
    "counts as fractions": (
        "weighted",
        {"labels": LABELS, "rows": ROWS, "counts": torch.tensor([3.0, 4.0])},
        "'counts' must be a list of whole numbers",
    ),
    "complex": ("mean", {"labels": LABELS, "rows": ROWS.to(torch.complex64)}, "'rows' is torch.complex64"),
    "float8": ("mean", {"labels": LABELS, "rows": ROWS.to(torch.float8_e4m3fn)}, "'rows' is torch.float8"),
    "something else": (
        "mean",
        {"labels": LABELS, "rows": ROWS, "extra": COUNTS},
        "unexpected tensors ['extra']",
    ),
}


TIMES = numbers(Report(0, 0).to_record(), "t")


def poisoned_round(rule: str, poison: RecordDict | Message | None) -> MethodStrategy:
    """Run one round of four clients; client 2 answers with the poison, or not at all."""

    def answer(client: int, server_round: int) -> RecordDict | Message:
        if client == 2 and poison is not None:
            return poison
        return reply_of(prototypes(client, [client % 4, 3], [2, 1 + client] if rule == "weighted" else None))

    faults = {(2, 1): silent} if poison is None else {}
    strategy = strategy_of(method="fedproto", aggregation=rule)
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 4, order=1, faults=faults))
    return strategy


@pytest.mark.parametrize("name", list(POISON))
def test_poison_is_rejected_and_named_and_the_aggregate_unharmed(name: str) -> None:
    rule, tensors, reason = POISON[name]
    report = Report(10, 4, 1, {"head": 2}, 0.5).to_record()
    record = wire.with_checksum(_saved(tensors))  # float8 and complex cannot be encoded by our side

    poisoned, without = poisoned_round(rule, wire.content(record, report)), poisoned_round(rule, None)

    (failure,) = poisoned.history[0].failures
    assert failure.client == 2
    assert failure.reason.startswith("upload rejected: ")
    assert reason in failure.reason
    assert "\n" not in failure.reason
    assert poisoned.history[0].trained == [0, 1, 3]
    assert poisoned.history[0].accuracy == without.history[0].accuracy
    assert same_tensors(poisoned.state.to_tensors(), without.state.to_tensors())


def _saved(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": [10, 4]}, "lacks 'n' of length 4"),
        ({"n": [10, -4, 1, 0]}, "its counters contradict each other"),
        ({"n": [10, 1, 1, 0]}, "its counters contradict each other"),
        ({"n": [2**62, 4, 1, 0]}, "its report counts 4611686018427387904 samples"),
        ({"n": [1e308, 4.0, 1.0, 0.0]}, "a number beyond 1e40"),
        ({"c": [1, 2]}, "lacks 'c'"),
        ({"t": [float("nan")] * len(TIMES)}, "its report holds nan in 't'"),
        ({"loss.ce": float("inf")}, "its report holds inf in 'loss.ce'"),
        ({"loss.ce": -1e300}, "a number beyond 1e40 in 'loss.ce'"),
        ({f"metric-{i}": 0.0 for i in range(200)}, "must be at most 100"),
    ],
)
def test_a_report_that_cannot_be_is_rejected(change: dict[str, Any], reason: str) -> None:
    record = Report(10, 4, 1, {"head": 2}, 0.5, metrics={"loss.ce": 1.0}).to_record()
    forged = MetricRecord({**dict(record), **change})
    strategy = poisoned_round("mean", wire.content(wire.encode(prototypes(2, [0])), forged))
    (failure,) = strategy.history[0].failures
    assert failure.client == 2
    assert reason in failure.reason
    json.dumps([record.to_json() for record in strategy.history], allow_nan=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (RecordDict(), "its report is missing"),
        (RecordDict({"p": ConfigRecord({"a": 1})}), "its report is missing"),
        (wire.content(report=Report(10, 4).to_record()), "its payload is missing"),
        (wire.content(ArrayRecord(), Report(10, 4).to_record()), "'labels' is missing"),
        (
            wire.content(ArrayRecord({"s": Array(np.ones(3))}), Report(10, 4).to_record()),
            "an array of format 'numpy.ndarray', expected 'safetensors'",
        ),
    ],
)
def test_a_reply_without_its_parts_is_rejected(content: RecordDict, reason: str) -> None:
    (failure,) = poisoned_round("mean", content).history[0].failures
    assert plain(failure) == {"client": 2, "reason": f"upload rejected: {reason}"}


def test_random_replies_never_crash_the_server() -> None:
    """300 mutations of a good reply: bytes flipped and cut, records swapped, dropped and filled with nonsense."""
    good = reply_of(prototypes(2, [0, 2]))
    rng = random.Random(5)

    def answer(client: int, server_round: int) -> RecordDict:
        return _mangled(good, rng) if client == 2 else reply_of(prototypes(client, [client]))

    strategy = strategy_of(method="fedproto", num_server_rounds=300)
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 4))

    failures = [failure for line in strategy.history for failure in line.failures]
    assert len(strategy.history) == 300
    assert len(failures) > 200
    for line in strategy.history:
        assert set(line.trained) | {failure.client for failure in line.failures} == {0, 1, 2, 3}
    for failure in failures:
        assert failure.client == 2
        assert "\n" not in failure.reason
        assert len(failure.reason) < 2 * LONGEST
    assert torch.isfinite(strategy.state.broadcast.values).all()
    json.dumps([record.to_json() for record in strategy.history], allow_nan=False)
    # What the others sent came through in every round.
    for client in (0, 1, 3):
        expected = prototypes(client, [client]).values[client]
        assert torch.equal(strategy.state.combined.values[client], expected)


def _mangled(good: RecordDict, rng: random.Random) -> RecordDict:
    array = good.array_records["p"]["s"]
    data = bytearray(array.data)
    record, report = good.array_records["p"].copy(), MetricRecord(dict(good.metric_records["m"]))
    content = RecordDict({"p": record, "m": report})
    kind = rng.randrange(9)
    if kind == 0:
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(min(len(data), 150))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data = data[: rng.randrange(len(data))]
    elif kind == 2:
        data = bytearray(rng.randbytes(rng.randrange(300)))
    elif kind == 3:  # absurd headers
        header: Any = {
            "rows": {
                "dtype": rng.choice(["F32", "F8_E4M3", "C64", "F4", "U64", "BOOL", "I8", "X"]),
                "shape": rng.choice([[0, 2**63], [2**62, 4], [1, 6], [2, 3], [], [-1], "x", None, [0, 0]]),
                "data_offsets": rng.choice([[0, 0], [0, 24], [24, 0], [0, 2**63]]),
            }
        }
        text = json.dumps(header).encode()
        length = rng.choice([len(text), len(text), 2**62, 0])
        data = bytearray(length.to_bytes(8, "little") + text + bytes(rng.choice([0, 24])))
    elif kind == 4:
        del content[rng.choice(["p", "m"])]
        return content
    elif kind == 5:
        values: list[str | int | bytes] = ["y", 1, b"z"]
        content[rng.choice(["p", "m"])] = ConfigRecord({"x": rng.choice(values)})
        return content
    elif kind == 6:
        nonsense: list[Any] = [0, -(2**62), 2**62, 1e300, float("nan"), [], [1e300] * 3, [-5] * 4]
        nonsense.append([float("inf")] * 6)
        report[rng.choice(["n", "c", "t", "loss.ce"])] = rng.choice(nonsense)
        return content
    elif kind == 7:
        record["second"] = array
        return content
    else:
        record["s"] = Array(
            rng.choice(["uint8", "", "O"]), (1,), rng.choice(["numpy.ndarray", "", "x"]), b"\x80"
        )
        return content
    content["p"] = wire.with_checksum(bytes(data))
    return content


def test_a_flood_of_words_is_cut() -> None:
    strategy = _named(flower_error("line one\n" + "x" * 100_000))
    (failure,) = strategy.history[0].failures
    assert failure.reason.startswith("line one; xxx")
    assert len(failure.reason) == LONGEST


@pytest.mark.parametrize("reason", ["", "  \n "])
def test_an_error_without_words_is_named_by_its_code(reason: str) -> None:
    assert plain(_named(flower_error(reason, code=7)).history[0].failures) == [
        {"client": 2, "reason": "error code 7"}
    ]


def test_of_a_traceback_the_last_line_is_shown() -> None:
    text = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: the reason\n'
    assert plain(_named(flower_error(text)).history[0].failures) == [
        {"client": 2, "reason": "ValueError: the reason"}
    ]


def _named(fault: Callable[[Message, Answer], Message]) -> MethodStrategy:
    asked = Message(RecordDict(), dst_node_id=100, message_type="train")
    return poisoned_round("mean", fault(asked, lambda: asked))


# Failures of real clients -----------------------------------------------------------------------------------


def test_failing_clients_are_named_and_the_others_unharmed(tmp_path: Path) -> None:
    """In round 2 client 4 raises after its training, client 2's file is damaged, client 3 never answers.

    What the server and the others have after round 3 has the same bits as in a run in which these clients were
    simply not reached in the same rounds.
    """
    rounds: dict[str, Any] = {"num_server_rounds": 3, "min_replies": 2}
    faulty = federation(tmp_path / "a", **rounds)
    directory = tmp_path / "a" / "run" / "clients" / faulty.strategy.experiment
    file = directory / "client-00002.safetensors"
    half: list[bytes] = []

    def damaged(message: Message, answer: Answer) -> Message:
        half.append(file.read_bytes()[: file.stat().st_size // 2])
        file.write_bytes(half[0])
        return answer()

    faulty.grid.faults = {(4, 2): raises, (2, 2): damaged, (3, 2): silent}
    faulty.run()
    quiet = {(4, 2): silent, (2, 2): silent, (2, 3): silent, (3, 2): silent}
    reference = federation(tmp_path / "b", faults=quiet, **rounds).run()

    second, third = faulty.strategy.history[1:]
    reasons = {failure.client: failure.reason for failure in second.failures}
    assert set(reasons) == {2, 3, 4}
    assert reasons[4].startswith("ZeroDivisionError: boom in the middle of the round (")
    assert "client-00002.safetensors cannot be read" in reasons[2]
    assert "move it away to start afresh" in reasons[2]
    assert reasons[3].startswith("no answer within ")
    assert second.trained == [0, 1]
    assert third.trained == [0, 1, 3, 4]
    assert [failure.client for failure in third.failures] == [2]
    assert same_tensors(faulty.strategy.state.to_tensors(), reference.strategy.state.to_tensors())
    for line, expected in zip(faulty.strategy.history, reference.strategy.history, strict=True):
        assert line.accuracy == expected.accuracy
        assert line.client_metrics == expected.client_metrics
    assert file.read_bytes() == half[0], "a damaged file is not overwritten"


def test_flowers_own_errors_come_from_another_node_and_are_still_ascribed(tmp_path: Path) -> None:
    found = federation(
        tmp_path, faults={(4, 1): flower_error("no such node")}, num_server_rounds=1, order=1
    ).run()
    assert plain(found.strategy.history[0].failures) == [{"client": 4, "reason": "no such node"}]
    assert found.strategy.history[0].trained == [0, 1, 2, 3]


def test_too_few_replies_end_the_run_with_the_reasons(tmp_path: Path) -> None:
    faults = {(0, 2): raises, (1, 2): flower_error("the node was switched off")}
    found = federation(tmp_path, faults=faults, min_replies=4, on_disk=True)
    with pytest.raises(RunEnded) as error:
        found.run()
    text = str(error.value)
    assert text.startswith("round 2: 3 valid replies, min-replies is 4: client 0: ZeroDivisionError: boom")
    assert "client 1: the node was switched off" in text
    assert "\n" not in text
    assert [line.round for line in found.directory.round_records()] == [1]


def test_more_replies_than_clients_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="min-replies = 6: must be at most 5, the clients that train"):
        federation(tmp_path, min_replies=6).run()
    with pytest.raises(PbflError, match=r"must be at most 2, .* \(fraction-train = 0.5 of 5\)"):
        federation(tmp_path, min_replies=3, fraction_train=0.5).run()


def test_a_dead_worker_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    died = flower_error(
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
    )
    broken = federation(tmp_path / "a", faults={(3, 2): died}, on_disk=True)
    with pytest.raises(RunEnded, match=r"round 2: a simulation worker died \(client 3\).*up to 1 are kept"):
        broken.run()
    resumed = federation(tmp_path / "a", on_disk=True, resume=True).run()
    whole = federation(tmp_path / "b").run()
    assert resumed.strategy.done == 2
    assert resumed.fingerprint == whole.fingerprint


def test_a_device_that_says_its_worker_died_ends_nobodys_run(tmp_path: Path) -> None:
    died = flower_error(
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
    )
    nodes = [{"client-id": client} for client in range(5)]
    found = federation(tmp_path, faults={(3, 1): died}, node_configs=nodes).run()
    assert found.strategy.done == 2
    assert [failure.client for failure in found.strategy.history[0].failures] == [3]


def test_what_a_device_says_steers_no_terminal() -> None:
    found = _named(flower_error("\x1b[2J\x1b]0;title\x07 gone\r\x9b1A", code=2))
    assert found.history[0].failures[0].reason == "]0;title gone; 1A"


# Before round 1 ---------------------------------------------------------------------------------------------


def test_two_nodes_with_one_client_id_are_named(tmp_path: Path) -> None:
    found = federation(tmp_path, partitions=[0, 1, 1, 3, 4], nodes=[11, 12, 13, 14, 15])
    with pytest.raises(PbflError, match="client-id 1 is used by two nodes, 12 and 13"):
        found.run()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num-classes": 5}, "num classes K: client 0 has 4, 2 has 5"),
        ({"feature-dim": 7}, "feature-dim d: client 0 has 6, 2 has 7"),
        ({"input-shape": [3, 8, 8]}, "input shape: client 0 has (1, 16, 16), 2 has (3, 8, 8)"),
        ({"labels": ["0", "1", "3", "2"]}, "label names: client 0 has ('0', '1', '2', '3'), 2 has"),
    ],
)
def test_a_disagreement_names_both_sides(change: dict[str, Any], text: str) -> None:
    said = [{**handshake_reply(client, TASK), **(change if client == 2 else {})} for client in range(3)]
    with pytest.raises(PbflError) as error:
        checked_roster(client_from_reply(node, ConfigRecord(record)) for node, record in enumerate(said))
    assert f"clients disagree on {text}" in str(error.value)


def test_clients_that_cannot_start_are_counted_by_reason_before_training(tmp_path: Path) -> None:
    def some_data(settings: Any, client: int) -> Any:
        if client in (1, 3):
            raise PbflError("the data is not there; it belongs at /data/x")
        return tiny_client(client)

    found = federation(tmp_path, data=some_data)
    with pytest.raises(
        PbflError, match=r"^2 of 5 clients: the data is not there; it belongs at /data/x \(on node "
    ) as error:
        found.run()
    assert str(error.value).endswith(f"(on node {found.grid.nodes[1]}, {found.grid.nodes[3]})")
    assert {kind for _, _, kind in found.grid.asked} == {"query"}


def emptied(content: RecordDict) -> None:
    content.clear()


def with_formula(content: RecordDict) -> None:
    """Its network's name stands in tables, which a spreadsheet may open."""
    content.config_records[wire.CONFIG]["architecture"] = "=HYPERLINK(1)"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (silent, "1 of 5 clients: no answer within 1 s (on node "),
        (altered(emptied), "its handshake reply is empty"),
        (
            altered(lambda content: wire.content(config=ConfigRecord({"client": 1}))),
            "its handshake reply lacks 'input-shape'",
        ),
        (altered(with_formula), "architecture '=HYPERLINK(1)' is not a network name"),
        (flower_error(""), "error code 8"),
    ],
)
def test_a_hello_that_goes_wrong_is_one_line(tmp_path: Path, fault: Fault, text: str) -> None:
    with pytest.raises(PbflError) as error:
        federation(tmp_path, faults={(1, 0): fault}, round_timeout=1.0).run()
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_too_few_nodes_say_how_many_are_wanted(tmp_path: Path) -> None:
    with pytest.raises(PbflError, match=r"num-clients = 5, but only 3 nodes joined within 0 s"):
        federation(tmp_path, partitions=[0, 1, 2], join_timeout=0.2).run()


def test_an_experiment_that_is_no_name_of_a_directory_is_refused(tmp_path: Path) -> None:
    found = federation(tmp_path)
    found.strategy.experiment = "../../elsewhere"
    with pytest.raises(PbflError, match=r"experiment = '\.\./\.\./elsewhere': must be letters"):
        found.run()


# The same question twice ------------------------------------------------------------------------------------


def test_the_same_round_is_answered_again_without_training_again(tmp_path: Path) -> None:
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


def test_an_older_round_than_the_clients_own_is_refused(tmp_path: Path) -> None:
    def backwards(message: Message, answer: Answer) -> Message:
        answer()
        message.content[wire.CONFIG] = ConfigRecord(
            {**message.content.config_records[wire.CONFIG], "round": 1}
        )
        return answer()

    found = federation(tmp_path, faults={(0, 2): backwards}).run()
    (failure,) = found.strategy.history[1].failures
    assert plain(failure) == {"client": 0, "reason": "asked for round 1, but its state is already of round 2"}


# Resuming ---------------------------------------------------------------------------------------------------


def lines(run: Federation) -> list[dict[str, Any]]:
    """Return the history on disk without what a clock or the memory says."""
    records = run.directory.round_records()
    return [record.model_dump(exclude={"seconds", "peak_mb"}) for record in records]


@pytest.mark.parametrize("method", ["fedproto", "fedtgp"])
def test_resumed_is_uninterrupted(tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"momentum": 0.5, "optimizer_state": "kept"}
    if method == "fedtgp":
        keys["fedtgp.server-momentum"] = 0.5
    whole = federation(tmp_path / "a", method, on_disk=True, num_server_rounds=4, **keys).run()
    federation(tmp_path / "b", method, on_disk=True, num_server_rounds=2, **keys).run()
    second = federation(tmp_path / "b", method, on_disk=True, num_server_rounds=4, resume=True, **keys).run()
    assert same_tensors(second.strategy.state.to_tensors(), whole.strategy.state.to_tensors())
    assert lines(second) == lines(whole)
    assert second.strategy.history == second.directory.round_records()


@pytest.fixture
def two_rounds(tmp_path: Path) -> Federation:
    return federation(tmp_path, "local", on_disk=True).run()


def again(tmp_path: Path, **keys: Any) -> Federation:
    return federation(tmp_path, "local", on_disk=True, resume=True, **keys)


def test_history_ahead_of_the_checkpoint_is_cut_back(tmp_path: Path, two_rounds: Federation) -> None:
    run = tmp_path / "run"
    before = lines(two_rounds)
    for name in ("rounds.jsonl", "clients.jsonl"):
        last = json.loads((run / name).read_text().splitlines()[-1])
        with (run / name).open("a") as file:
            file.write(json.dumps({**last, "round": 3}) + '\n{"round": 4, "accu')
    resumed = again(tmp_path, num_server_rounds=2).run()
    assert lines(resumed) == before
    text = (run / "clients.jsonl").read_text()
    assert [json.loads(line)["round"] for line in text.splitlines()] == [1, 2]


def test_a_run_does_not_go_back(tmp_path: Path, two_rounds: Federation) -> None:
    with pytest.raises(PbflError, match="num-server-rounds = 1: the run has 2 rounds already"):
        again(tmp_path, num_server_rounds=1).run()
    assert len(lines(two_rounds)) == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["configuration"]["num-server-rounds"] == 2


def test_another_configuration_is_not_resumed(tmp_path: Path, two_rounds: Federation) -> None:
    with pytest.raises(PbflError, match="was made with another configuration"):
        again(tmp_path, learning_rate=0.5).run()
    # Nor is it when clients have trained but no round was finished.
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    with pytest.raises(PbflError, match="was made with another configuration"):
        again(tmp_path, learning_rate=0.5).run()


def test_a_lost_or_damaged_checkpoint_is_said_and_nothing_is_cut(
    tmp_path: Path, two_rounds: Federation
) -> None:
    file = tmp_path / "run" / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DamagedState, match=r"checkpoint\.safetensors"):
        again(tmp_path).run()
    file.unlink()
    with pytest.raises(DamagedState, match="is missing, but the history holds 2 rounds"):
        again(tmp_path).run()
    assert len(lines(two_rounds)) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.json", '{"experiment": '), ("run.json", "{}"), ("run.json", "[1]"), ("rounds.jsonl", "{x\n")],
)
def test_damaged_records_are_named(tmp_path: Path, two_rounds: Federation, name: str, text: str) -> None:
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(PbflError, match=name) as error:
        again(tmp_path).run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("report", ["full", "none"])
def test_a_client_that_lost_its_state_is_named_once(tmp_path: Path, report: str) -> None:
    found = federation(tmp_path, on_disk=True, client_report=report, num_server_rounds=1).run()
    (one,) = (tmp_path / "run" / "clients").glob("*/client-00001.safetensors")
    one.unlink()
    found = federation(tmp_path, on_disk=True, client_report=report, num_server_rounds=3, resume=True).run()
    notes = [[note for note in line.warnings if "lost" in note] for line in found.strategy.history]
    assert notes == [[], ["client 1 lost its state and starts from scratch"], []]


def test_fedkd_goes_on_where_every_client_lost_its_state(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"num_server_rounds": 4, "fedkd.schedule-rounds": 4}
    whole = federation(tmp_path / "a", "fedkd", on_disk=True, **keys).run()
    two = {**keys, "num_server_rounds": 2}
    for name in ("b", "c"):
        federation(tmp_path / name, "fedkd", on_disk=True, **two).run()
    second = federation(tmp_path / "b", "fedkd", on_disk=True, resume=True, **keys).run()
    assert same_tensors(second.strategy.state.to_tensors(), whole.strategy.state.to_tensors())
    shutil.rmtree(tmp_path / "c" / "run" / "clients")
    third = federation(tmp_path / "c", "fedkd", on_disk=True, resume=True, **keys).run()
    assert [line.failures for line in third.strategy.history] == [[]] * 4


def test_who_is_only_scored_is_found_to_have_lost_its_state_too(tmp_path: Path) -> None:
    found = federation(tmp_path, on_disk=True, num_server_rounds=1).run()
    shutil.rmtree(tmp_path / "run" / "clients")
    keys: dict[str, Any] = {"num_server_rounds": 3, "resume": True}
    found = federation(tmp_path, on_disk=True, **keys)
    roster = patch.object(Roster, "sample", lambda self, *_: [0, 1])
    with roster:
        found.run()
    notes = [[note for note in line.warnings if "lost" in note] for line in found.strategy.history]
    assert notes == [[], ["client 0, 1, 2, 3, 4 lost its state and starts from scratch"], []]


def test_the_clients_state_stays_where_it_is(tmp_path: Path, two_rounds: Federation) -> None:
    with pytest.raises(PbflError, match=r"state-dir = '/elsewhere': run-dir = .* was made with ''"):
        again(tmp_path, state_dir="/elsewhere", num_server_rounds=3).run()


def test_a_directory_with_a_run_is_not_used_again(tmp_path: Path, two_rounds: Federation) -> None:
    with pytest.raises(PbflError, match="already holds a run"):
        federation(tmp_path, "local", on_disk=True).run()
    with pytest.raises(PbflError, match=r"is not a run directory: it has no run.json"):
        again(tmp_path / "elsewhere").run()


def test_a_refused_run_leaves_no_mark_on_the_one_that_is_there(
    tmp_path: Path, two_rounds: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "HANDOVER_SECONDS", 0.1)
    told = tmp_path / "run" / ERROR

    def refused(run: Federation) -> None:
        with pytest.raises(RunRefused):
            run.run()
        assert not told.exists()

    refused(federation(tmp_path, "local", on_disk=True))
    refused(
        federation(tmp_path, "local", on_disk=True, partitions=[0, 1, 1, 3, 4])
    )  # before anybody is asked
    refused(again(tmp_path, learning_rate=0.5))
    refused(again(tmp_path, state_dir="/elsewhere"))
    refused(again(tmp_path, num_server_rounds=1))
    told.write_text("why it stopped\n")
    with two_rounds.directory.locked(), pytest.raises(RunRefused, match="is being written by another run"):
        again(tmp_path).run()
    assert told.read_text() == "why it stopped\n"
    again(tmp_path, num_server_rounds=3).run()
    assert not told.exists()


def test_why_a_run_ended_is_written_down_whenever_it_did(tmp_path: Path) -> None:
    told = tmp_path / "run" / ERROR
    with pytest.raises(PbflError, match="is used by two nodes"):
        federation(tmp_path, on_disk=True, partitions=[0, 1, 1, 3, 4]).run()
    assert "client-id 1 is used by two nodes" in told.read_text()
    broken = {(client, 1): silent for client in range(5)}
    with pytest.raises(RunEnded):
        federation(tmp_path, on_disk=True, faults=broken).run()
    assert told.read_text().startswith("round 1: 0 valid replies")
    with pytest.raises(PbflError, match="is used by two nodes"):
        federation(tmp_path, on_disk=True, resume=True, partitions=[0, 1, 1, 3, 4], join_timeout=1.0).run()
    assert "client-id 1 is used by two nodes" in told.read_text()
    federation(tmp_path, on_disk=True, resume=True).run()
    assert not told.exists()


# Sampling, evaluation, files --------------------------------------------------------------------------------


def kinds(found: Federation, server_round: int) -> dict[int, str]:
    return {client: kind for client, number, kind in found.grid.asked if number == server_round}


def test_a_fraction_trains_and_the_others_are_scored(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fraction_train": 0.4, "num_server_rounds": 4}
    one = federation(tmp_path / "a", "local", **keys).run()
    # Other node ids in another order, replies in another order: the same clients, the same bits.
    other = federation(
        tmp_path / "b", "local", nodes=[900, 5, 77, 31, 8], order=3, partitions=[3, 1, 4, 0, 2], **keys
    ).run()
    trained = []
    for line, twin in zip(one.strategy.history, other.strategy.history, strict=True):
        asked = kinds(one, line.round)
        assert sorted(asked.values()) == ["evaluate"] * 3 + ["train"] * 2
        assert line.trained == sorted(c for c, kind in asked.items() if kind == "train") == twin.trained
        assert line.accuracy["head"].clients == NUM_CLIENTS
        trained.append(tuple(line.trained))
    assert len(set(trained)) > 1
    assert one.fingerprint == other.fingerprint
    reseeded = federation(tmp_path / "c", "local", seed=1, **keys).run()
    assert [tuple(line.trained) for line in reseeded.strategy.history] != trained


def test_no_one_else_is_scored_when_the_fraction_is_zero(tmp_path: Path) -> None:
    found = federation(
        tmp_path, "local", fraction_train=0.4, fraction_evaluate=0.0, num_server_rounds=1
    ).run()
    assert sorted(kinds(found, 1).values()) == ["train", "train"]


def test_who_is_only_scored_is_drawn_anew_in_every_round(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fraction_train": 0.4, "fraction_evaluate": 0.34, "num_server_rounds": 6}
    drawn = []
    for name in ("a", "b"):
        found = federation(tmp_path / name, "local", **keys).run()
        drawn.append([{c for c, kind in kinds(found, n).items() if kind == "evaluate"} for n in range(1, 7)])
    assert {len(scored) for scored in drawn[0]} == {1}  # 0.34 of the three others
    assert len(set().union(*drawn[0])) > 2
    assert drawn[0] == drawn[1]


def test_scoring_before_training_ends_with_a_last_scoring(tmp_path: Path) -> None:
    found = federation(tmp_path, "fedproto", evaluate_moment="before", on_disk=True).run()
    after = federation(tmp_path / "after", "fedproto").run()
    history = found.strategy.history
    assert [line.accuracy_of_round for line in history] == [0, 1]
    assert history[0].final is None
    final = history[1].final
    assert final is not None
    assert final.failures == []
    assert final.accuracy["head"].clients == NUM_CLIENTS
    # Before round 1 nobody has a prototype, so only the head can be asked.
    assert set(history[0].accuracy) == {"head"}
    # The head's scores before round 2 are those after round 1, as are those of the end.
    head = [line.accuracy["head"] for line in after.strategy.history]
    assert [history[1].accuracy["head"], final.accuracy["head"]] == head
    assert [kind for _, number, kind in found.grid.asked if number == 2] == ["train"] * 5 + ["evaluate"] * 5
    assert lines(found)[1]["final"] == final.model_dump()


@pytest.mark.parametrize("fails", [False, True])
def test_whom_the_server_waits_for_stands_beside_the_run_only_meanwhile(tmp_path: Path, fails: bool) -> None:
    found = federation(tmp_path / "a", "fedproto", on_disk=True, num_clients=3, num_server_rounds=2)
    found.directory.path.mkdir(parents=True)
    found.directory.set_waiting("what a killed server has left")
    before: dict[str, str] = {}
    exchange = found.grid.send_and_receive

    def watched(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked = list(messages)
        group = asked[0].metadata.group_id
        before[group] = found.directory.waiting()
        found.strategy._set_waiting(f"{group}: waiting")  # as a grid of Flower's would have it
        assert found.directory.waiting() == f"{group}: waiting"
        if fails and group == "2":
            raise RunEnded("there is an end to waiting")
        return exchange(asked, timeout=timeout)

    with (
        patch.object(found.grid, "send_and_receive", watched),
        pytest.raises(RunEnded) if fails else nullcontext(),
    ):
        found.run()
    assert before == {"handshake": "", "1": "", "2": ""}
    assert found.directory.waiting() == ""


def test_the_partition_is_written_where_the_server_can_deal_it(tmp_path: Path) -> None:
    found = federation(
        tmp_path / "a", "fedproto", on_disk=True, num_clients=3, num_server_rounds=1, min_samples=4
    )
    found.grid = InProcessGrid(make_client_app(), found.config, 3)
    found.run()
    written = found.directory.partition().counts
    assert written is not None
    assert written == check_data(found.strategy.settings.data, 3).counts.tolist()
    assert sum(sum(counts) for counts in written) == 1797
    # FedProto's paper: client i sends K_i rows and gets K, of d numbers each.
    rows = sum(sum(count > 0 for count in counts) + 10 for counts in written)
    assert found.directory.partition().paper_scalars == rows * found.strategy.settings.models.feature_dim
    right = tested = 0
    for number in range(3):
        data = client_data(found.strategy.settings.data, 3, number)
        right += int((data.test.labels == data.train.labels.mode().values).sum())
        tested += len(data.test)
    assert found.directory.partition().majority == pytest.approx(right / tested)
    # An app's own data is not the configured partition, and nothing is claimed about it.
    own = federation(tmp_path / "b", "local", on_disk=True, num_server_rounds=1).run()
    assert own.directory.partition().counts is None
    assert own.directory.partition().majority is None
    assert own.directory.partition().paper_scalars is None


def test_a_run_does_not_go_on_with_other_samples(tmp_path: Path) -> None:
    def run(**keys: Any) -> Federation:
        own: dict[str, Any] = {"num_clients": 2, "models": "cnn2", "max_samples": 60, "partition": "iid"}
        return federation(tmp_path, on_disk=True, data=None, **own, **keys)

    file = run(num_server_rounds=1).run().directory.path / "partition.json"
    said = file.read_text()
    assert json.loads(said)["data"] == load_pool(DataSettings(dataset="digits", max_samples=60)).fingerprint()
    file.write_text(said.replace(json.loads(said)["data"], "0123456789abcdef"))
    with pytest.raises(RunRefused, match="the samples of dataset = 'digits' are not those"):
        run(resume=True).run()
    file.write_text(said)
    assert run(resume=True).run().strategy.done == 2


def test_a_run_that_was_killed_while_it_began_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.json is the seal: what stands there without it is no run, and what stands beside it is complete."""
    keys: dict[str, Any] = {"num_clients": 2, "models": "cnn2", "max_samples": 60, "num_server_rounds": 1}
    written: list[str] = []
    original = RunDirectory._write

    def killed(self: RunDirectory, name: str, content: Any) -> None:
        original(self, name, content)
        written.append(name)
        if written == ["partition.json"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, on_disk=True, data=None, **keys).run()
    found = federation(tmp_path, on_disk=True, data=None, **keys).run()
    assert written[:3] == ["partition.json", "partition.json", "run.json"]
    assert found.directory.partition().majority is not None


def test_what_nobody_foresaw_is_written_down_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*given: Any) -> None:
        raise ValueError("an own aggregate\nthat fails")

    found = federation(tmp_path, "local", on_disk=True)
    monkeypatch.setattr(found.strategy, "aggregate_fit", breaks)
    with pytest.raises(ValueError, match="an own aggregate"):
        found.run()
    said = (found.directory.path / "error.txt").read_text()
    assert said.startswith("ValueError: an own aggregate that fails (test_strategy.py:")
    assert federation(tmp_path, "local", on_disk=True, resume=True).run().strategy.done == 2
    assert not (found.directory.path / "error.txt").exists()


def test_the_run_directory_is_readable_by_others(tmp_path: Path, two_rounds: Federation) -> None:
    run = tmp_path / "run"

    def strict(text: str) -> Any:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    about = strict((run / "run.json").read_text())
    assert about["configuration"]["method"] == "local"
    assert [member["client"] for member in about["clients"]] == [0, 1, 2, 3, 4]
    for name in ("rounds.jsonl", "clients.jsonl"):
        assert [strict(line)["round"] for line in (run / name).read_text().splitlines()] == [1, 2]
    assert len(list((run / "clients" / about["experiment"]).glob("client-*.safetensors"))) == NUM_CLIENTS
    assert not list(run.rglob("*.tmp"))


# What is sent -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Personal(Method[Prototypes, Prototypes, Prototypes]):
    """Every client gets a table of its own, made when it is sent."""

    name: str = "personal"
    state = Prototypes
    down = Prototypes
    up = Prototypes

    def init(self, task: Task, seed: int) -> Prototypes:
        return prototypes(0, [0, 1, 2, 3])

    def broadcast(self, state: Prototypes, client: int) -> Prototypes:
        return replace(state, values=state.values + client)

    def local_update(self, client: Any, down: Prototypes) -> Update[Prototypes]:
        return Update(down)

    def aggregate(
        self, state: Prototypes, uploads: Mapping[int, Prototypes], round_info: Round
    ) -> Prototypes:
        return state


def test_every_client_gets_what_is_meant_for_it() -> None:
    settings = parse({"num-clients": 40, "feature-dim": 6}, SECTIONS)
    strategy = MethodStrategy(settings, method=Personal())
    grid = InProcessGrid(scripted(TASK, lambda client, server_round: RecordDict()), {}, 40)
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    assert len(messages) == 40
    for message in messages:
        client = message.metadata.dst_node_id - 100
        found = wire.decode(message.content.array_records["p"], Prototypes, TASK)
        assert torch.equal(found.values, strategy.state.values + client)


def test_it_is_a_flower_strategy_and_its_bytes_are_counted(tmp_path: Path) -> None:
    found = federation(tmp_path, num_server_rounds=1)
    assert isinstance(found.strategy, Strategy)
    seen: list[tuple[str, int]] = []

    def weighing(sent: Sequence[Message], replies: Sequence[Message]) -> None:
        if sent[0].metadata.message_type == "train":
            seen.extend(("down", len(m.content.array_records["p"]["s"].data)) for m in sent)
            seen.extend(("up", len(m.content.array_records["p"]["s"].data)) for m in replies)

    found.grid.watchers.append(weighing)
    found.run()
    line = found.strategy.history[0]
    for way in ("up", "down"):
        size = getattr(line, f"bytes_{way}")
        assert size.payload == sum(bytes_ for name, bytes_ in seen if name == way)
        assert size.payload < size.application < size.total
    held = [
        3,
        0,
        4,
        1,
        4,
    ]  # classes of the five clients' training samples; client 1 has one sample, held back
    assert plain(line.scalars) == {"up": sum(held) * 64, "down": 0}


def test_lost_replies_do_not_lose_the_clients_work(tmp_path: Path) -> None:
    found = federation(tmp_path, faults={(0, 1): lost}).run()
    assert found.strategy.history[0].trained == [1, 2, 3, 4]
    assert found.strategy.history[1].trained == [0, 1, 2, 3, 4]
    assert found.strategy._participations == dict.fromkeys(range(5), 2)


def test_an_upload_through_the_clientapp_is_replaced_and_rejected(tmp_path: Path) -> None:
    fault = upload({"labels": LABELS, "rows": torch.full((2, 64), float("nan"))})
    poisoned = federation(tmp_path / "a", faults={(4, 1): fault, (4, 2): silent}).run()
    without = federation(tmp_path / "b", faults={(4, 1): silent, (4, 2): silent}).run()
    assert plain(poisoned.strategy.history[0].failures) == [
        {"client": 4, "reason": "upload rejected: 'rows' holds NaN or infinity"}
    ]
    assert same_tensors(poisoned.strategy.state.to_tensors(), without.strategy.state.to_tensors())


def test_a_fault_of_the_methods_own_check_costs_one_upload_only() -> None:
    """Whatever validation raises on what one client sent, the round goes on with the others."""
    validate = Pipeline.validate

    def faulty(self: Pipeline, upload: Prototypes, state: Any, task: Task) -> None:
        validate(self, upload, state, task)
        if bool(upload.present[0]):
            raise KeyError("no such\nthing")

    with patch.object(Pipeline, "validate", faulty):
        strategy = poisoned_round("mean", reply_of(prototypes(2, [1])))
    (failure,) = strategy.history[0].failures
    assert failure.client == 0
    assert failure.reason.startswith("upload rejected: KeyError: 'no such\\nthing' (test_strategy.py:")
    assert strategy.history[0].trained == [1, 2, 3]


def test_a_strategy_that_cannot_be_made_says_why_in_an_empty_directory_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys: dict[str, Scalar] = {"method": "fedavg", "secure-aggregation": True, "run-dir": str(run)}
    context = Context(1, 1, {}, RecordDict(), dict(keys))
    grid = InProcessGrid(make_client_app(), keys)
    with pytest.raises(PbflError, match="sends Weights, which"):
        server_app.main(grid, context)
    assert "sends Weights, which" in (run / ERROR).read_text()
    with pytest.raises(
        PbflError, match=r"it has no run.json; a run that was started there failed: .* sends Weights"
    ):
        RunDirectory(run).record()
    (run / ERROR).unlink()
    (run / "run.json").write_text("{}")
    with pytest.raises(PbflError, match="sends Weights, which"):
        server_app.main(grid, context)
    assert not (run / ERROR).exists()


def test_a_configuration_that_is_refused_is_written_down_where_the_run_was_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    for place, refused in (
        (str(run), "aggregation = 'average': must be "),
        ("run-2", "run-dir = 'run-2': must be an absolute path"),
    ):
        keys: dict[str, Scalar] = {"aggregation": "average", "run-dir": place}
        with pytest.raises(PbflError, match=refused):
            server_app.main(InProcessGrid(make_client_app(), keys), Context(1, 1, {}, RecordDict(), {**keys}))
    assert (run / ERROR).read_text().startswith("aggregation = 'average': must be 'auto', ")
    assert not (tmp_path / "run-2").exists()


def test_a_client_that_diverges_says_what_helps(tmp_path: Path) -> None:
    line = federation(tmp_path, learning_rate=1e30).run().strategy.history[0]
    reason = {failure.client: failure.reason for failure in line.failures}[0]
    assert re.fullmatch(r"loss term 'ce' is not finite after \d+ steps; lower learning-rate, .*", reason)


def test_a_precision_that_a_network_cannot_have_is_refused_before_round_1(tmp_path: Path) -> None:
    run = federation(tmp_path, models="tests.methods.tiny_nets:Plain", precision="bfloat16", num_clients=2)
    with pytest.raises(
        PbflError, match=r"2 of 2 clients: precision = 'bfloat16': Plain is not a .*SplitModel"
    ):
        run.run()
    assert run.strategy.history == []
    whole = federation(tmp_path / "float32", models="tests.methods.tiny_nets:Plain", num_clients=2).run()
    assert [line.failures for line in whole.strategy.history] == [[], []]


def test_a_strategy_that_has_made_its_rounds_says_so_and_makes_more_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = federation(tmp_path, num_server_rounds=1).run()
    assert "nothing to do" not in caplog.text
    run.strategy.start(run.grid)
    assert "nothing to do: 1 of 1 rounds are finished" in caplog.text
    run.strategy.start(run.grid, num_rounds=2)
    assert [line.round for line in run.strategy.history] == [1, 2]


def test_flowers_own_loop_over_the_hooks_gives_the_same_bits(tmp_path: Path) -> None:
    ours = federation(tmp_path / "ours", on_disk=True).run()
    hooks = federation(tmp_path / "hooks", on_disk=True)
    Strategy.start(hooks.strategy, hooks.grid, ArrayRecord(), num_rounds=2)
    assert hooks.fingerprint == ours.fingerprint
    assert hooks.directory.round_records() == hooks.strategy.history


def test_the_hooks_refuse_secure_aggregation(tmp_path: Path) -> None:
    fed = federation(tmp_path, secure_aggregation=True)
    with pytest.raises(PbflError, match=r"must be started by MethodStrategy\.start"):
        fed.strategy.configure_train(1, ArrayRecord(), ConfigRecord(), fed.grid)
