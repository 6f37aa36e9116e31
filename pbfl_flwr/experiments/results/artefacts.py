"""What a run directory holds beyond its histories: global prototypes, the clients' uploads, networks and data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pbfl_flwr.architectures import fresh
from pbfl_flwr.config import Settings, parse
from pbfl_flwr.data import ClientData, client_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.results.records import Record
from pbfl_flwr.flower.storage.store import ClientState, ClientStore, load_tensors
from pbfl_flwr.method import Method
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models import SplitModel, build_model
from pbfl_flwr.own_code import is_external
from pbfl_flwr.payloads import Logits, Payload, Prototypes, RejectedPayload, WeightsAndPrototypes
from pbfl_flwr.prototypes.alignment import align
from pbfl_flwr.prototypes.pipeline import Pipeline, PipelineState
from pbfl_flwr.prototypes.sphere import Geometry, geometry
from pbfl_flwr.seeds import derive
from pbfl_flwr.task import Task


class NotThere(PbflError):
    """A run does not hold what was asked for; the text says why."""


def settings_of(record: Record) -> Settings:
    """Return the run's settings.

    Raises:
        NotThere: if another version of this package wrote keys that this one does not know.
    """
    try:
        return parse(record.config, SECTIONS)
    except PbflError as error:
        raise NotThere(f"its configuration is of another version ({str(error).splitlines()[0]})") from None


def method_of(record: Record) -> Method[Any, Any, Any]:
    """Return the run's method.

    Raises:
        NotThere: if it cannot be built here, as one outside of this package that is not installed or not allowed.
    """
    _check_allowed(record, str(record.config["method"]))
    try:
        return build_method(settings_of(record))
    except PbflError as error:
        raise NotThere(str(error).splitlines()[0]) from None


def _check_allowed(record: Record, name: str) -> None:
    """Check that somebody asked for code to be imported that a run directory, which may be a stranger's, names."""
    if is_external(name) and name not in record.allowed:
        raise NotThere(
            f"'{name}' is code to import; pbfl report --import {name} does, in Python Record.load(run, ['{name}'])"
        )


def task_of(record: Record) -> Task:
    """Return what its clients agreed on."""
    return Task.from_record(record.about["clients"][0]["task"])


def global_prototypes(record: Record) -> Prototypes:
    """Return what the server broadcast after the last round, in d dimensions.

    Raises:
        NotThere: if the method broadcasts no prototypes, or the file is missing or damaged.
    """
    method, task = method_of(record), task_of(record)
    tensors = _tensors(record.path / "prototypes.safetensors")
    try:
        sent = method.down.from_tensors(tensors, task)
    except (RejectedPayload, KeyError) as error:
        raise NotThere(f"prototypes.safetensors is not of this method ({error})") from None
    return _dense(method, _prototypes(sent, "broadcasts"), task)


def local_prototypes(record: Record) -> dict[int, Prototypes]:
    """Return client -> its last upload, in d dimensions.

    Raises:
        NotThere: if the clients' state is not here, or the method uploads no prototypes.
    """
    method, task = method_of(record), task_of(record)
    found = {}
    for client, state in client_states(record):
        try:
            sent = method.up.from_tensors(state.reply, task)
        except (RejectedPayload, KeyError) as error:
            raise NotThere(f"client {client}'s last upload is not of this method ({error})") from None
        found[client] = _dense(method, _prototypes(sent, "uploads"), task)
    return found


def client_states(record: Record) -> Iterator[tuple[int, ClientState]]:
    """Yield (client, what it kept) of those that have trained, one at a time: networks may be large.

    Raises:
        NotThere: if no client's state lies on this machine, or a file is damaged or may not be read.
    """
    given = str(record.config["state-dir"])
    directory = (Path(given) if given else record.path / "clients") / str(record.about["experiment"])
    nobody = True
    for member in record.about["clients"]:
        if not member["simulated"]:
            continue
        store = ClientStore(
            directory, str(record.about["experiment"]), member["client"], member["architecture"]
        )
        try:
            state = store.load()
        except PbflError as error:
            raise NotThere(str(error)) from None
        except OSError as error:
            raise _unreadable("the clients' own state", directory, error) from None
        if state is not None:
            nobody = False
            yield member["client"], state
    if nobody:
        raise NotThere("the clients' own state is not here (devices keep it to themselves)")


def network(record: Record, client: int, state: ClientState) -> SplitModel:
    """Return a client's network with its weights, in evaluation mode on the CPU.

    Raises:
        NotThere: if its architecture cannot be built here, or is code that was not allowed.
    """
    architecture = next(
        member["architecture"] for member in record.about["clients"] if member["client"] == client
    )
    _check_allowed(record, architecture)
    try:
        model = build_model(fresh(architecture), task_of(record), record.seed)
    except PbflError as error:
        raise NotThere(f"the network of client {client} cannot be built ({error})") from None
    model.load_state_dict(dict(state.model))
    model.eval()
    return model


def data_of(record: Record, client: int) -> ClientData:
    """Return a client's share of the configured dataset, as far as it lies here: nothing is downloaded for a picture.

    Raises:
        NotThere: if the dataset cannot be read here, or clients brought their own.
    """
    if record.counts is None:
        raise NotThere("the clients brought their own data")
    settings = settings_of(record)
    try:
        data = settings.data.model_copy(update={"download": False})
        return client_data(data, settings.run.num_clients, client)
    except (PbflError, OSError) as error:
        raise NotThere(f"the dataset cannot be read here ({error})") from None


def target_scale(record: Record) -> float:
    """Return the factor between broadcast prototypes and what clients pull towards, 1 where there is none."""
    method = method_of(record)
    return method.stages.upscale if isinstance(method, Pipeline) else 1.0


@dataclass(frozen=True)
class Trajectory:
    """The alignment of the last round, redone from what the server kept.

    Attributes:
        num_rows: prototypes that took part, K.
        steps: geometry before the first and after every step.
    """

    num_rows: int
    steps: tuple[Geometry, ...]


def alignment_trajectory(record: Record) -> Trajectory:
    """Return how the last round's prototype alignment went.

    Raises:
        NotThere: if the method does not align, aligns in closed form, or trains its prototypes first.
    """
    task = task_of(record)
    method = method_of(record)
    if not isinstance(method, Pipeline) or method.stages.alignment == "off":
        raise NotThere(f"{record.config['method']} does not align its prototypes")
    if method.stages.alignment == "simplex":
        raise NotThere("the simplex solver has no iterations")
    if method.server_training is not None:
        raise NotThere("what the server trains before it aligns is not kept")
    tensors = _tensors(record.path / "checkpoint.safetensors")
    try:
        combined = method.dense(PipelineState.from_tensors(tensors, task).combined, task)
    except (RejectedPayload, KeyError) as error:
        raise NotThere(f"checkpoint.safetensors is not of this method ({error})") from None
    steps: list[Geometry] = []
    align(
        combined.values,
        combined.present,
        method.stages.alignment,
        seed=derive(record.seed, "alignment"),
        watch=lambda units: steps.append(geometry(units)),
    )
    if len(steps) < 2:
        raise NotThere("fewer than two classes have a prototype")
    return Trajectory(combined.num_present, tuple(steps))


def own_means(state: ClientState) -> tuple[Tensor, Tensor]:
    """Return a client's own class means (K, d) and which classes it holds (K,), as it keeps them.

    Raises:
        NotThere: if the method keeps none.
    """
    if not {"prototypes", "held"} <= set(state.memory):
        raise NotThere("the method's clients keep no class means")
    return state.memory["prototypes"], state.memory["held"]


def _tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        return load_tensors(file)[0]
    except FileNotFoundError:
        raise NotThere(f"{file.name} is missing") from None
    except PbflError as error:
        raise NotThere(str(error)) from None
    except OSError as error:
        raise _unreadable(file.name, file.parent, error) from None


def _unreadable(what: str, place: Path, error: OSError) -> NotThere:
    """Return what is said of files that may be another user's."""
    return NotThere(f"{what} in {place} cannot be read ({error.strerror or error})")


def _prototypes(sent: Payload, verb: str) -> Prototypes:
    found = sent.prototypes if isinstance(sent, WeightsAndPrototypes) else sent
    if not isinstance(found, Prototypes) or isinstance(found, Logits):
        raise NotThere(f"the method {verb} no prototypes")
    if not found.num_present:
        raise NotThere("no class has a prototype yet")
    return found


def _dense(method: object, found: Prototypes, task: Task) -> Prototypes:
    return method.dense(found, task) if isinstance(method, Pipeline) else found
