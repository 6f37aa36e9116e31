"""What a run came to, as a short hash: two runs with equal hashes gave the same results, whatever their clocks said.

No torch here: a state's bytes are read as they lie on the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from pbfl_flwr.flower.storage.atomic_files import DamagedState
from pbfl_flwr.flower.storage.history import RunDirectory

DIGITS = 12  # two of a million different runs have the same hash once in 280 times


def result_hash(run: RunDirectory, rounds: int) -> str:
    """Return a hash of the server's state and of how many samples each client predicted rightly in every round.

    Seconds, bytes, names and nodes are left out: they differ where the results do not.

    Args:
        run: whose rounds are finished.
        rounds: how many those are; new clients who came after them count as well.

    Raises:
        DamagedState: if a file of it is.
    """
    digest = hashlib.sha256()
    for columns in run.client_rounds():
        last = columns["round"] == rounds  # a run that was prolonged may have had a last scoring earlier
        _add(digest.update, columns, last)
    for line in run.newcomers(rounds):
        _add(digest.update, line["columns"], True)
    for part in _state(run.path / "checkpoint.safetensors"):
        digest.update(part)
    return digest.hexdigest()[:DIGITS]


def _add(update: Any, columns: Mapping[str, Any], last: bool) -> None:
    """Take what the clients predicted rightly in a round, and, if it is the last, in the scoring after it."""
    scored = sorted(zip(columns["client"], columns["correct"], strict=True), key=lambda pair: int(pair[0]))
    update(json.dumps([columns["round"], scored], sort_keys=True).encode())
    if last and "final" in columns:
        _add(update, columns["final"], False)


def _state(file: Path) -> Iterable[bytes]:
    """Yield names, forms and bytes of the tensors of a file."""
    try:
        found = sorted(deserialize(file.read_bytes()))
    except (SafetensorError, OSError) as error:
        raise DamagedState(f"{file} cannot be read ({error})") from None
    for name, tensor in found:
        yield f"{name} {tensor['dtype']} {tensor['shape']}".encode()
        yield tensor["data"]
