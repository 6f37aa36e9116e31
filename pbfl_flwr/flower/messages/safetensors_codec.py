"""Bytes in the safetensors format as tensors, with the headers that came before remembered.

The uploads of a round differ in their numbers and mostly have one header, byte for byte. The library parses and checks
the first of a kind; what it found holds for all later ones with the same header and as many bytes behind it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load as parsed
from torch import Tensor

MOST = 256  # headers that are remembered: tables with different numbers of rows have different ones
LONGEST = 2**12  # bytes of a remembered header; a whole network's is longer, and its numbers take the time


@dataclass(frozen=True)
class _Layout:
    """What a header says.

    Attributes:
        size: bytes that follow it.
        tensors: name, type, shape, number of elements and first byte of each.
    """

    size: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...]

    def read(self, body: bytearray) -> dict[str, Tensor]:
        """Return the tensors, each in memory of its own."""
        found = {}
        for name, dtype, shape, count, start in self.tensors:
            flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start).clone()
            found[name] = flat if len(shape) == 1 else flat.view(shape)
        return found


_layouts: dict[bytes, _Layout] = {}


def load(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; of what is none, the library's exceptions.

    Each lies in memory that torch has allocated, at the boundaries that it likes: from other ones, matrix products of
    the same numbers may round differently, and a run's bits would depend on where a message happened to be put.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if end > LONGEST or sys.byteorder == "big":  # there the library swaps bytes
        return {name: tensor.clone() for name, tensor in parsed(data).items()}
    header, size = data[:end], len(data) - end
    known = _layouts.get(header)
    if known is not None and known.size == size:
        return known.read(bytearray(memoryview(data)[end:]))
    tensors = parsed(data)
    found = _layout_of(header, tensors, size)
    if found is not None:
        if len(_layouts) >= MOST:
            _layouts.pop(next(iter(_layouts)), None)  # the oldest
        _layouts[header] = found
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _layout_of(header: bytes, tensors: Mapping[str, Tensor], size: int) -> _Layout | None:
    """Return what a header says that the library has found right; None where its tensors cannot lie in one buffer."""
    about = json.loads(header[8:])
    starts = {name: about[name]["data_offsets"][0] for name in tensors}
    if any(not t.numel() or starts[name] % t.element_size() for name, t in tensors.items()):
        return None  # torch makes no empty tensor of a buffer, and none off its type's boundaries
    return _Layout(
        size, tuple((n, t.dtype, tuple(t.shape), t.numel(), starts[n]) for n, t in tensors.items())
    )
