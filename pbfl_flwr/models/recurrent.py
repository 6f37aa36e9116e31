"""Recurrent networks for text given as token ids, (B, length), with HtFLlib's sizes.

Embedding and hidden state have width d. A text ends at its last non-padding token; features come from the state there,
so that they depend neither on the amount of padding nor on the rest of the batch. The networks still run over all
positions, and the state is selected afterwards. Packed sequences would give the same, but need the lengths on the CPU:
that would synchronise with the GPU and prevent the network's export.

Differs from HtFLlib: its LSTM takes the last position of the batch's longest text, where all shorter ones are zero; its
BiLSTM takes the backward direction at the last token, where that direction has read nothing else, here it is taken
at the first token, after reading all; its BiLSTM trains an embedding for padding; all but its BiLSTM apply log_softmax
before the classifier. Initial weights are drawn in HtFLlib's order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import linear_head, replaced_classifier
from pbfl_flwr.models.text import PAD, check_tokens
from pbfl_flwr.task import Task

LAYERS = 2
DROPOUT = 0.2  # between the layers, and of the features


def lstm(task: Task) -> SplitModel:
    """LSTM for token ids: two layers of width d, dropout 0.2; ReLU of the state after the last token."""
    d, embedding = task.feature_dim, _embedding("lstm", task)
    stage = LastState(embedding, [nn.LSTM(d, d, batch_first=True) for _ in range(LAYERS)])
    replaced_classifier(d, task)
    return SplitModel(task, [stage], nn.Sequential(nn.ReLU(), nn.Dropout(DROPOUT)), linear_head(task))


def gru(task: Task) -> SplitModel:
    """GRU for token ids: two layers of width d, dropout 0.2; the state after the last token."""
    d, embedding = task.feature_dim, _embedding("gru", task)
    stage = LastState(embedding, [nn.GRU(d, d, batch_first=True) for _ in range(LAYERS)])
    replaced_classifier(d, task)
    return SplitModel(task, [stage], nn.Dropout(DROPOUT), linear_head(task))


def bilstm(task: Task) -> SplitModel:
    """BiLSTM for token ids: width d per direction, hidden layer d on the two final states."""
    d, embedding = task.feature_dim, _embedding("bilstm", task)
    readers = [nn.LSTM(d, d, batch_first=True) for _ in range(2)]
    neck = nn.Linear(2 * d, d)
    replaced_classifier(d, task)
    return SplitModel(task, [BothLastStates(embedding, *readers)], neck, linear_head(task))


class LastState(nn.Module):
    """Token ids (B, length) to the output of a recurrent network at the last token, (B, d).

    Layers are separate modules with torch's own dropout between them: cuDNN's dropout keeps a random state that seeds
    no longer affect once a process has used it.

    Args:
        embedding: of the tokens.
        layers: batch first, one direction; each reads the output of the one before.
    """

    def __init__(self, embedding: nn.Embedding, layers: Sequence[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the last layer's state at each text's last token."""
        *before, uppermost = self.layers
        words = self.embedding(ids)
        for layer in before:
            words = self.dropout(_outputs(layer, words))
        return _state(uppermost, words, last_places(ids))


class BothLastStates(nn.Module):
    """Token ids (B, length) to the states of two recurrent networks, (B, 2d): one reads forwards, one backwards.

    Args:
        embedding: of the tokens.
        forwards, backwards: batch first, one direction each; the second reads every text in reverse.
    """

    def __init__(self, embedding: nn.Embedding, forwards: nn.RNNBase, backwards: nn.RNNBase) -> None:
        super().__init__()
        self.embedding = embedding
        self.forwards = forwards
        self.backwards = backwards

    def forward(self, ids: Tensor) -> Tensor:
        """Return, concatenated, the forward state at the last token and the backward one at the first token."""
        words, last = self.embedding(ids), last_places(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        mirrored = last.unsqueeze(1) - places
        order = torch.where(mirrored < 0, places, mirrored)  # (B, length), padding stays after the text
        reverse = words.gather(1, order.unsqueeze(2).expand_as(words))
        return torch.cat([_state(self.forwards, words, last), _state(self.backwards, reverse, last)], dim=1)


def last_places(ids: Tensor) -> Tensor:
    """Return the position of each text's last non-padding token, (B,); 0 if all is padding."""
    return ((ids != PAD) * torch.arange(ids.shape[1], device=ids.device)).amax(dim=1)


def _outputs(reader: nn.Module, words: Tensor) -> Tensor:
    """Return the outputs of a recurrent layer, (B, length, d); in float32 on CPUs that have no bfloat16 LSTM."""
    reduced = words.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if reduced and isinstance(reader, nn.LSTM) and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        with torch.autocast("cpu", enabled=False):
            outputs: Tensor = reader(words.float())[0]
            return outputs
    outputs = reader(words)[0]
    return outputs


def _state(reader: nn.Module, words: Tensor, last: Tensor) -> Tensor:
    states = _outputs(reader, words)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)


def _embedding(model: str, task: Task) -> nn.Embedding:
    check_tokens(model, task)
    return nn.Embedding(task.vocabulary_size, task.feature_dim, padding_idx=PAD)
