"""Message sizes: those of Flower's own encoding, and what we add to the rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given, settings
from hypothesis import strategies as st

from pbfl_flwr.config import PREDICTORS, Scalar, parse
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.messages.traffic import NO_BYTES, weigh
from pbfl_flwr.flower.messages.wire import encode
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Nothing, Prototypes
from tests.flower.inprocess import through_flower
from tests.flower.messages.test_report import SECONDS
from tests.flower.messages.test_wire import GOOD, table


def test_overhead_is_under_three_percent_of_the_rows() -> None:
    """K = 100 classes, s = 50, all classes present: the rows are 4·100·50 = 20,000 bytes, 3 % are 600."""
    K, s = 100, 50
    rows = 4 * K * s
    keys: dict[str, Scalar] = {"method": "tinyproto", "cps-dim": s, "num-clients": 3}
    strategy = MethodStrategy(parse(keys, SECTIONS))
    present = torch.ones(K, dtype=torch.bool)
    # What TinyProto sends up: n_i beside the rows; every predictor scored, two loss terms reported.
    up = Prototypes(torch.randn(K, s), present, None, 12_345)
    correct = dict.fromkeys(PREDICTORS, 1_000)
    report = Report(
        12_345, 4_115, 999, correct, 1.234, SECONDS, 987.6, {"loss.ce": 1.2, "loss.regularizer": 3.4}
    )
    config = ConfigRecord({"round": 999, "experiment": strategy.experiment})
    contents = wire.content(encode(up), report.to_record()), wire.content(encode(up), config=config)
    for content in contents:
        message = Message(content, dst_node_id=2**62, message_type="train", group_id="999")
        message.metadata.__dict__["_message_id"] = "0" * 64
        traffic = weigh(message)
        beside = traffic.application - rows
        flowers = traffic.total - traffic.application
        assert 0 < beside < 0.03 * rows
        assert traffic.payload < traffic.application < traffic.total
        assert flowers < 2_500, "Flower's own objects are reported beside ours"


def test_a_payload_alone_is_all_that_the_application_sends() -> None:
    message = Message(wire.content(encode(table())), dst_node_id=1, message_type="train")
    result = weigh(message)
    assert result.payload == result.application == len(GOOD)
    assert result == weigh(message)


MB = 2**20


# As Flower's own protocols and mods may send.
PROTOCOL = ConfigRecord({"stage": "share-keys", "masked": [b"x" * 3 * MB, b"y" * 1000], "ratio": 0.5})


RECORDS: dict[str, Callable[[], RecordDict]] = {
    "empty": RecordDict,
    "handshake": lambda: wire.content(config=ConfigRecord({"experiment": "a-1", "labels": ["ä", "b"]})),
    "train": lambda: wire.content(encode(table()), config=ConfigRecord({"round": 3, "client": 2})),
    "nothing": lambda: wire.content(encode(Nothing()), Report(3, 2).to_record()),
    "reply": lambda: wire.content(encode(table()), Report(3, 2, metrics={"loss.ce": 1.5}).to_record()),
    "report": lambda: wire.content(report=Report(3, 2).to_record()),
    "no bytes": lambda: wire.content(wire.with_checksum(b"")),
    "5 MB": lambda: wire.content(wire.with_checksum(bytes(5 * MB))),
    "12 MB": lambda: wire.content(wire.with_checksum(bytes(range(256)) * (12 * MB // 256) + b"and more")),
    "12 MB, all equal": lambda: wire.content(wire.with_checksum(bytes(12 * MB)), Report(3, 2).to_record()),
    "protocol": lambda: RecordDict({"protocol": PROTOCOL, "fitins.config": ConfigRecord(), "again": ConfigRecord()}),
    "array": lambda: wire.content(ArrayRecord({"ä": Array(np.arange(12.0).reshape(3, 4))})),
    "empty twice": lambda: RecordDict({"a": ArrayRecord(), "b": ArrayRecord(), "p": encode(table())}),
    "two": lambda: RecordDict({"p": ArrayRecord({c: Array(np.arange(n)) for n, c in enumerate("abcd")})}),
    "two equal": lambda: RecordDict({"p": ArrayRecord({c: Array(np.arange(9)) for c in "ab"}), "q": encode(table())}),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("way", ["down", "up", "received"])
def test_size_equals_the_encoding_of_flower(kind: str, way: str) -> None:
    message = Message(RECORDS[kind](), dst_node_id=2**62, message_type="train", group_id="7")
    if way == "up":
        message.metadata.__dict__["_message_id"] = "f" * 64
        message = Message(RECORDS[kind](), reply_to=message)
    elif way == "received":
        message = Message(through_flower(RECORDS[kind]()), dst_node_id=1, message_type="query.x")
    objects = get_all_nested_objects(message).values()
    assert weigh(message).total == sum(len(item.deflate()) for item in objects)


def test_errors_have_no_size() -> None:
    asked = Message(wire.content(), dst_node_id=1, message_type="train")
    assert weigh(Message(Error(2, "a reason"), reply_to=asked)) == NO_BYTES


@given(
    names=st.lists(st.text(max_size=20), max_size=3, unique=True),
    data=st.binary(max_size=300),
    values=st.dictionaries(st.text(max_size=9), st.integers(-(2**60), 2**60) | st.floats(), max_size=4),
)
@settings(max_examples=50)
def test_size_of_any_names_and_numbers(names: list[str], data: bytes, values: dict[str, float]) -> None:
    records: dict[str, Any] = {
        name: wire.with_checksum(data) if i == 1 else ArrayRecord() for i, name in enumerate(names)
    }
    message = Message(
        RecordDict({**records, "values": MetricRecord(dict(values))}), dst_node_id=1, message_type="train"
    )
    objects = get_all_nested_objects(message).values()
    assert weigh(message).total == sum(len(item.deflate()) for item in objects)
