"""A short hash of a run's results; runs with equal hashes have the same results.

Does not import torch: the bytes of a state are read from the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import ClientsRecord
from pbfl_flwr.util.atomic_files import DamagedState, read_regular

MAX_BYTES = 2**36  # of a checkpoint
DIGITS = 12  # among a million different runs, two have the same hash with probability 1/560


def result_hash(run: RunDirectory, rounds: int) -> str:
    """Return a hash of the server's state and of every client's number of correct predictions in every round.

    Times, bytes, names and nodes are excluded, since they can differ between runs with the same results.

    Raises:
        DamagedState: if one of its files is damaged.
    """
    digest, about = hashlib.sha256(), run.record()
    for columns in run.each_client_record():
        scored = columns.unscored() if about.is_extra(columns.round, rounds) else columns
        _add(digest.update, scored, columns.round == rounds)
    for part in _state(run.path / "checkpoint.safetensors"):
        digest.update(part)
    return digest.hexdigest()[:DIGITS]


def _add(update: Any, columns: ClientsRecord, last: bool) -> None:
    """Add the correct predictions of a round's scored clients and, if it is the last, of the final scoring.

    Who was there without being scored is left out: a shorter run that was continued had others in its last round.
    """
    pairs = zip(columns.client, columns.correct, strict=True)
    scored = sorted(((client, correct) for client, correct in pairs if correct), key=lambda pair: pair[0])
    update(json.dumps([columns.round, scored], sort_keys=True).encode())
    if last and columns.final is not None:
        _add(update, columns.final, False)


def _state(file: Path) -> Iterable[bytes]:
    """Yield names, dtypes with shapes, and bytes of the tensors of a file."""
    try:
        tensors = sorted(deserialize(read_regular(file, MAX_BYTES)))
    except (SafetensorError, OSError) as error:
        raise DamagedState(f"{file} cannot be read ({error})") from None
    for name, tensor in tensors:
        yield f"{name} {tensor['dtype']} {tensor['shape']}".encode()
        yield tensor["data"]
