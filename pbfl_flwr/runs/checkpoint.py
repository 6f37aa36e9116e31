"""The server's checkpoints: the state after the last round, and the state with the best accuracy so far.

A round counts once its line is in rounds.jsonl. Its files are written before that into a directory beside those of the
round before, and take their place afterwards, so that files and histories are of the same rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class BestState:
    """A state that is better than those before: the one that had been broadcast when clients were scored.

    It was produced by round ``after`` (0: the initial state); its accuracy in 0..1 is weighted by samples.
    """

    state: Serializable
    after: int
    accuracy: float
    predictor: str


def stage(
    run: RunDirectory,
    state: Serializable,
    broadcast: Serializable,
    server_round: int,
    configuration: str,
    best: BestState | None,
) -> None:
    """Write the files of a round that does not count yet: the server's state, the next broadcast, the best state.

    Raises:
        UnsavedState: if writing fails.
    """
    run.settle(server_round - 1)  # nothing of an earlier try stays
    folder = run.staged(server_round)
    number = {"round": str(server_round)}
    save_tensors(folder / BROADCAST, broadcast.to_tensors(), number, flushed=False)
    if best is not None:
        about = {
            "round": str(best.after),
            "accuracy": f"{best.accuracy:.6f}",
            "predictor": best.predictor,
        }
        save_tensors(folder / BEST, best.state.to_tensors(), about, flushed=False)
    save_tensors(folder / CHECKPOINT, state.to_tensors(), {**number, "configuration": configuration})


def resume(
    run: RunDirectory, kind: type[Serializable], task: Task, configuration: str
) -> tuple[Serializable, int] | None:
    """Return (state, finished rounds) of the checkpoint, None if no round was finished.

    What is left of a round that does not count is removed, and rounds in the histories after the checkpoint.

    Raises:
        RunRefused: if the checkpoint is of another configuration's run.
        DamagedState: if it is damaged, or missing although the history has rounds, or ahead of it.
        UnsavedState: if the directory cannot be written.
    """
    file, finished = run.path / CHECKPOINT, run.finished_rounds()
    run.settle(finished)
    try:
        tensors, metadata = load_tensors(file)
    except FileNotFoundError:
        if finished:
            raise DamagedState(f"{file} is missing, but the history holds {finished} rounds") from None
        run.truncate(0)
        return None
    if metadata.get("configuration") != configuration:
        raise RunRefused(f"{file} is not of the run in {run.path} (see its run.json)")
    if (done := int(metadata["round"])) > finished:
        raise DamagedState(f"{file} is of round {done}, but the history holds {finished} rounds")
    try:
        resumed = kind.from_tensors(tensors, task)
    except (RejectedPayload, KeyError) as error:
        raise DamagedState(f"{file} does not hold a state of this method: {error}") from None
    run.truncate(done)
    return resumed, done
