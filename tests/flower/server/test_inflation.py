"""Replies as a SuperLink passes them on: what a device makes of a reply's bytes costs that device alone."""

import hashlib
import json
from collections.abc import Callable, Mapping

import pytest
from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.superlink.grid import http_grid

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server import inflation, replies
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import RejectedPayload
from tests.flower.inprocess import InProcessGrid, reply_of, scripted
from tests.flower.test_trust import COMMON, TASK, table

MAX_BYTES = 2**20
ERROR = Error(2, "it failed")
Objects = dict[str, bytes]


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds Flower's function, and puts it back."""
    monkeypatch.setattr(http_grid, inflation.FUNCTION, getattr(http_grid, inflation.FUNCTION))
    inflation.bound(MAX_BYTES)


def made(kind: str, children: list[str], body: bytes) -> Objects:
    """An object in Flower's form, which a device can send, by its id."""
    content = f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body
    validate_object_content(content)  # all that a SuperLink checks
    return {hashlib.sha256(content).hexdigest(): content}


def id_of(objects: Objects) -> str:
    return next(iter(objects))


def question() -> Message:
    asked = Message(RecordDict({"c": ConfigRecord()}), dst_node_id=7, message_type="train", group_id="3")
    asked.metadata.__dict__["_message_id"] = "asked"
    return asked


def reply(content: RecordDict | None = None) -> Objects:
    """The objects of a reply to the question, the message first."""
    message = Message(content or reply_of(table()), reply_to=question())
    objects = {each: made.deflate() for each, made in get_all_nested_objects(message).items()}
    return {message.object_id: objects.pop(message.object_id), **objects}


def with_content(content: Objects, *others: Objects) -> Objects:
    """A reply whose content is the first of these objects."""
    body = next(iter(reply().values())).partition(b"\0")[2]
    objects = made("Message", [id_of(content)], body) | content
    for other in others:
        objects |= other
    return objects


def bomb(times: int) -> Objects:
    """A reply of 16 KiB whose array names its only chunk so many times."""
    chunk = made("ArrayChunk", [], bytes(2**14))
    about = {"dtype": "uint8", "shape": [1], "stype": "x", "arraychunk_ids": [0] * times}
    array = made("Array", [id_of(chunk)], json.dumps(about).encode())
    record = made("ArrayRecord", [id_of(array)], json.dumps({"s": id_of(array)}).encode())
    content = made("RecordDict", [id_of(record)], json.dumps({"p": id_of(record)}).encode())
    return with_content(content, record, array, chunk)


def pulled(objects: Objects) -> Message:
    message = getattr(http_grid, inflation.FUNCTION)(id_of(objects), dict(objects))
    assert isinstance(message, Message)
    return message


def test_replies_are_what_flower_makes_of_them() -> None:
    content = reply_of(table())
    message = pulled(reply(content))
    assert message.content == content
    assert message.metadata.reply_to_message_id == "asked"
    (array,) = pulled(bomb(64)).content.array_records["p"].values()
    assert array.data == bytes(MAX_BYTES)  # just not too large


def test_replies_larger_in_memory_than_allowed_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(content: bytes, children: Mapping[str, object] | None = None) -> Array:
        raise AssertionError("the array was made")

    monkeypatch.setattr(Array, "inflate", unreachable)
    message = pulled(bomb(65))
    assert message.metadata.reply_to_message_id == "asked"
    assert message.error.reason == (
        f"its reply cannot be read: {65 * 2**14} bytes in memory, must be at most {MAX_BYTES} (max-upload-mb)"
    )


def test_numbers_count_as_large_as_they_are_in_memory() -> None:
    def numbers(count: int) -> Objects:
        record = MetricRecord({"n": [0] * count})
        name = json.dumps({"m": record.object_id}).encode()
        return with_content(
            made("RecordDict", [record.object_id], name), {record.object_id: record.deflate()}
        )

    assert not pulled(numbers(MAX_BYTES // 16)).has_error()
    assert "bytes in memory, must be at most" in str(pulled(numbers(MAX_BYTES // 8)).error.reason)


@pytest.mark.parametrize(
    ("records", "arrays", "reason"), [(9, 9, "unexpected record 'x0'"), (0, 9, "10 arrays, expected one")]
)
def test_what_has_many_names_is_refused_before_it_is_weighed(
    records: int, arrays: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name costs 75 bytes on the wire, and was weighed like an array of its own: records times arrays."""
    chunk = made("ArrayChunk", [], b"x")
    about = {"dtype": "uint8", "shape": [1], "stype": "x", "arraychunk_ids": [0]}
    array = made("Array", [id_of(chunk)], json.dumps(about).encode())
    names = json.dumps(dict.fromkeys(["s", *(f"x{i}" for i in range(arrays))], id_of(array)))
    record = made("ArrayRecord", [id_of(array)], names.encode())
    names = json.dumps(dict.fromkeys(["p", *(f"x{i}" for i in range(records))], id_of(record)))
    message = pulled(with_content(made("RecordDict", [id_of(record)], names.encode()), record, array, chunk))
    assert not message.has_error()
    monkeypatch.setattr(replies, "weigh", lambda message: pytest.fail("it was weighed"))
    error = replies.size_of(message)
    assert isinstance(error, RejectedPayload)
    assert str(error) == reason


def array_with(**fields: object) -> Objects:
    about = {"dtype": "uint8", "shape": [1], "stype": "x", "arraychunk_ids": [0], **fields}
    return made("Array", [], json.dumps(about).encode())


@pytest.mark.parametrize(
    "malformed",
    [
        lambda: with_content(made("RecordDict", [], b"abc")),
        lambda: with_content(made("RecordDict", [], b"[1, 2]")),
        lambda: with_content(made("RecordDict", [], b'{"c": "missing"}')),
        lambda: with_content(made("ConfigRecord", [], b"")),
        lambda: with_content(made("ArrayChunk", [], b"zz")),
        lambda: with_content(array_with()),
        lambda: with_content(array_with(arraychunk_ids="all")),
        lambda: with_content(made("RecordDict", [], b"[" * 100_000)),
    ],
)
def test_malformed_replies_are_errors_of_their_clients(malformed: Callable[[], Objects]) -> None:
    message = pulled(malformed())
    assert message.has_error()
    assert message.metadata.reply_to_message_id == "asked"
    reason = str(message.error.reason)
    assert reason.startswith("its reply cannot be read: ")
    assert "\n" not in reason


def test_what_is_no_message_answers_nothing() -> None:
    for objects in (made("RecordDict", [], b"{}"), made("Message", [], b"\xff\xff")):
        message = pulled(objects)
        assert message.has_error()
        assert message.metadata.reply_to_message_id == ""


def test_errors_of_clients_stay_errors() -> None:
    failed = make_message(metadata=Message(reply_of(table()), reply_to=question()).metadata, error=ERROR)
    message = pulled({failed.object_id: failed.deflate()})
    assert (message.error.code, message.error.reason) == (ERROR.code, ERROR.reason)


def test_every_server_of_devices_bounds_its_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a user's own loop, which begins with prepare; a Flower that makes messages otherwise is refused."""
    monkeypatch.setattr(http_grid, inflation.FUNCTION, None)
    settings = parse({**COMMON, "max-upload-mb": 3}, SECTIONS)
    strategy = MethodStrategy(settings)
    strategy.prepare(InProcessGrid(scripted(TASK, lambda client, number: reply_of(table())), {}, 4))
    assert getattr(http_grid, inflation.FUNCTION).max_bytes == 3 * 2**20
    monkeypatch.delattr(http_grid, inflation.FUNCTION)
    with pytest.raises(PbflError, match="replies would have no bound"):
        MethodStrategy(settings).prepare(InProcessGrid(scripted(TASK, lambda *_: reply_of(table())), {}, 4))
