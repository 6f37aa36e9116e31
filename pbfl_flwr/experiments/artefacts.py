"""Reads a run's global prototypes, the clients' last uploads, networks and data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pbfl_flwr.config import parse
from pbfl_flwr.data import ClientData, LoadedData
from pbfl_flwr.errors import PbflError, reading
from pbfl_flwr.experiments.results import FinishedRun
from pbfl_flwr.method import Method
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.registry import without_weights
from pbfl_flwr.payloads import Logits, Payload, Prototypes, WeightsAndPrototypes
from pbfl_flwr.prototypes.alignment import Geometry, align, geometry
from pbfl_flwr.prototypes.pipeline import Pipeline, PipelineState
from pbfl_flwr.runs.client_store import ClientState, ClientStore
from pbfl_flwr.runs.directory import BROADCAST, CHECKPOINT, RunDirectory
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.seeds import derive
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import is_external, own_code


def method_of(run: FinishedRun) -> Method[Any, Any, Any]:
    """Return the run's method.

    Raises:
        PbflError: if its configuration is of another version, or it is code that is not installed or not allowed.
    """
    for key in ("method", "aggregation"):
        check_allowed(run, str(run.config[key]))
    return build_method(parse(run.config, SECTIONS).allowing(run.allowed))


def check_allowed(run: FinishedRun, name: str) -> None:
    """Refuse to import code that a run directory, which may be untrusted, names unless the user allowed it."""
    if is_external(name) and name not in run.allowed:
        raise PbflError(
            f"'{name}' is code to be allowed: --import {name}, in Python FinishedRun.load(run, ['{name}'])"
        )


def global_prototypes(run: FinishedRun) -> Prototypes:
    """Return the global prototypes after the last round, in d dimensions and, under APS, multiplied by μ as by clients.

    Raises:
        PbflError: if the method broadcasts no prototypes or rows of another width, or the file is missing or damaged.
    """
    method, task, file = method_of(run), run.about.task, RunDirectory(run.path).state_file(BROADCAST)
    with reading(str(file)):
        sent = method.down.from_tensors(load_tensors(file)[0], task)
        prototypes = _prototypes(sent, "broadcasts")
        received = method.received(prototypes, task) if isinstance(method, Pipeline) else prototypes
    return _of_task_width(received, task)


def local_prototypes(run: FinishedRun) -> dict[int, Prototypes]:
    """Return client -> its last upload, in d dimensions.

    Raises:
        PbflError: if the clients' state is not on this machine, or the method uploads no prototypes or rows of another
            width.
    """
    method, task = method_of(run), run.about.task
    uploads = {}
    for client, state in client_states(run):
        with reading(f"client {client}'s last upload"):
            prototypes = _prototypes(method.up.from_tensors(state.reply, task), "uploads")
            dense = method.dense(prototypes, task) if isinstance(method, Pipeline) else prototypes
        uploads[client] = _of_task_width(dense, task)
    return uploads


def client_states(run: FinishedRun) -> Iterator[tuple[int, ClientState]]:
    """Yield (client, state) of the simulated clients that have trained, one at a time because networks may be large.

    Raises:
        PbflError: if no client's state is on this machine, or a file is damaged or cannot be read.
    """
    experiment = run.about.experiment
    directory = Path(str(run.config["state-dir"]) or run.path / "clients") / experiment
    none_found = True
    for client in run.about.clients:
        if not client.simulated:
            continue
        with reading(str(directory)):
            state = ClientStore(directory, experiment, client.client, client.architecture).load()
        if state is not None:
            none_found = False
            yield client.client, state
    if none_found:
        if run.about.simulated:
            raise PbflError(
                "the clients' own state is not here: the run was moved without it, or its method stores none unless "
                "client-states = 'always'"
            )
        raise PbflError("the clients' own state is not on this machine (devices keep theirs)")


def network(run: FinishedRun, client: int, state: ClientState) -> SplitModel:
    """Return a client's network with its weights, in evaluation mode on the CPU.

    Raises:
        PbflError: if its architecture cannot be built here, or is code that was not allowed.
    """
    architecture = run.architecture(client)
    check_allowed(run, architecture)
    model = build_model(without_weights(own_code(architecture, run.allowed)), run.about.task, run.seed)
    model.load_state_dict(dict(state.model))
    model.eval()
    return model


def data_of(run: FinishedRun, client: int, loaded: LoadedData | None = None) -> ClientData:
    """Return a client's part of the configured dataset, without downloading anything.

    Args:
        run: whose clients got theirs from the configured dataset.
        client: 0..M-1.
        loaded: keeps dataset and partition, for calls for other clients; None: both are made for this call.

    Raises:
        PbflError: if the dataset cannot be read here, or clients brought their own data.
    """
    if run.counts is None:
        raise PbflError("the clients brought their own data")
    for key in ("dataset", "partition"):
        check_allowed(run, str(run.config[key]))
    settings = parse(run.config, SECTIONS).allowing(run.allowed)
    with reading("the dataset"):
        data = settings.data.model_copy(update={"download": False})
        return (loaded or LoadedData()).client(data, settings.run.num_clients, client)


def target_scale(run: FinishedRun) -> float:
    """Return γ, by which clients multiply the global prototypes to get their targets; 1 if they do not."""
    method = method_of(run)
    return method.stages.upscale if isinstance(method, Pipeline) else 1.0


@dataclass(frozen=True)
class Trajectory:
    """The prototype alignment of the last round: number of prototypes, geometry before and after every step."""

    num_rows: int
    steps: tuple[Geometry, ...]


def alignment_trajectory(run: FinishedRun) -> Trajectory:
    """Recompute the prototype alignment of the last round.

    Raises:
        PbflError: if the method does not align, aligns in closed form, or trains its prototypes first, if the
            checkpoint is missing or damaged, or if fewer than two classes have a prototype.
    """
    task = run.about.task
    method = method_of(run)
    if not isinstance(method, Pipeline) or method.stages.alignment == "off":
        raise PbflError(f"{run.config['method']} does not align its prototypes")
    if method.stages.alignment == "simplex":
        raise PbflError("the simplex solver has no iterations")
    if method.server_training is not None:
        raise PbflError("the prototypes that the server trains before alignment are not saved")
    file = RunDirectory(run.path).state_file(CHECKPOINT)
    with reading(str(file)):
        combined = method.dense(PipelineState.from_tensors(load_tensors(file)[0], task).combined, task)
    steps: list[Geometry] = []
    align(
        combined.values,
        combined.present,
        method.stages.alignment,
        seed=derive(run.seed, "alignment"),
        watch=lambda units: steps.append(geometry(units)),
    )
    if len(steps) < 2:
        raise PbflError("fewer than two classes have a prototype")
    return Trajectory(combined.num_present, tuple(steps))


def saved_class_means(state: ClientState) -> tuple[Tensor, Tensor]:
    """Return a client's class means (K, d) and a mask (K,) of the classes it holds, from its saved state.

    Raises:
        PbflError: if the method saves none.
    """
    if not {"prototypes", "present"} <= set(state.memory):
        raise PbflError("the method's clients save no class means")
    return state.memory["prototypes"], state.memory["present"]


def _prototypes(sent: Payload, verb: str) -> Prototypes:
    prototypes = sent.prototypes if isinstance(sent, WeightsAndPrototypes) else sent
    if not isinstance(prototypes, Prototypes) or isinstance(prototypes, Logits):
        raise PbflError(f"the method {verb} no prototypes")
    if not prototypes.num_present:
        raise PbflError("no class has a prototype yet")
    return prototypes


def _of_task_width(prototypes: Prototypes, task: Task) -> Prototypes:
    width = prototypes.values.shape[1]
    if width != task.feature_dim:
        raise PbflError(f"the method's rows have {width} numbers, prototypes {task.feature_dim}")
    return prototypes
