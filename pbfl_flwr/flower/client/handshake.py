"""A client's reply in the handshake: its properties, after checking that its network accepts its data."""

from __future__ import annotations

from functools import lru_cache

from flwr.app import ConfigRecord, Context, Message, MessageType

from pbfl_flwr.data import ClientData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.device import choose_device, identify
from pbfl_flwr.flower.client.session import ClientSource, architecture_for, configured_data
from pbfl_flwr.flower.code_version import code_version
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.identity import digest
from pbfl_flwr.methods import build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import count_parameters
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.models.pretrained import digest as digest_of_weights
from pbfl_flwr.models.registry import without_weights
from pbfl_flwr.task import Task
from pbfl_flwr.training.augmentation import check_augmentation
from pbfl_flwr.util.user_code import UserCode


def answer_handshake(message: Message, context: Context, source: ClientSource) -> Message:
    """Return the reply to a handshake, after a dry run of the client's network on inputs of its data's shape.

    Raises:
        PbflError: if a check fails.
    """
    settings = source.settings_of(context)
    identity = identify(context, settings, str(message.content.config_records[wire.CONFIG]["experiment"]))
    data = source.data_of(settings, identity)
    if source.data is not configured_data:
        _check(data)
    task = data.task(settings.models.feature_dim)
    architecture = architecture_for(settings, identity)
    check_augmentation(settings.training.augmentation, task)
    _dry_forward(architecture, task)
    device = choose_device(settings.training.device)
    method = build_method(settings)
    if isinstance(architecture, UserCode):  # which the server cannot look at
        method.check(task, [architecture])
    for name in method.auxiliary_architectures():
        digest_of_weights(name)  # raises if they are missing
    body, head = _parameters(architecture, task, settings.training.layout, settings.training.precision)
    full = settings.privacy.client_report == "full"
    texts = {
        "columns": digest(data.columns),
        "weights": digest_of_weights(architecture),
    }
    properties = ConfigRecord(
        {
            **{
                key: text for key, text in texts.items() if text
            },  # Flower cannot count the bytes of empty ones
            "client": identity.client,
            "simulated": identity.simulated,
            "configured-data": source.data is configured_data and not identity.own_data,
            "num-classes": task.num_classes,
            "feature-dim": task.feature_dim,
            "input-shape": list(task.input_shape),
            "vocabulary-size": task.vocabulary_size,
            "labels": list(data.label_names),
            "code-version": code_version(),
            "architecture": architecture,
            "parameters": [body, head],
            "device": str(device),
            "num-train": len(data.train.labels) if full else 0,
            "num-test": len(data.test.labels) if full else 0,
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


def _check(data: object) -> None:
    """Check the data returned by an app's own data function.

    Raises:
        PbflError: giving their type or the invalid part, and what is allowed.
    """
    if not isinstance(data, ClientData):
        raise PbflError(f"the app's data function returned a {type(data).__name__}: must be a ClientData")
    try:
        data.check()
    except PbflError as error:
        raise PbflError(f"the data from the app's data function: {error}") from None


def clear_checks() -> None:
    """Clear the cached results of network checks."""
    _dry_forward.cache_clear()
    _parameters.cache_clear()


@lru_cache(maxsize=64)
def _dry_forward(architecture: str, task: Task) -> None:
    dry_forward(architecture, build_model(architecture, task, seed=0), task)


@lru_cache(maxsize=64)
def _parameters(architecture: str, task: Task, layout: str, precision: str) -> tuple[int, int]:
    return count_parameters(
        optimize_layout(build_model(without_weights(architecture), task, 0), layout, precision)
    )
