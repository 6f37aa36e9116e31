"""Whatever a device with valid credentials sends is used within its bounds or rejected in one line, never an error."""

import zlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from pbfl_flwr.config import EvaluationSettings, parse
from pbfl_flwr.errors import LONGEST, printable
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report, requested
from pbfl_flwr.flower.server.phase import Phase, RoundPlan
from pbfl_flwr.flower.server.replies import ReplyRules, read
from pbfl_flwr.flower.server.roster import MAX_LABEL, MAX_TEXT, client_from_reply
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import MAX_COUNT, Prototypes, RejectedPayload
from pbfl_flwr.payloads.metrics import Part
from pbfl_flwr.runs.records import ClientRecord
from pbfl_flwr.task import Task
from pbfl_flwr.training.class_metrics import Areas, ByClass
from tests.flower.inprocess import handshake_reply

TASK = Task(num_classes=6, feature_dim=8, input_shape=(1, 16, 16))
DECLARED = {
    **handshake_reply(0, TASK),
    "simulated": False,
    "num-train": 10,
    "num-test": 4,
    "num-validation": 2,
}


def test_a_natural_id_is_for_people_to_read_and_names_no_device() -> None:
    claimed = {**DECLARED, "natural-id": "site-a"}
    device = client_from_reply(7, ConfigRecord(claimed))
    assert (device.natural_id, device.title, device.label) == ("", "0", "0")
    person = client_from_reply(7, ConfigRecord({**claimed, "simulated": True}))
    assert (person.title, person.label) == ("site-a", "0")


TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["sys:exit", "../../x", "a\nb", "\u202e", "=1+1", "x" * 10_000, ""])
)
WHOLE = st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from([-1, 0, 1, 2**31, MAX_COUNT, 2**63]))
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
LISTED = [st.lists(kind, max_size=8) for kind in (WHOLE, FLOATS, TEXTS, st.booleans())]
VALUES = st.one_of(WHOLE, FLOATS, TEXTS, st.booleans(), st.binary(max_size=8), *LISTED)
NUMBERS = st.one_of(WHOLE, FLOATS, *LISTED[:2])


def changed(whole: Mapping[str, Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Dictionaries like this one with some values replaced, some missing and some more."""
    changes = st.dictionaries(st.one_of(st.sampled_from(sorted(whole)), TEXTS), values, max_size=3)
    missing = st.sets(st.sampled_from(sorted(whole)), max_size=1)
    return st.builds(
        lambda more, without: {
            **{key: value for key, value in whole.items() if key not in without},
            **more,
        },
        changes,
        missing,
    )


def one_line(reason: str) -> bool:
    return reason == printable(reason) and "\n" not in reason and len(reason) <= LONGEST + 100


@given(changed(DECLARED, VALUES))
@settings(max_examples=500)
def test_a_handshake_is_a_bounded_record_or_rejected(fields: dict[str, Any]) -> None:
    try:
        client = client_from_reply(7, ConfigRecord(fields))
    except RejectedPayload:
        return
    assert -1 <= client.client < 2**63
    assert max(client.num_train, client.num_test, client.num_validation, *client.parameters) < MAX_COUNT
    assert min(client.num_train, client.num_test, client.num_validation, *client.parameters) >= 0
    assert len(client.labels) in (0, client.task.num_classes)
    assert max(map(len, client.labels), default=0) <= MAX_LABEL
    for text in (client.device, client.columns, client.code_version, client.weights, client.natural_id):
        assert text == printable(text)
        assert len(text) <= MAX_TEXT
    assert type(client.architecture) is str
    assert ClientRecord.model_validate_json(client.model_dump_json()) == client, "run.json holds it"


WHOLE_REPORT = Report(
    10,
    4,
    1,
    {"head": 2, "global": 3},
    0.5,
    peak_mb=90.0,
    metrics={"loss.ce": 1.0},
    num_validation=2,
    validation={"head": 1},
    round=3,
    by_class=ByClass(
        [1, 0, 1, 1, 1, 0],
        {"head": [1, 0, 1, 0, 0, 0], "global": [1, 0, 1, 1, 0, 0]},
        {"head": [1, 1, 1, 1, 0, 0], "global": [1, 0, 1, 1, 1, 0]},
    ),
    gpu_mb=5.0,
    areas={"head": Areas(0.5, 0.5), "global": Areas(None, 0.25)},
)
REPORTED = dict(WHOLE_REPORT.to_record())
EVALUATION = EvaluationSettings(per_class=True, auc=True)


def test_the_report_that_is_changed_below_is_whole_and_valid() -> None:
    assert {*Part} <= set(REPORTED)
    assert Report.from_record(MetricRecord(REPORTED), requested(EVALUATION, TASK)) == WHOLE_REPORT


@given(changed(REPORTED, NUMBERS))
@settings(max_examples=500)
def test_a_report_is_bounded_or_rejected(fields: dict[str, Any]) -> None:
    try:
        record = MetricRecord(fields)
    except (TypeError, ValueError):  # Flower's own check, before anything is sent
        return
    try:
        report = Report.from_record(record, requested(EVALUATION, TASK))
    except RejectedPayload:
        return
    assert 0 <= report.num_train < MAX_COUNT
    assert all(0 <= right <= report.num_test for right in (report.correct or {}).values())
    assert all(0 <= right <= report.num_validation for right in (report.validation or {}).values())
    for number in (
        report.test_loss,
        report.peak_mb,
        *report.seconds.values(),
        *(report.metrics or {}).values(),
    ):
        assert abs(number) <= 1e40
    assert all(name == printable(name) for name in report.metrics or {})
    if report.by_class is not None:
        assert sum(report.by_class.tested) == report.num_test


SETTINGS = parse({"method": "fedproto", "aggregation": "weighted", "feature-dim": 8}, SECTIONS)
METHOD = build_method(SETTINGS)
RULES = ReplyRules.of(SETTINGS, METHOD, TASK)
STATE = METHOD.init(TASK, 0)


def table(seed: int) -> Prototypes:
    random = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 3, (6,), generator=random)
    counts[seed % 6] = 1
    return Prototypes(torch.randn(6, 8, generator=random) * (counts > 0)[:, None], counts > 0, counts)


def reply_with(payload: ArrayRecord, report: MetricRecord) -> dict[int, str]:
    """Return client -> reason after the only client of a round has answered this."""
    asked = Message(RecordDict(), dst_node_id=1, message_type="train")
    asked.metadata.__dict__["_message_id"] = "asked"
    reply = Message(wire.content(payload, report), reply_to=asked)
    client = client_from_reply(1, ConfigRecord(DECLARED))
    phase = Phase([(asked, 0)], RoundPlan(3, {0: "train"}), {}, 0, 0.0, declared={0: client})
    replies = read([reply], phase, RULES, STATE)
    assert set(replies.uploads) ^ set(replies.failures) == {0}
    for upload in replies.uploads.values():
        assert bool(torch.isfinite(next(iter(upload.to_tensors().values())).float()).all())
    return replies.failures


def test_an_unchanged_upload_is_used() -> None:
    for dtype in ("float32", "int8"):
        assert reply_with(wire.encode(table(1), dtype), Report(10, 4, 1, {"head": 2}).to_record()) == {}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@given(seed=st.integers(0, 99), data=st.data())
@settings(max_examples=150)
def test_changed_bytes_of_an_upload_cost_one_client(
    dtype: wire.WireDtype, seed: int, data: st.DataObject
) -> None:
    """With a checksum that fits, as a device that lies would have it, and without."""
    array = wire.encode(table(seed), dtype)["s"]
    damaged = bytearray(array.data)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for content in (bytes(damaged), bytes(damaged[: data.draw(st.integers(0, len(damaged)))])):
        for stype in (array.stype, f"{wire.FORMAT}{zlib.crc32(content):08x}"):
            record = ArrayRecord({"s": Array("uint8", (len(content),), stype, content)})
            for reason in reply_with(record, Report(10, 4, 1, {"head": 2}).to_record()).values():
                assert one_line(reason)
