"""Remembered headers: what comes out is what the library reads, the first time and every later one."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as parsed
from safetensors.torch import save
from torch import Tensor

from pbfl_flwr.flower.messages import safetensors_codec as headers
from pbfl_flwr.flower.messages.safetensors_codec import load

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
          torch.uint8, torch.bool]  # fmt: skip


def table(seed: int, classes: int = 5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes, dtype=torch.uint8)
    return {"labels": labels, "rows": torch.randn(classes, 3, generator=g), "n": torch.tensor([seed])}


def same(run: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return run.keys() == expected.keys() and all(
        run[name].dtype == tensor.dtype
        and run[name].shape == tensor.shape
        and torch.equal(run[name].contiguous().view(-1), tensor.contiguous().view(-1))
        for name, tensor in expected.items()
    )


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two sets of tensors with one header."""
    first, second = {}, {}
    for name in draw(st.sets(st.text(max_size=3), max_size=4)):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        first[name] = torch.randint(0, 2, shape).to(dtype)
        second[name] = torch.randint(0, 2, shape).to(dtype)
    return first, second


@given(files())
@settings(max_examples=50)
def test_reads_what_was_written(pair: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    headers._layouts.clear()
    for tensors in (*pair, *pair):
        assert same(load(save(tensors)), tensors)


@pytest.mark.parametrize("longest", [headers.MAX_CACHED_BYTES, 0])
def test_tensors_are_aligned(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a header, later ones, and those whose header is not remembered."""
    monkeypatch.setattr(headers, "MAX_CACHED_BYTES", longest)
    for seed in range(20):
        for tensor in load(save(table(seed))).values():
            assert tensor.data_ptr() % 64 == 0


def test_header_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    headers._layouts.clear()
    seen: list[int] = []

    def parsing(data: bytes) -> Any:
        seen.append(len(data))
        return parsed(data)

    monkeypatch.setattr(headers, "load_uncached", parsing)
    assert all(same(load(save(table(seed))), table(seed)) for seed in range(5))
    assert len(seen) == 1
    assert same(load(save(table(0, classes=4))), table(0, classes=4))
    assert len(seen) == 2


def test_tensors_own_their_memory() -> None:
    data = save(table(1))
    first, second, third = load(data), load(data), load(data)
    second["rows"].fill_(7.0)
    second["n"].fill_(7)
    assert data == save(table(1))
    assert all(same(result, table(1)) for result in (first, third))
    assert torch.equal(second["labels"], table(1)["labels"])


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:60], lambda d: d[:7]])
def test_rejects_wrong_length_after_a_known_header(change: Callable[[bytes], bytes]) -> None:
    data = save(table(1))
    assert same(load(data), table(1))
    with pytest.raises(SafetensorError):
        load(change(data))
    assert same(load(data), table(1))


def test_reads_misaligned_tensors() -> None:
    """One byte before a float32: its file is valid, a tensor cannot begin there."""
    about = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(about).encode()
    data = len(text).to_bytes(8, "little") + text + b"\x05" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    for _ in range(2):
        assert same(load(data), {"a": torch.tensor([5], dtype=torch.uint8), "b": torch.tensor([1.5, -2.0])})


def test_cache_of_headers_is_bounded() -> None:
    headers._layouts.clear()
    for number in range(headers.MAX_CACHED + 20):
        load(save({f"w.{number}": torch.ones(2)}))
    assert len(headers._layouts) == headers.MAX_CACHED
    headers._layouts.clear()
    many = {f"w.{number}": torch.ones(2) for number in range(200)}
    assert same(load(save(many)), many)
    assert not headers._layouts
