"""The server's state on disk: after the last round, and the one with which the clients scored best so far."""

from __future__ import annotations

from pbfl_flwr.flower.storage.atomic_files import DamagedState
from pbfl_flwr.flower.storage.history import (
    BEST,
    BROADCAST,
    CHECKPOINT,
    OTHER_CONFIGURATION,
    RunDirectory,
    RunRefused,
)
from pbfl_flwr.flower.storage.store import load_tensors, save_tensors
from pbfl_flwr.payloads import Payload, RejectedPayload
from pbfl_flwr.task import Task


def save(run: RunDirectory, state: Payload, broadcast: Payload, server_round: int, fingerprint: str) -> None:
    """Write the server's state after a round, and the broadcast for others to read.

    Args:
        run: its directory.
        state: of the server.
        broadcast: what clients get next.
        server_round: from 1.
        fingerprint: of the configuration, under which alone the run may go on.

    Raises:
        UnsavedState: if the system refuses it.
    """
    number = {"round": str(server_round)}
    save_tensors(run.path / BROADCAST, broadcast.to_tensors(), number)
    save_tensors(run.path / CHECKPOINT, state.to_tensors(), {**number, "fingerprint": fingerprint})


def save_best(run: RunDirectory, state: Payload, after: int, accuracy: float, predictor: str) -> None:
    """Write the state with which clients scored: the one that had been broadcast to them.

    Args:
        run: its directory.
        state: of the server.
        after: the last round that went into it; 0 is the state before the first.
        accuracy: weighted by samples, in 0..1.
        predictor: by which.

    Raises:
        UnsavedState: if the system refuses it.
    """
    about = {"round": str(after), "accuracy": f"{accuracy:.6f}", "predictor": predictor}
    save_tensors(run.path / BEST, state.to_tensors(), about)


def resume(
    run: RunDirectory, kind: type[Payload], task: Task, fingerprint: str
) -> tuple[Payload, int] | None:
    """Return (state, finished rounds) of the checkpoint, None if no round was finished.

    What the histories hold beyond the checkpoint was never acknowledged by it and is cut off.

    Args:
        run: its directory.
        kind: of the method's state.
        task: what all clients agree on.
        fingerprint: of the configuration.

    Raises:
        RunRefused: if the checkpoint was made with a configuration that gives other results.
        DamagedState: if it is lost while the history holds several rounds, or if it is damaged.
    """
    file = run.path / CHECKPOINT
    try:
        tensors, metadata = load_tensors(file)
    except FileNotFoundError:
        if (finished := len(run.rounds())) > 1:  # a round is written down before its checkpoint
            raise DamagedState(f"{file} is missing, but the history holds {finished} rounds") from None
        run.cut(0)
        return None
    if metadata.get("fingerprint") != fingerprint:
        raise RunRefused(OTHER_CONFIGURATION.format(run.path))
    done = int(metadata["round"])
    try:
        resumed = kind.from_tensors(tensors, task)
    except (RejectedPayload, KeyError) as error:
        raise DamagedState(f"{file} holds no state of this method: {error}") from None
    run.cut(done)
    return resumed, done
