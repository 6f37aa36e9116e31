"""Secure aggregation in process: Flower's own workflow and mod, our messages, tables that nobody sees."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.secagg.messages import REPORT
from pbfl_flwr.flower.server.stopping import RunEnded
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes import secure_sums as sums
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.prototypes.stages import RULES
from pbfl_flwr.task import Task
from tests.flower.inprocess import NUM_CLIENTS, Federation, altered, federation, injected, lost, plain, raises

TASK = Task(num_classes=10, feature_dim=64, input_shape=(1, 16, 16))


SETTINGS: dict[str, dict[str, Scalar]] = {
    "mean": {"aggregation": "mean"},
    "mean, aligned": {"method": "protonorm"},
    "mean, falsified": {"aggregation": "mean", "attack.kind": "sign-flip", "attack.share": 0.4},
    "mean, by class": {"aggregation": "mean", "per_class": True},
    "ppa, known": {"aggregation": "ppa", "total_examples": 90},
    "aps-sum, sparse": {"method": "tinyproto", "cps_dim": 16},
    "aps-mean": {"aggregation": "aps-mean"},
}


def both(tmp_path: Path, **keys: Any) -> tuple[Federation, Federation]:
    method = str(keys.pop("method", "fedproto"))
    plain = federation(tmp_path / "plain", method, **keys, num_server_rounds=1)
    secure = federation(tmp_path / "secure", method, **keys, num_server_rounds=1, secure_aggregation=True)
    return plain.run(), secure.run()


@pytest.mark.parametrize("name", SETTINGS)
def test_sum_is_right_within_quantisation(tmp_path: Path, name: str) -> None:
    plain, secure = both(tmp_path, **SETTINGS[name])
    expected, result = plain.strategy.state.combined, secure.strategy.state.combined
    assert torch.equal(result.present, expected.present)
    of_n = 1.0
    if result.num_examples and expected.num_examples:
        of_n = expected.num_examples / result.num_examples  # of aps-mean n is a mean, rounded, times M
    assert name == "aps-mean" or result.num_examples == expected.num_examples
    assert isinstance(secure.strategy.method, Pipeline)
    bound = RULES[secure.strategy.method.stages.aggregation].secure_range
    # Five clients, each wrong by less than one step; PPA multiplies the sum by K/n.
    factor = 10 / 90 if name.startswith("ppa") else 1.0
    error = float((of_n * result.values - expected.values).abs().max())
    assert error <= 5 * sums.step(bound, 5) * factor * 1.5 + 1e-5
    assert float(expected.values.abs().max()) > 0.01
    line, other = secure.strategy.history[0], plain.strategy.history[0]
    assert line.failures == []
    assert line.trained == list(range(NUM_CLIENTS))
    assert line.accuracy == other.accuracy
    assert (line.accuracy["head"].macro_f1 is None) != ("per_class" in SETTINGS[name])
    assert line.client_metrics["loss.ce"] == pytest.approx(other.client_metrics["loss.ce"])


def replies_to(run: Federation) -> dict[int, list[Message]]:
    """Run it, and return every reply that the server receives, by client."""
    replies: dict[int, list[Message]] = {}

    def watch(asked: Sequence[Message], answers: Sequence[Message]) -> None:
        nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in asked}
        for reply in answers:
            client = run.grid.nodes.index(nodes[reply.metadata.reply_to_message_id])
            replies.setdefault(client, []).append(reply)

    run.grid.watchers.append(watch)
    run.run()
    return replies


def test_server_never_receives_prototypes_of_one_client(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"aggregation": "ppa", "num_server_rounds": 1}
    in_clear = replies_to(federation(tmp_path / "plain", **keys))
    seen = replies_to(federation(tmp_path / "secure", **keys, secure_aggregation=True))
    for client in range(NUM_CLIENTS):
        (upload,) = [m for m in in_clear[client] if wire.PAYLOAD in m.content.array_records]
        table = wire.decode(upload.content.array_records[wire.PAYLOAD], Prototypes, TASK)
        vector, _ = sums.to_vector(table, RULES["ppa"].secure_range)
        _, *stages = seen[client]
        assert len(stages) == 4
        # Nothing but the masked vector is long enough to hold a row.
        assert all(not record for m in stages for record in m.content.array_records.values())
        records: list[Any] = [m.content.config_records[RECORD_KEY_CONFIGS] for m in stages]
        (masked,) = [
            bytes_to_ndarray(record[Key.MASKED_PARAMETERS][1])
            for record in records
            if Key.MASKED_PARAMETERS in record
        ]
        assert masked.shape == vector.shape
        # Uniform over 0..2^32, whatever the table holds: its many zeros do not show, and nothing correlates.
        assert len(np.unique(masked)) > 0.99 * len(masked)
        assert abs(masked.mean() / 2**32 - 0.5) < 0.1
        assert abs(np.corrcoef(masked, vector)[0, 1]) < 0.2
        others = sum(len(record.deflate()) for record in records) - masked.nbytes
        assert others < 8 * 3000


def test_reports_and_bytes_are_recorded(tmp_path: Path) -> None:
    run = federation(
        tmp_path, secure_aggregation=True, fraction_train=0.8, min_class_count=4, on_disk=True
    ).run()
    line = run.strategy.history[-1]
    assert len(line.trained) == 4
    assert line.accuracy["head"].clients == NUM_CLIENTS  # one of them only scored
    assert any("held back" in note for note in line.warnings)
    columns = run.directory.client_records()[-1]
    up = [size.payload for size in columns.bytes_up]
    assert sorted(up)[0] == 0
    assert sorted(up)[1] >= 8 * (10 * 64 + 10 + 1)
    assert all(size.total > size.application > size.payload for size in columns.bytes_up)


def test_dropout_affects_its_own_upload_only(tmp_path: Path) -> None:
    """Client 2 raises while it trains; the others give its shares back, and the sum is theirs."""
    keys: dict[str, Any] = {"secure_aggregation": True, "aggregation": "ppa", "num_server_rounds": 1}
    run = federation(tmp_path / "a", **keys, faults={(2, 1): raises}).run()
    plain = federation(tmp_path / "b", aggregation="ppa", num_server_rounds=1, faults={(2, 1): raises}).run()
    (failure,) = run.strategy.history[0].failures
    assert failure.client == 2
    assert "boom" in failure.reason
    torch.testing.assert_close(
        run.strategy.state.combined.values, plain.strategy.state.combined.values, atol=2e-3, rtol=1e-3
    )
    assert run.strategy.state.combined.num_examples == plain.strategy.state.combined.num_examples


@pytest.mark.parametrize(
    ("report", "message"),
    [("[1]", "AttributeError"), ('{"n": "x"}', "TypeError"), ("[" * 100_000, "RecursionError"), ("{}", "")],
    ids=["list", "text", "deep", "empty"],
)
def test_invalid_report_fails_its_client_only(tmp_path: Path, report: str, message: str) -> None:
    def change(content: RecordDict) -> None:
        for record in content.config_records.values():
            if REPORT in record:
                record[REPORT] = report

    run = federation(
        tmp_path, secure_aggregation=True, num_server_rounds=1, faults={(2, 1): altered(change)}
    ).run()
    (line,) = run.strategy.history
    assert line.trained == [0, 1, 3, 4]
    (failure,) = line.failures
    assert failure.client == 2
    assert failure.reason.startswith(f"its report cannot be read: {message}")


def without_a_key(record: ConfigRecord) -> None:
    record.pop(Key.PUBLIC_KEY_1, None)


def another_length(record: ConfigRecord) -> None:
    if Key.MASKED_PARAMETERS in record:
        record[Key.MASKED_PARAMETERS] = [ndarray_to_bytes(np.zeros(7, np.int64))] * 2


def shifted(record: ConfigRecord) -> None:
    if Key.MASKED_PARAMETERS in record:
        factor, vector = cast(list[bytes], record[Key.MASKED_PARAMETERS])
        record[Key.MASKED_PARAMETERS] = [factor, ndarray_to_bytes(bytes_to_ndarray(vector) + 2**29 + 2**26)]


@pytest.mark.parametrize(
    ("change", "message"),
    [(without_a_key, "KeyError"), (another_length, "ValueError"), (shifted, "the sum's presence entries")],
)
def test_protocol_violation_ends_the_run_in_one_line(
    tmp_path: Path, change: Callable[[ConfigRecord], None], message: str
) -> None:
    faults = {(2, 2): altered(lambda content: change(content.config_records[RECORD_KEY_CONFIGS]))}
    run = federation(tmp_path, secure_aggregation=True, faults=faults)
    with pytest.raises(PbflError, match=f"^round 2: secure aggregation failed: {message}") as caught:
        run.run()
    assert "\n" not in str(caught.value)
    assert "Rounds up to 1 are kept" in str(caught.value)
    assert len(run.strategy.history) == 1


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"faults": {(i, 1): lost for i in (1, 2, 3)}}, "round 1: 0 valid replies"),
        ({"faults.drop": 1.0}, "client 4: injected fault: its reply was dropped"),
    ],
)
def test_too_few_clients_end_the_run(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(RunEnded, match=reason):
        federation(tmp_path, secure_aggregation=True, **keys).run()


def test_stale_upload_is_not_summed(tmp_path: Path) -> None:
    with injected("stale", {(2, 2)}):
        stale = federation(tmp_path / "a", secure_aggregation=True).run()
    second = stale.strategy.history[1]
    assert second.trained == [0, 1, 3, 4]
    assert plain(second.failures) == [
        {"client": 2, "reason": "sent its upload of round 1 instead of round 2"}
    ]
    assert not any("lost its state" in note for note in second.warnings)


def test_final_scoring_is_outside_the_protocol(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"evaluate_moment": "before", "fraction_train": 0.8}
    run = federation(tmp_path, on_disk=True, secure_aggregation=True, **keys).run()
    first, second = run.directory.round_records()
    assert first.final is None
    assert second.final is not None
    assert second.final.accuracy["head"].clients == NUM_CLIENTS
    assert second.final.failures == []
    columns = run.directory.client_records()[1].final
    assert columns is not None
    assert columns.client == list(range(NUM_CLIENTS))


def test_client_refuses_an_unmasked_upload(tmp_path: Path) -> None:
    """The server forgets the protocol: no client sends what it would have masked."""
    run = federation(tmp_path, num_server_rounds=1)
    run.grid.config["secure-aggregation"] = True
    with pytest.raises(RunEnded, match="the server requested an unmasked upload"):
        run.run()


def test_warns_of_clipped_entries(tmp_path: Path) -> None:
    run = federation(tmp_path, secure_aggregation=True, secure_range=0.01, num_server_rounds=1).run()
    assert any("entries of uploads were clipped" in note for note in run.strategy.history[0].warnings)
    assert float(run.strategy.state.combined.values.abs().max()) <= 0.0101
