"""The server's checkpoints: the state after the last round, and the state with the best accuracy so far."""

from __future__ import annotations

from pbfl_flwr.payloads import RejectedPayload, Serializable
from pbfl_flwr.runs.directory import (
    BEST,
    BROADCAST,
    CHECKPOINT,
    RunDirectory,
    RunRefused,
)
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from pbfl_flwr.task import Task
from pbfl_flwr.util.atomic_files import DamagedState


def save(
    run: RunDirectory, state: Serializable, broadcast: Serializable, server_round: int, configuration: str
) -> None:
    """Write the server's state after a round, and the next broadcast for other programs to read.

    Raises:
        UnsavedState: if writing fails.
    """
    number = {"round": str(server_round)}
    save_tensors(run.path / BROADCAST, broadcast.to_tensors(), number)
    save_tensors(run.path / CHECKPOINT, state.to_tensors(), {**number, "configuration": configuration})


def save_best(run: RunDirectory, state: Serializable, after: int, accuracy: float, predictor: str) -> None:
    """Write the best state: the one that had been broadcast when clients were scored.

    It was produced by round ``after`` (0: the initial state); its accuracy in 0..1 is weighted by samples.

    Raises:
        UnsavedState: if writing fails.
    """
    about = {"round": str(after), "accuracy": f"{accuracy:.6f}", "predictor": predictor}
    save_tensors(run.path / BEST, state.to_tensors(), about)


def resume(
    run: RunDirectory, kind: type[Serializable], task: Task, configuration: str
) -> tuple[Serializable, int] | None:
    """Return (state, finished rounds) of the checkpoint, None if no round was finished.

    Rounds in the histories after the checkpoint are removed.

    Raises:
        RunRefused: if the checkpoint is of another configuration's run.
        DamagedState: if it is damaged, or missing although the history has several rounds.
    """
    file = run.path / CHECKPOINT
    try:
        tensors, metadata = load_tensors(file)
    except FileNotFoundError:
        if (finished := len(run.round_records())) > 1:  # a round's line is written before its checkpoint
            raise DamagedState(f"{file} is missing, but the history holds {finished} rounds") from None
        run.truncate(0)
        return None
    if metadata.get("configuration") != configuration:
        raise RunRefused(f"{file} is not of the run in {run.path} (see its run.json)")
    done = int(metadata["round"])
    try:
        resumed = kind.from_tensors(tensors, task)
    except (RejectedPayload, KeyError) as error:
        raise DamagedState(f"{file} does not hold a state of this method: {error}") from None
    run.truncate(done)
    return resumed, done
