"""Transformers for text given as token ids, (B, length), with HtFLlib's sizes.

The input is the embedding of width d times √d plus sinusoidal position encodings. Features are the last layer's output
at the first position, where every text has <cls>. Padding is masked, so features do not depend on its amount.

Differs from HtFLlib: there padding has a trained embedding and is attended to. As there, all layers begin with the same
weights, as torch.nn.TransformerEncoder copies them.
"""

import math

import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import linear_head
from pbfl_flwr.models.text import PAD, check_tokens
from pbfl_flwr.task import Task

HIDDEN = 2048  # units of a layer's MLP
DROPOUT = 0.1
RANGE = 0.1  # of the initial embedding's values
MOST_LAYERS = 64


def transformer(task: Task, heads: int, layers: int) -> SplitModel:
    """Transformer for token ids, transformer-HEADS-LAYERS: width d, MLP 2048; the output at <cls>.

    Raises:
        PbflError: if inputs are no token ids, the heads do not divide d, or there are too many layers.
    """
    name, d = f"transformer-{heads}-{layers}", task.feature_dim
    check_tokens(name, task)
    if d % heads:
        raise PbflError(
            f"model '{name}': its {heads} heads must divide feature-dim = {d}; give one of the divisors of {d}"
        )
    if layers > MOST_LAYERS:
        raise PbflError(f"model '{name}': found {layers:,} layers, must be at most {MOST_LAYERS}")
    encoder = Encoder(task, heads, layers)
    # As in HtFLlib, which draws both again and then replaces the classifier.
    for weight in (encoder.embedding.weight, nn.Linear(d, task.num_classes).weight):
        nn.init.uniform_(weight, -RANGE, RANGE)
    nn.init.zeros_(encoder.embedding.weight[PAD])
    return SplitModel(task, [encoder], nn.Identity(), linear_head(task))


class Encoder(nn.Module):
    """Token ids (B, length) to the last layer's output at the first position, (B, d).

    Args:
        task: the vocabulary, the length and d.
        heads: of every layer; must divide d.
        layers: number of layers.
    """

    places: Tensor

    def __init__(self, task: Task, heads: int, layers: int) -> None:
        super().__init__()
        d = task.feature_dim
        layer = nn.TransformerEncoderLayer(d, heads, HIDDEN, DROPOUT, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.embedding = nn.Embedding(task.vocabulary_size, d, padding_idx=PAD)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("places", sines(task.input_shape[0], d), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the last layer's output at the first position."""
        words = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim) + self.places
        # The first position is never masked: a text of padding alone would have nothing to attend to.
        padding = (ids == PAD) & (torch.arange(ids.shape[1], device=ids.device) > 0)
        encoded: Tensor = self.layers(self.dropout(words), src_key_padding_mask=padding)
        return encoded[:, 0]


def sines(length: int, width: int) -> Tensor:
    """Return (length, width): for position p, sin(p·ω_i) and cos(p·ω_i) in turn with ω_i = 10000^(-2i/width)."""
    angles = torch.arange(length).unsqueeze(1) * torch.exp(
        torch.arange(0, width, 2) * (-math.log(10_000) / width)
    )
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]
