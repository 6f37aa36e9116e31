"""Decoding of the safetensors format with a cache of parsed headers.

The uploads of a round usually have identical headers. The safetensors library parses and checks the first; the
resulting layout is valid for all later ones with the same header and the same number of bytes after it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load as load_uncached
from torch import Tensor

MAX_CACHED = 256  # headers; tables with different numbers of rows have different headers
MAX_CACHED_BYTES = 2**12  # of a header; for networks, whose headers are longer, copying the numbers dominates


@dataclass(frozen=True)
class _Layout:
    """The parsed content of a header.

    Attributes:
        size: number of bytes after the header.
        tensors: name, dtype, shape, number of elements and offset in bytes of each.
    """

    size: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...]

    def read(self, body: bytearray) -> dict[str, Tensor]:
        """Return the tensors, each in its own memory."""
        tensors = {}
        for name, dtype, shape, count, start in self.tensors:
            flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start).clone()
            tensors[name] = flat if len(shape) == 1 else flat.view(shape)
        return tensors


_layouts: dict[bytes, _Layout] = {}


def load(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; raises the library's exceptions if it is invalid.

    Each tensor is copied to memory allocated by torch, which is aligned: with another alignment, matrix products of
    the same numbers may round differently, and results would depend on where a message was stored in memory.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if end > MAX_CACHED_BYTES or sys.byteorder == "big":  # on big-endian machines the library swaps bytes
        return {name: tensor.clone() for name, tensor in load_uncached(data).items()}
    header, size = data[:end], len(data) - end
    layout = _layouts.get(header)
    if layout is not None and layout.size == size:
        return layout.read(bytearray(memoryview(data)[end:]))
    tensors = load_uncached(data)
    layout = _layout_of(header, tensors, size)
    if layout is not None:
        if len(_layouts) >= MAX_CACHED:
            _layouts.pop(next(iter(_layouts)), None)  # the oldest
        _layouts[header] = layout
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _layout_of(header: bytes, tensors: Mapping[str, Tensor], size: int) -> _Layout | None:
    """Return the layout of a header that the library has accepted; None if it cannot be read with torch.frombuffer."""
    about = json.loads(header[8:])
    starts = {name: about[name]["data_offsets"][0] for name in tensors}
    if any(not t.numel() or starts[name] % t.element_size() for name, t in tensors.items()):
        return None  # torch.frombuffer supports neither empty nor misaligned tensors
    return _Layout(
        size, tuple((n, t.dtype, tuple(t.shape), t.numel(), starts[n]) for n, t in tensors.items())
    )
