"""The state that a client stores after a round: for its next round, and for exporting its network."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING

import torch
from flwr.common import log
from pydantic import ValidationError
from torch import Tensor

from pbfl_flwr.flower.client.session import ClientSession
from pbfl_flwr.flower.messages.report import Report, plain
from pbfl_flwr.method import Nearest, Predictor, Update, WithInputs, resolved_moment
from pbfl_flwr.payloads import Payload
from pbfl_flwr.runs.client_store import ClientState
from pbfl_flwr.runs.saved_model import Card, fault


def needs_state(session: ClientSession, update: Update[Payload]) -> bool:
    """Whether the client's next round depends on anything that it would have to keep, or its state is asked for."""
    settings, method, model = session.settings, session.method, session.client.model
    if settings.run.client_states == "always" or not method.keeps_nothing:
        return True
    scored_after = (
        resolved_moment(settings.evaluation, method) == "after"
    )  # with the network of its last training
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return scored_after or bool(update.memory) or bool(model.state_dict().keys() - parameters)


def state_after_round(
    session: ClientSession,
    reply: Mapping[str, Tensor],
    memory: Mapping[str, Tensor],
    predictors: Mapping[str, Predictor],
    report: Report,
) -> ClientState:
    """Return the client's state after it has trained."""
    alone = not any(isinstance(predictor, WithInputs) for predictor in predictors.values())
    return ClientState(
        session.client.round,
        report.participations,
        {name: tensor.detach().cpu() for name, tensor in session.client.model.state_dict().items()},
        memory,
        reply,
        plain(report.to_record()),
        _card(session, report.participations) if alone else "",
        _prototypes(predictors),
        session.server_state,
    )


def _card(session: ClientSession, participations: int) -> str:
    """Return the card with which the client's network can be used elsewhere, as JSON.

    Empty, with a warning after the client's first training, if a value is not allowed in a card. That is no error,
    because a card is only needed for export.
    """
    try:
        return _build_card(session, participations).model_dump_json()
    except ValueError as error:  # pydantic's, from validation or serialisation
        reason = fault(error) if isinstance(error, ValidationError) else str(error)
        if participations == 1:
            log(WARNING, "client %s: its model cannot be exported (%s)", session.client.key, reason)
        return ""


def _build_card(session: ClientSession, participations: int) -> Card:
    client, data = session.client, session.client.data
    scale, shift = data.scale, data.shift
    if data.vocabulary_size:  # ids are fed unchanged
        scale, shift = torch.ones(()), torch.zeros(())
    return Card(
        method=session.method.name,
        client=str(client.key),
        architecture=session.store.architecture,
        round=client.round,
        participations=participations,
        num_classes=client.task.num_classes,
        feature_dim=client.task.feature_dim,
        input_shape=client.task.input_shape,
        labels=tuple(data.label_names),
        columns=tuple(data.columns),
        vocabulary_size=data.vocabulary_size,
        images=data.train.inputs.dtype is torch.uint8,
        scale=_by_channel("scale", scale, client.task.input_shape),
        shift=_by_channel("shift", shift, client.task.input_shape),
        unit_features=session.method.unit_features,
        natural_id=data.natural_id,
    )


def _by_channel(name: str, values: Tensor, input_shape: tuple[int, ...]) -> tuple[float, ...]:
    """Return the number of each channel, as which a card has scale and shift; raises ValueError if one has several."""
    channels = values.broadcast_to(input_shape).reshape(input_shape[0], -1)
    if not torch.equal(channels, channels[:, :1].expand_as(channels)):
        raise ValueError(f"{name} has the shape {tuple(values.shape)}; must be a number by channel")
    return tuple(channels[:, 0].tolist())


def _prototypes(predictors: Mapping[str, Predictor]) -> dict[str, Tensor]:
    """Return the tables of nearest-prototype predictors: rows (K, d) and candidates (K,).

    Rows that are the same as those of ``global`` are stored only once.
    """
    tables: dict[str, Tensor] = {}
    for name, predictor in predictors.items():
        if type(predictor) is Nearest:  # what one of a user's computes is not known elsewhere
            tables[f"{name}.candidates"] = predictor.candidates
            if predictor.prototypes is not tables.get("global.rows"):
                tables[f"{name}.rows"] = predictor.prototypes
    return tables
