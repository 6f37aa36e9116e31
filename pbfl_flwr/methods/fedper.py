"""FedPer: the body is averaged, the head is private.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.

Round: each client copies the global body θ under its own head φ_i and runs E epochs of SGD on cross-entropy over
both together. It sends the body; the server averages, θ <- Σ_i (n_i/Σn)·θ_i. The head persists on its client.
Travels: the body's parameters, both ways, and n_i. BatchNorm's buffers stay on the client.
Predicts: the logits of the received body under the client's own head, scored before local training.
Differs from the paper: the private layers are the head (PFLlib, FedCPD); fedper.shared="stages" keeps a hidden
layer before the head private as well, as FedProto's repository does ("auto" follows the protocol).
Differs from the references: Flower's baseline averages BatchNorm's buffers too and evaluates never-trained clients
with a global head; here all heads start from one seed instead.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.methods.averaging import Part
from pbfl_flwr.methods.sharing import SharedWeights

Shared = Literal["auto", "body", "stages"]


class Config(Group):
    """Settings ``fedper.*``."""

    shared: Shared = Field(
        "auto",
        description="body: average the whole body; stages: keep its last hidden layer private too; auto: by protocol",
    )


def shared_part(shared: Shared, settings: Settings) -> Part:
    """Return the shared part: the stages under the protocol of FedProto's repository, else the body."""
    if shared == "auto":
        return "stages" if settings.run.protocol == "fedproto" else "body"
    return shared


def build(settings: Settings) -> SharedWeights:
    """Return the method."""
    return SharedWeights.configured(
        "fedper", settings, shared_part(parse_section(Config, settings).shared, settings)
    )
