"""A client's reply in the handshake: its properties, after checking that its network accepts its data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType

from pbfl_flwr import calls
from pbfl_flwr.data import ClientData
from pbfl_flwr.errors import PbflError, quoting_data
from pbfl_flwr.flower.client.device import choose_device, identify
from pbfl_flwr.flower.client.session import architecture_for
from pbfl_flwr.flower.client.worker import Run, Worker
from pbfl_flwr.flower.code_version import code_version
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.identity import digest
from pbfl_flwr.method import Client, Method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import count_parameters
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.models.pretrained import digest as digest_of_weights
from pbfl_flwr.task import Task
from pbfl_flwr.training.augmentation import check_augmentation
from pbfl_flwr.training.trial import SIZES, try_step
from pbfl_flwr.util.user_code import UserCode, returned


def answer_handshake(message: Message, context: Context, worker: Worker) -> Message:
    """Return the reply to a handshake, after a real step of the method with the client's network.

    Raises:
        PbflError: if a check fails.
    """
    run = worker.run_of(context)
    settings, method = run.settings, run.method
    identity = identify(context, settings, str(message.content.config_records[wire.CONFIG]["experiment"]))
    data = worker.data_of(settings, identity)
    if worker.source is not None:
        with quoting_data("the data of the app"):
            _check(data, worker.source)
    task = data.task(settings.models.feature_dim)
    architecture = architecture_for(settings, identity)
    check_augmentation(settings.training.augmentation, task)
    for name in calls.auxiliary_architectures(method):
        digest_of_weights(name)  # raises if they are missing
    device = choose_device(settings.training.device)
    built = worker.network(architecture, task, settings, device)
    body, head = count_parameters(built.network)
    attempt = (architecture, task, device, settings.fingerprint())
    if attempt not in worker.checked and _fits(architecture, method, task):
        client = Client(0, 1, task, built.network, data.on(device), seed=settings.run.seed)
        _try(architecture, run, client)
        worker.checked.add(attempt)
    texts = {
        "columns": digest(data.columns),
        "weights": digest_of_weights(architecture),
        "natural-id": data.natural_id,
        "deal": worker.deal_of(settings, identity),
    }
    properties = ConfigRecord(
        {
            **{
                key: text for key, text in texts.items() if text
            },  # Flower cannot count the bytes of empty ones
            "client": identity.client,
            "simulated": identity.simulated,
            "configured-data": worker.configured and not identity.own_data,
            "num-classes": task.num_classes,
            "feature-dim": task.feature_dim,
            "input-shape": list(task.input_shape),
            "vocabulary-size": task.vocabulary_size,
            "labels": list(data.label_names),
            "code-version": code_version(),
            "architecture": architecture,
            "parameters": [body, head],
            "device": str(device),
            "num-train": len(data.train.labels),
            "num-validation": len(data.validation.labels) if data.validation is not None else 0,
            "num-test": len(data.test.labels),
        }
    )
    return Message(wire.content(config=properties), reply_to=message)


def reason_of(error: PbflError, message: Message, context: Context) -> str:
    """Return why a message cannot be answered.

    In the handshake the reason of a device contains its client-id, which the server does not know yet.
    """
    reason = str(error)
    if message.metadata.message_type != MessageType.QUERY:
        return reason
    client_id = context.node_config.get("client-id")
    if client_id is not None and f"client-id = {client_id!r}" not in reason:
        reason = f"client-id = {client_id!r}: {reason}"
    server_code_version = str(message.content.config_records[wire.CONFIG].get("code-version", code_version()))
    if server_code_version != code_version():  # a possible cause
        reason += (
            f"; this device runs pbfl-flwr {code_version()}, the server {server_code_version}: install the same "
            "one"
        )
    return reason


def _fits(architecture: str, method: Method[Any, Any, Any], task: Task) -> bool:
    """Return whether the network fits the method; if not, the server will say so of all clients in one line.

    Raises:
        PbflError: if it does not, and is code that the server cannot look at.
    """
    try:
        method.check(task, [architecture])
    except PbflError:
        if isinstance(architecture, UserCode):
            raise
        return False
    return True


def _try(architecture: str, run: Run, client: Client) -> None:
    """Check that the network takes the client's data, and that the method can train it.

    Raises:
        PbflError: in one line, naming network and method.
    """
    outline = build_model(architecture, client.task, seed=0)
    for size in SIZES:
        dry_forward(architecture, outline, client.task, size)
    training, evaluation = run.settings.training, run.settings.evaluation
    try_step(architecture, run.method, replace(client, training=training, evaluation=evaluation))


def _check(data: object, source: object) -> None:
    """Check the data returned by an app's own data function.

    Raises:
        PbflError: naming the function, or the invalid part and what is allowed.
    """
    given = returned(source, data, ClientData)
    try:
        given.check()
    except PbflError as error:
        raise PbflError(f"the data from the app's data function: {error}") from None
