"""Tensor files: tensors and metadata with a checksum and a schema version, as safetensors.

Other tools can read them, and loading executes no code. A damaged file is an error that names it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.payloads import separate
from pbfl_flwr.util.atomic_files import SCHEMA, DamagedState, read_regular, write_atomically

# What the library raises for bytes that are no such file, with dtypes and shapes that torch does not have among them.
MALFORMED = (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, AssertionError)
LARGEST_FILE = 2**36  # bytes
SIZE_BYTES = 8  # of the header size at the start of a safetensors file


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    flushed: bool = True,
) -> None:
    """Write tensors and metadata with schema version and checksum; no other process may write the file meanwhile.

    Args:
        path: the file.
        tensors: by name.
        metadata: of the file.
        flushed: see :func:`pbfl_flwr.util.atomic_files.write_atomically`.
    """
    contiguous = separate(tensors)
    full = {**metadata, "schema": SCHEMA}
    full["checksum"] = checksum_of(contiguous, full)
    data = _with_sorted_metadata(save(contiguous, full))
    write_atomically(path, data, locked=True, flushed=flushed)


def _with_sorted_metadata(file: bytes) -> tuple[bytes, bytes, memoryview]:
    """Return the pieces of a safetensors file with sorted metadata, so that equal content gives equal bytes."""
    header, begin = header_of(file)
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % SIZE_BYTES)  # keeps the tensors aligned
    return len(text).to_bytes(SIZE_BYTES, "little"), text, memoryview(file)[begin:]


def header_of(file: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of the tensors."""
    begin = SIZE_BYTES + int.from_bytes(file[:SIZE_BYTES], "little")
    return json.loads(file[SIZE_BYTES:begin]), begin


def tensors_in(file: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, sorted, each in memory of its own.

    The library's order varies. The memory is aligned: with another alignment, matrix products of the same numbers may
    round differently, and results would depend on where a file was stored in memory.

    Raises:
        Exception: one of MALFORMED, if it is not such a file.
    """
    tensors = load(file)
    return {name: tensors.pop(name).clone() for name in sorted(tensors)}


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file written by :func:`save_tensors`.

    Raises:
        FileNotFoundError: if there is none.
        PbflError: if it may not be read.
        DamagedState: if it is not such a file, of another schema, or its checksum is wrong.
    """
    advice = "move it away to start afresh"
    try:
        # Whole, since safe_open would take a Ctrl-C meanwhile for a damaged file.
        file = read_regular(path, LARGEST_FILE)
        tensors = tensors_in(file)
        metadata = dict(header_of(file)[0].get("__metadata__") or {})
    except FileNotFoundError:
        raise
    except PermissionError as error:  # not damaged
        raise PbflError(f"state file {path} cannot be read ({error.strerror})") from None
    except (OSError, *MALFORMED) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedState(f"state file {path} cannot be read ({reason}); {advice}") from None
    if metadata.get("schema") != SCHEMA:
        raise DamagedState(
            f"state file {path} has schema {metadata.get('schema')!r}, expected {SCHEMA!r}; {advice}"
        )
    checksum = metadata.pop("checksum", "")
    if checksum != checksum_of(tensors, metadata):
        raise DamagedState(f"state file {path} is damaged: its checksum does not match; {advice}")
    return tensors, metadata


def checksum_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return a CRC-32 over contiguous tensors on the CPU, with their names, dtypes and shapes, and over metadata."""
    checksum = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"
