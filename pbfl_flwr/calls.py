"""Calls of a method's functions that check what comes back, since users write methods.

A function that returns something else is named with the place of its definition, where its result arrives and not where
something uses it later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from numbers import Real
from operator import index
from typing import Any

from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method, Predictor, Update
from pbfl_flwr.payloads import Payload, Prototypes, Serializable, Upload, check_storable
from pbfl_flwr.payloads.contract import Magnitudes
from pbfl_flwr.payloads.metrics import check_metrics
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import named, returned, wrong_result

AnyMethod = Method[Any, Any, Any]


def first_state(method: AnyMethod, task: Task, seed: int) -> Serializable:
    """Return the server's state before round 1.

    Raises:
        PbflError: if it is not of the method's type ``state``, or holds a table of prototypes without K rows.
    """
    return as_state(method, method.init(task, seed), method.init, task)


def as_state(method: AnyMethod, state: object, function: object, task: Task) -> Serializable:
    """Return the state that a function has returned.

    Raises:
        PbflError: naming the function, if it is not of the method's type ``state``, or holds a table of prototypes
            without K rows.
    """
    checked: Serializable = returned(function, state, method.state)
    _need_all_rows(function, checked, task)
    return checked


def broadcast(method: AnyMethod, state: object, client: int, task: Task) -> Payload:
    """Return the payload for one client.

    Raises:
        PbflError: if it is not of the method's type ``down``, or holds a table of prototypes without K rows.
    """
    down: Payload = returned(method.broadcast, method.broadcast(state, client), method.down)
    _need_all_rows(method.broadcast, down, task)
    return down


def _need_all_rows(function: object, result: object, task: Task) -> None:
    """Check the tables of prototypes in a result: on the wire, which has present classes only, none is missed."""
    for table in _tables_in(result):
        for name in ("values", "present", "counts"):
            part = getattr(table, name)
            if part is None or (isinstance(part, Tensor) and part.shape[:1] == (task.num_classes,)):
                continue
            found = (
                f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"type {type(part).__name__}"
            )
            raise PbflError(
                f"{named(function)} returned a table whose '{name}' is of {found}; must be a tensor of "
                f"K = {task.num_classes} rows, also for classes that are not present"
            )


def _tables_in(result: object) -> Iterator[Prototypes]:
    if isinstance(result, Prototypes):
        yield result
    elif is_dataclass(result):
        for one in fields(result):
            yield from _tables_in(getattr(result, one.name))
    elif isinstance(result, (dict, list, tuple)):
        for part in result.values() if isinstance(result, dict) else result:
            yield from _tables_in(part)


def local_update(method: AnyMethod, client: Client, down: Payload) -> Update[Any]:
    """Train a client and return its update, whose memory is where the client's next message has it: on the CPU.

    Raises:
        PbflError: if it is no Update, its payload is not of the method's type ``up`` or holds a table of prototypes
            without K rows, its memory holds anything else than tensors by name, or one that safetensors does not have,
            or its metrics cannot be sent.
    """
    function = method.local_update
    update: Update[Any] = returned(function, function(client, down), Update)
    memory = update.memory
    if not isinstance(update.payload, method.up):
        one = f"one with a {method.up.__name__}"
        raise wrong_result(function, update.payload, one, "an Update with the payload ")
    _need_all_rows(function, update.payload, client.task)
    if not (
        isinstance(memory, Mapping)
        and all(isinstance(name, str) and isinstance(kept, Tensor) for name, kept in memory.items())
    ):
        raise wrong_result(function, memory, "one with tensors by name", "an Update with the memory ")
    for name, kept in memory.items():
        check_storable(f"{named(function)} returned an Update whose memory '{name}'", kept)
    if not isinstance(update.metrics, Mapping):
        raise wrong_result(
            function, update.metrics, "one with numbers by name", "an Update with the metrics "
        )
    try:
        check_metrics(update.metrics)
    except PbflError as error:
        raise PbflError(f"{named(function)} returned an Update whose {error}") from None
    kept_here = {name: kept.detach().cpu() for name, kept in memory.items()}
    return Update(update.payload, kept_here, update.metrics)


def scalars(payload: Payload) -> int:
    """Return how many numbers of a payload travel.

    Raises:
        PbflError: if it is no whole number.
    """
    found: Any = payload.scalars()
    try:
        return index(found)
    except TypeError:
        raise wrong_result(payload.scalars, found, "a whole number") from None


def classes(upload: Upload, task: Task) -> list[int] | None:
    """Return the classes present in an upload, None if it is not organised by class.

    Raises:
        PbflError: if they are no classes of the task.
    """
    found: Any = upload.classes(task)
    if found is None:
        return None
    with suppress(TypeError):
        labels = [index(label) for label in found]
        if all(0 <= label < task.num_classes for label in labels):
            return labels
    raise wrong_result(upload.classes, found, f"class ids from 0 to {task.num_classes - 1}, or None")


def magnitudes(upload: Upload) -> Magnitudes:
    """Return how large the numbers of an upload are.

    Raises:
        PbflError: if they are no Magnitudes, or these hold anything else than numbers.
    """
    found = returned(upload.magnitudes, upload.magnitudes(), Magnitudes)
    try:
        rows = {index(label): float(size) for label, size in found.rows.items()}
        tensors = {str(name): float(size) for name, size in found.tensors.items()}
        return Magnitudes(rows, tensors, index(found.samples), bool(found.once))
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
        raise PbflError(
            f"{named(upload.magnitudes)} returned Magnitudes that are no numbers; must have rows by class, tensors by "
            "name, and whole samples"
        ) from None


def predictors(method: AnyMethod, client: Client, down: Payload) -> Mapping[str, Predictor]:
    """Return the predictors of a client by name.

    Raises:
        PbflError: if they are no functions by name.
    """
    found = method.predictors(client, down)
    if not (isinstance(found, Mapping) and all(map(callable, found.values()))):
        raise wrong_result(
            method.predictors, found, "functions by name, each from features and logits to scores"
        )
    return found


def report(method: AnyMethod, state: object) -> Mapping[str, float]:
    """Return the server's metrics.

    Raises:
        PbflError: if they are no numbers by name.
    """
    metrics = method.report(state)
    if not (
        isinstance(metrics, Mapping)
        and all(isinstance(name, str) and isinstance(value, Real) for name, value in metrics.items())
    ):
        raise wrong_result(method.report, metrics, "numbers by name")
    return metrics


def warnings(method: AnyMethod, num_rounds: int, state: object = None) -> list[str]:
    """Return the warnings before a run, or after a round.

    Raises:
        PbflError: if they are no list of texts.
    """
    lines = method.warnings(num_rounds, state)
    if not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
        raise wrong_result(method.warnings, lines, "a list of texts")
    return lines


def paper_scalars(method: AnyMethod, task: Task, class_counts: Sequence[int]) -> float | None:
    """Return the papers' cost, None if undefined.

    Raises:
        PbflError: if it is no number.
    """
    cost = method.paper_scalars(task, class_counts)
    if not (cost is None or isinstance(cost, Real)):
        raise wrong_result(method.paper_scalars, cost, "a number, or None if it is undefined")
    return cost


def auxiliary_architectures(method: AnyMethod) -> tuple[str, ...]:
    """Return the architectures of networks that every client builds besides its own.

    Raises:
        PbflError: if they are no tuple.
    """
    return returned(method.auxiliary_architectures, method.auxiliary_architectures(), tuple)
