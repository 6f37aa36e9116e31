"""Networks for text given as token ids, (B, length), with HtFLlib's sizes: fastText, TextCNN, logistic regression.

All set the width of the embedding, and of the hidden layer if there is one, to d. That layer has no activation, so
features may be negative. HtFLlib's text models apply log_softmax to the output of whatever replaces their classifier,
so prototypes there are means of log_softmax(hidden); here features are the hidden vector itself. HtFLlib's logistic
regression trains an embedding for padding; here that stays zero, as in the others.
"""

import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.models.layers import linear_head, replaced_classifier
from pbfl_flwr.task import Task

PAD = 0  # its embedding is zero and stays so
CHANNELS = 100
WIDTHS = (3, 4, 5)


def fasttext(task: Task) -> SplitModel:
    """FastText for token ids: mean embedding over all positions, padding included; hidden layer d."""
    d, embedding = task.feature_dim, _embedding("fasttext", task)
    neck = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(d, d))
    replaced_classifier(d, task)
    return SplitModel(task, [embedding], neck, linear_head(task))


def textcnn(task: Task) -> SplitModel:
    """TextCNN for token ids: 100 convolutions each of width 3, 4, 5; hidden layer d; from 5 tokens.

    Raises:
        PbflError: if inputs are no token ids, or too few.
    """
    embedding = _embedding("textcnn", task)
    if task.input_shape[0] < max(WIDTHS):
        raise PbflError(
            f"model 'textcnn': expected at least {max(WIDTHS)} tokens, found {task.input_shape[0]}"
        )
    d = task.feature_dim
    neck = nn.Sequential(SideBySide(d), nn.Dropout(0.8), nn.Linear(CHANNELS * len(WIDTHS), d))
    replaced_classifier(d, task)
    return SplitModel(task, [embedding], neck, linear_head(task))


def text_logistic(task: Task) -> SplitModel:
    """Logistic regression for token ids: mean embedding over all positions, no hidden layer."""
    embedding = _embedding("text-logistic", task)
    replaced_classifier(task.feature_dim, task)
    neck = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten())
    return SplitModel(task, [embedding], neck, linear_head(task))


class TokenEmbedding(nn.Embedding):
    """Token ids (B, length) as a map (B, d, length)."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings, channels before positions."""
        return super().forward(input).transpose(1, 2)


class SideBySide(nn.Module):
    """Parallel convolutions of several widths, each followed by a ReLU and global max-pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(channels, CHANNELS, width) for width in WIDTHS)

    def forward(self, maps: Tensor) -> Tensor:
        """Return (B, channels of all widths) for (B, channels, length)."""
        return torch.cat([conv(maps).relu().amax(dim=2) for conv in self.convolutions], dim=1)


def check_tokens(model: str, task: Task) -> None:
    """Check that inputs are token ids.

    Raises:
        PbflError: if they are something else.
    """
    if not task.vocabulary_size or len(task.input_shape) != 1:
        kind = "token ids" if task.vocabulary_size else "numbers"
        raise PbflError(
            f"model '{model}', first layer: expected token ids (length,), found {kind} of shape {task.input_shape}; it "
            "reads text, e.g. dataset = ag-news"
        )


def _embedding(model: str, task: Task) -> TokenEmbedding:
    check_tokens(model, task)
    return TokenEmbedding(task.vocabulary_size, task.feature_dim, padding_idx=PAD)
