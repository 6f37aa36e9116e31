"""The exported network: raw inputs in, logits and features out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.registry import without_weights
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.util.user_code import is_external, own_code


class Served(nn.Module):
    """A client's network with its normalisation: (B, *input_shape) -> logits (B, K), features (B, d).

    Inputs are float32: images as stored, 0 to 255, other numbers unchanged; token ids are int64.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: SplitModel, card: Card) -> None:
        super().__init__()
        self.model = model
        self.unit_features = card.unit_features
        self.reads_tokens = bool(card.vocabulary_size)
        shape = (card.input_shape[0], *(1 for _ in card.input_shape[1:]))
        self.register_buffer("scale", torch.tensor(card.scale).reshape(shape))
        self.register_buffer("shift", torch.tensor(card.shift).reshape(shape))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, features)."""
        normalised = inputs if self.reads_tokens else inputs * self.scale + self.shift
        features: Tensor = self.model.features(normalised)
        head_inputs = F.normalize(features, dim=1) if self.unit_features else features
        logits: Tensor = self.model.head(head_inputs)
        return logits, features


def rebuild(card: Card, weights: Mapping[str, Tensor], allowed_code: frozenset[str], where: str) -> Served:
    """Return the network in evaluation mode, from its architecture's name and its weights.

    Args:
        card: names the architecture.
        weights: its state, buffers included.
        allowed_code: each ``my_package.module:function`` that may be imported for it.
        where: named in errors.

    Raises:
        PbflError: if the architecture is unknown or code that was not allowed, or the weights do not fit it.
    """
    if is_external(card.architecture) and card.architecture not in allowed_code:
        raise PbflError(
            f"{where}: its architecture is the code {card.architecture}, which runs with all your permissions; "
            f"allow it with --model {card.architecture}"
        )
    name = without_weights(own_code(card.architecture, allowed_code))
    try:
        if not is_external(name):  # before allocating memory for the sizes that a card claims
            with torch.device("meta"):
                outline = build_model(name, card.task, seed=0)
            outline.load_state_dict({key: tensor.to("meta") for key, tensor in weights.items()})
        model = build_model(name, card.task, seed=0)
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()[:300]
        raise PbflError(f"{where}: the weights are not those of {card.architecture} ({reason})") from error
    return Served(model, card).eval()
