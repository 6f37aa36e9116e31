"""The wire: rounding within its bounds, and malformed payloads rejected."""

import json
import struct
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any, Self

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.wire import decode, encode, encode_tensors, ordered
from pbfl_flwr.payloads import Nothing, Prototypes, RejectedPayload, Weights
from pbfl_flwr.task import Task

DTYPES: tuple[wire.WireDtype, ...] = ("float32", "float16", "bfloat16", "int8")


TASK = Task(num_classes=6, feature_dim=8, input_shape=(2,))


def table(seed: int = 0, scale: float = 1.0) -> Prototypes:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) * scale
    present = torch.tensor([True, False, True, True, False, True])
    return Prototypes(values * present[:, None], present)


@given(seed=st.integers(0, 10**6), exponent=st.integers(-6, 4))
@settings(max_examples=60)
def test_int8_error_is_at_most_half_a_step(seed: int, exponent: int) -> None:
    sent = table(seed, 10.0**exponent)
    back = decode(encode(sent, "int8"), Prototypes, TASK)
    step = sent.values.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((back.values - sent.values).abs() <= step / 2 * (1 + 1e-5)).all())
    assert torch.equal(back.present, sent.present)


@pytest.mark.parametrize(
    ("dtype", "relative"), [("float32", 0.0), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)]
)
def test_rounding_error_of_floats_is_bounded(dtype: Any, relative: float) -> None:
    sent = table(3)
    back = decode(encode(sent, dtype), Prototypes, TASK)
    assert back.values.dtype == torch.float32
    assert bool(((back.values - sent.values).abs() <= relative * sent.values.abs() + 2.0**-25).all())
    assert (back.values != sent.values).any() == (relative > 0)


def test_clients_of_a_process_decode_a_broadcast_once() -> None:
    first, second = encode(table(1)), encode(table(2))
    worker = Worker()
    broadcast = worker.broadcast(first, Prototypes, TASK)
    assert worker.broadcast(encode(table(1)), Prototypes, TASK) is broadcast
    assert torch.equal(worker.broadcast(second, Prototypes, TASK).values, table(2).values)
    last = worker.broadcast(second, Prototypes, TASK)
    assert Worker().broadcast(second, Prototypes, TASK) is not last
    damaged = ArrayRecord({"s": Array("uint8", (4,), second["s"].stype, b"1234")})
    for record in (damaged, ArrayRecord({**first, "t": second["s"]})):
        with pytest.raises(RejectedPayload):
            worker.broadcast(record, Prototypes, TASK)


def test_int8_sends_a_quarter_of_the_bytes() -> None:
    present = torch.ones(6, dtype=torch.bool)
    task = Task(6, 4096, (2,))
    sent = Prototypes(torch.randn(6, 4096), present)
    size = {d: len(encode(sent, d)["s"].data) for d in DTYPES}
    assert size["float16"] == size["bfloat16"]
    assert size["float32"] / size["float16"] == pytest.approx(2, rel=0.01)
    assert size["float32"] / size["int8"] == pytest.approx(4, rel=0.01)
    assert decode(encode(sent, "int8"), Prototypes, task).values.shape == (6, 4096)


def test_int8_of_zero_rows_and_of_convolutions() -> None:
    zero = decode(encode(Prototypes(torch.zeros(6, 8), table().present), "int8"), Prototypes, TASK)
    assert zero.num_present == 4
    assert not zero.values.any()
    weights = Weights(
        {
            "conv": torch.randn(3, 2, 5, 5),
            "bias": torch.randn(3),
            "none": torch.zeros(0, 4),
            "flat": torch.zeros(3, 0),
        },
        2,
    )
    back = decode(encode(weights, "int8"), Weights, TASK)
    assert torch.equal(back.tensors["bias"], weights.tensors["bias"]), "vectors stay float32"
    error = (back.tensors["conv"] - weights.tensors["conv"]).abs().flatten(1).amax(1)
    assert bool((error <= weights.tensors["conv"].abs().flatten(1).amax(1) / 254 * (1 + 1e-5)).all())
    assert back.tensors["none"].shape == (0, 4)
    assert back.tensors["flat"].shape == (3, 0)  # the factors of a matrix that has lost everything


def test_nan_is_not_hidden_by_rounding() -> None:
    for bad in (float("nan"), float("inf")):
        sent = Prototypes(torch.full((6, 8), bad), table().present)
        for dtype in DTYPES:
            with pytest.raises(RejectedPayload, match="'rows' holds NaN or infinity"):
                decode(encode(sent, dtype), Prototypes, TASK)


def test_float16_rejects_too_large_numbers() -> None:
    big = Prototypes(torch.full((6, 8), 7e4), table().present)
    with pytest.raises(
        PbflError, match=r"wire-dtype = 'float16': 'rows' holds 7e\+04, float16's maximum is 65504"
    ) as error:
        encode(big, "float16")
    assert "\n" not in str(error.value)
    assert decode(encode(big, "bfloat16"), Prototypes, TASK).num_present == 4


class Halved(Prototypes):
    """A payload of a user's whose ``from_tensors`` forgets a part."""

    @classmethod
    def from_tensors(cls, tensors: Any, task: Task) -> Any:
        return tensors["rows"]


def test_a_payload_that_is_rebuilt_as_something_else_is_named() -> None:
    with pytest.raises(
        PbflError, match=r"^Halved.from_tensors \(test_wire.py:\d+\) returned a Tensor; must return a Ha"
    ):
        decode(encode(table()), Halved, TASK)


def test_empty_payloads_are_empty_records() -> None:
    assert len(encode(Nothing())) == 0
    assert decode(encode(Nothing()), Nothing, TASK) == Nothing()
    empty = decode(encode(Prototypes.empty(6, 3), "int8"), Prototypes, TASK)
    assert empty.num_present == 0
    assert empty.values.shape == (6, 3)


def test_tensors_that_share_memory_can_be_sent() -> None:
    rows = torch.randn(3, 4)
    back = decode(encode(Weights({"a": rows, "b": rows, "c": rows[0]}, 1)), Weights, TASK)
    assert torch.equal(back.tensors["c"], rows[0])


def forged(header: Any, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


GOOD = encode(table())["s"].data


def as_one(name: str, dtype: str, shape: Any, body: bytes) -> bytes:
    return forged({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(body)]}}, body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        b"\x80\x04\x95" + bytes(50),
        GOOD[:-1],
        GOOD + b"x",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2**20) + b"{" * 2**20,
        as_one("rows", "F4", [2], b"a"),
        as_one("rows", "F8_E4M3", [1, 8], bytes(8)),
        as_one("rows", "C64", [1, 1], bytes(8)),
        as_one("rows", "U8", [0, 2**64 - 1], b""),
        as_one("rows", "U8", [0, 2**62, 4], b""),
        as_one("rows", "U8", [-1], b""),
        as_one("rows", "NONSENSE", [1], b"a"),
    ],
)
def test_rejects_invalid_bytes_in_one_short_line(data: bytes) -> None:
    with pytest.raises(RejectedPayload) as error:
        decode(wire.with_checksum(data), Prototypes, TASK)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_rejects_an_enormous_header_before_parsing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "tensors_in", lambda data: pytest.fail("it was parsed"))
    header = forged({f"w.{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)})
    with pytest.raises(RejectedPayload, match=r"a header of .* bytes, must be at most 1048576"):
        decode(wire.with_checksum(header), Prototypes, TASK)


@pytest.mark.parametrize(
    "array",
    [
        Array("object", (1,), "numpy.ndarray", np.array([{}], dtype=object).dumps()),
        Array(np.frombuffer(GOOD, dtype=np.uint8)),
        Array(np.frombuffer(GOOD + bytes(-len(GOOD) % 2), dtype=np.uint8).reshape(2, -1)),
        Array(
            "uint8", (10**15,), "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'shape': (10**15,)}"
        ),
    ],
)
def test_rejects_arrays_of_another_format(array: Array) -> None:
    with pytest.raises(RejectedPayload, match=r"an array of format 'numpy\.ndarray', expected 'safetensors'"):
        decode(ArrayRecord({"s": array}), Prototypes, TASK)
    with pytest.raises(RejectedPayload, match="2 arrays, expected one"):
        decode(ArrayRecord({"s": array, "t": array}), Prototypes, TASK)


def test_tensors_are_aligned_and_own_their_memory() -> None:
    record = encode(Weights({"a": torch.ones(3), "b": torch.ones(2, 3)}, 1))
    first, second = (decode(record, Weights, TASK).tensors for _ in range(2))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (*first.values(), *second.values()))
    first["a"].fill_(7.0)
    assert torch.equal(second["a"], torch.ones(3))
    assert torch.equal(decode(record, Weights, TASK).tensors["a"], torch.ones(3))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 7))
@settings(max_examples=50)
def test_checksum_detects_flipped_bits(place: int, bit: int) -> None:
    data = bytearray(GOOD)
    data[place] ^= 1 << bit
    array = Array("uint8", (len(GOOD),), wire.with_checksum(GOOD)["s"].stype, bytes(data))
    assert decode_error(ArrayRecord({"s": array})) == "its bytes do not match their checksum"


@given(st.binary(max_size=300))
@settings(max_examples=150)
def test_rejects_random_bytes(data: bytes) -> None:
    for kind in (Prototypes, Weights):
        with pytest.raises(RejectedPayload):
            decode(wire.with_checksum(data), kind, TASK)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 7))
@settings(max_examples=200)
def test_flipped_bit_with_checksum_is_valid_or_rejected(place: int, bit: int) -> None:
    data = bytearray(GOOD)
    data[place] ^= 1 << bit
    try:
        result = decode(wire.with_checksum(bytes(data)), Prototypes, TASK)
    except RejectedPayload:
        return
    assert torch.isfinite(result.values).all()
    assert result.values.shape[0] == 6


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.float8_e4m3fn),
        torch.ones(3),
        torch.ones(4, 1),
        torch.ones(()),
    ],
)
def test_rejects_scales_that_do_not_fit_their_rows(scale: torch.Tensor) -> None:
    labels, rows = torch.tensor([0, 1, 2, 3], dtype=torch.uint8), torch.ones(4, 8, dtype=torch.int8)
    record = encode_tensors({"labels": labels, "rows": rows})
    assert decode_error(record) == "'rows' is torch.int8, expected floating point of 16 to 64 bits"
    data = save({"labels": labels, "rows": rows, "rows#scale": scale})
    assert decode_error(wire.with_checksum(data)) == "the scales of 'rows' do not fit its rows"
    assert decode_error(wire.with_checksum(save({"labels": labels, "x#scale": torch.ones(4)}))).startswith(
        "the scales of 'x'"
    )


def decode_error(record: ArrayRecord) -> str:
    with pytest.raises(RejectedPayload) as error:
        decode(record, Prototypes, TASK)
    return str(error.value)


def test_replies_are_sorted_by_client() -> None:
    asked = [
        Message(wire.content(encode(table())), dst_node_id=9 - c, message_type="train") for c in range(3)
    ]
    for client, message in enumerate(asked):
        message.metadata.__dict__["_message_id"] = f"id-{client}"
    replies = [Message(wire.content(), reply_to=message) for message in asked]
    result = ordered([replies[2], replies[0], replies[1]], {"id-0": 5, "id-1": 3, "id-2": 4, "id-9": 7})
    assert list(result) == [3, 4, 5]
    assert result[5] is replies[0]
    assert ordered(replies, {}) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [4, 1], []])
@pytest.mark.parametrize("counted", [True, False])
def test_second_decoding_equals_the_first(dtype: wire.WireDtype, order: list[int], counted: bool) -> None:
    """What streams is decoded twice, the second time without its checksum."""
    tensors = {"labels": torch.tensor(order, dtype=torch.uint8), "rows": torch.randn(len(order), 8)}
    if counted:
        tensors |= {"counts": torch.arange(1, len(order) + 1), "n": torch.tensor([21])}
    record = encode_tensors(tensors, dtype)
    for _ in range(2):
        first, second = (decode(record, Prototypes, TASK, again=again) for again in (False, True))
        assert torch.equal(first.values, second.values)
        assert torch.equal(first.present, second.present)
        assert first.num_examples == second.num_examples
        assert (first.counts is None) == (second.counts is None) == (not counted)
        if first.counts is not None and second.counts is not None:
            assert torch.equal(first.counts, second.counts)
            assert second.counts[order].tolist() == list(range(1, len(order) + 1))


class Companded(Prototypes):
    """A table whose rows travel as logarithms."""

    def to_tensors(self) -> dict[str, torch.Tensor]:
        return Prototypes(self.values.sign() * self.values.abs().log1p(), self.present).to_tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], task: Task) -> Self:
        sent = super().from_tensors(tensors, task)
        return replace(sent, values=sent.values.sign() * sent.values.abs().expm1())


def test_a_table_that_decodes_itself_does_so_the_second_time_as_well() -> None:
    sent = Companded(*astuple(table())[:2])
    for again in (False, True):
        assert torch.allclose(
            decode(encode(sent), Companded, TASK, again=again).values, sent.values, atol=1e-6
        )
