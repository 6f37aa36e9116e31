"""The server's averaged network, as a model for use elsewhere.

A server only has weights. Normalisation, class names and BatchNorm's running statistics, which stay on clients, come
from the clients: :func:`averaged` reads their states in the run directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Method
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.methods.averaging import average, copies, copy_into, shared_parameters
from pbfl_flwr.payloads import RejectedPayload, Weights
from pbfl_flwr.runs.directory import BEST, CHECKPOINT, RunDirectory
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.serving.network import rebuild
from pbfl_flwr.serving.states import UNKEPT, SavedModel, read_state, states_of
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import is_external

SAME = ("labels", "columns", "vocabulary_size", "input_shape", "images", "scale", "shift")


def averaged(run: Path, *, best: bool = False, allowed_code: frozenset[str] = frozenset()) -> SavedModel:
    """Return the network of a run's server: its weights after the last round, or those of the best round.

    Running statistics are the mean over clients, weighted by their training samples where the run knows them.

    Args:
        run: its directory.
        best: take the weights with the best client scores (``best.safetensors``).
        allowed_code: see :func:`pbfl_flwr.serving.network.rebuild`.

    Raises:
        PbflError: if it is not a run, its server holds no whole network, no client's state is found, or clients differ
            in inputs, normalisation or class names.
    """
    record = RunDirectory(run).record()
    method = _method(record.configuration)
    clients = {client.label: client for client in record.clients}
    states = _clients(run, {label: client.architecture for label, client in clients.items()})
    first = next(states)
    parameters, number = _weights(
        RunDirectory(run).state_file(BEST if best else CHECKPOINT), method, first.card.task
    )
    served = rebuild(first.card, first.weights, allowed_code, str(run))
    model = served.model
    parts = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = [name for name in first.weights if name not in parts]  # persistent ones, under all their names
    samples = {label: client.num_train for label, client in clients.items()}
    means = _mean(chain([first], states), buffers, samples)
    model.load_state_dict({**first.weights, **means})
    tensors = {**shared_parameters(model, "head"), **shared_parameters(model, "all")}  # own names come first
    copy_into(tensors, parameters)
    card = first.card.model_copy(update={"client": "", "round": number, "participations": 0})
    return SavedModel(card, copies(model.state_dict()), {})


def _method(configuration: Mapping[str, Any]) -> Method[Any, Any, Any]:
    name = str(configuration["method"])
    if is_external(name):  # a run directory may be untrusted
        raise PbflError(
            f"--global: method '{name}' is code of your own, which is not imported here; export a client's "
            "network with --client"
        )
    return build_method(parse(configuration, SECTIONS).allowing(()))


def _weights(file: Path, method: Method[Any, Any, Any], task: Task) -> tuple[Mapping[str, Tensor], int]:
    """Return the parameters by name, and the number of rounds."""
    try:
        tensors, metadata = load_tensors(file)
        number = int(metadata["round"])
        parameters = method.network(method.state.from_tensors(tensors, task))
    except FileNotFoundError:
        raise PbflError(f"--global: {file} does not exist; no round was finished or scored") from None
    except (RejectedPayload, KeyError, ValueError) as error:
        raise PbflError(f"{file} does not hold a server state of method '{method.name}': {error}") from None
    if not parameters:
        raise PbflError(
            f"--global: the server of '{method.name}' holds no complete network; export a client's with --client, "
            "or use prototypes.safetensors, which the server sent last"
        )
    return parameters, number


def _clients(run: Path, networks: Mapping[str, str]) -> Iterator[SavedModel]:
    """Yield the kept models of the run's clients, at least one; all must agree in ``SAME``."""
    if not (files := states_of(run)):
        raise PbflError(
            f"--global: {run} holds no client state, which has class names, normalisation and running "
            f"statistics{UNKEPT}"
        )
    first: Card | None = None
    labels: set[str] = set()
    for file in files:
        state = read_state(file)
        who, architecture = state.card.client, state.card.architecture
        if networks.get(who) != architecture:
            hint = f"; in the run it has {networks[who]}" if who in networks else ""
            raise PbflError(
                f"--global: {file}: client {who} with {architecture} is not one of the run's clients{hint}"
            )
        if who in labels:
            raise PbflError(f"--global: client {who} has two states, one is {file}; remove the older one")
        labels.add(who)
        first = first or state.card
        if differences := [name for name in SAME if getattr(state.card, name) != getattr(first, name)]:
            raise PbflError(
                f"--global: clients {first.client} and {state.card.client} differ in {differences[0]}; must be the "
                "same in all"
            )
        yield state


def _mean(
    clients: Iterable[SavedModel], names: Sequence[str], samples: Mapping[str, int]
) -> Mapping[str, Tensor]:
    """Return the weighted mean of the floating-point buffers (no counters).

    Raises:
        PbflError: if none of the clients has training samples.
    """
    buffers = {}
    for number, state in enumerate(clients):
        means = {name: state.weights[name] for name in names if state.weights[name].is_floating_point()}
        buffers[number] = Weights(means, samples[state.card.client])
    if buffers[0].tensors and not any(each.num_examples for each in buffers.values()):
        raise PbflError(
            "--global: none of the clients has training samples, so their running statistics cannot be averaged"
        )
    return average(buffers[0], buffers, "samples").tensors
