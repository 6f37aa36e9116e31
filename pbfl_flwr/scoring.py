"""The one evaluation: all predictors of a client in one pass over its test samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pbfl_flwr.by_class import ByClass
from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.data import Shard
from pbfl_flwr.method import Client, Predictor
from pbfl_flwr.models import begin_batch
from pbfl_flwr.training import REMEDY, Diverged, forward, take


@dataclass(frozen=True)
class Scores:
    """One pass over a client's test data, and over what it holds out for validation.

    Attributes:
        num_samples: test samples.
        correct: predictor -> correctly predicted samples.
        loss: mean cross-entropy of the predictor ``head``, 0 without samples.
        validation: the same on the held-out samples, None without any.
        by_class: the test samples counted by class; None where nobody asked for that (``per-class``).
    """

    num_samples: int
    correct: dict[str, int]
    loss: float
    validation: Scores | None = None
    by_class: ByClass | None = None


@torch.no_grad()  # not inference_mode: a tensor that a network caches while it is scored must serve training, too
def evaluate(client: Client, predictors: Mapping[str, Predictor]) -> Scores:
    """Score all predictors in one pass over the client's test shard, then the validation shard.

    Raises:
        ValueError: if a predictor answers another shape than (B, K), or has a name that no report has room for.
        Diverged: if it gives scores that are not finite.
    """
    if odd := [name for name in predictors if name not in PREDICTORS]:
        raise ValueError(f"predictor '{odd[0]}': allowed are {', '.join(PREDICTORS)}")
    client.model.eval()
    scores = _scores(client, client.data.test, predictors, client.evaluation.per_class)
    if client.data.validation is None:
        return scores
    return replace(scores, validation=_scores(client, client.data.validation, predictors))


def _scores(
    client: Client, shard: Shard, predictors: Mapping[str, Predictor], per_class: bool = False
) -> Scores:
    size = client.evaluation.eval_batch_size
    correct = dict.fromkeys(predictors, 0)
    answers: dict[str, list[Tensor]] = {name: [] for name in predictors}
    loss = 0.0
    for start in range(0, len(shard.labels), size):
        batch = slice(start, start + size)
        inputs, labels = take(client.data, shard, batch, client.device, client.training.layout)
        begin_batch(client.training.compile, client.device)
        features, logits = forward(client.model, inputs)
        answered = logits
        for name, predictor in predictors.items():
            scores = predictor(features, logits)
            if scores.shape != (len(labels), client.task.num_classes):
                raise ValueError(f"predictor '{name}' answers {tuple(scores.shape)}, expected (B, K)")
            if not bool(torch.isfinite(scores).all()):
                raise Diverged(f"predictor '{name}' gives scores that are not finite; {REMEDY}")
            answer = scores.argmax(dim=1)
            correct[name] += int((answer == labels).sum())
            if per_class:
                answers[name].append(answer)
            if name == "head":
                answered = scores
        loss += float(nn.functional.cross_entropy(answered, labels, reduction="sum"))
    n = len(shard.labels)
    counted = _by_class(shard.labels, answers, client.task.num_classes) if per_class else None
    return Scores(n, correct, loss / n if n else 0.0, by_class=counted)


def _by_class(labels: Tensor, answers: Mapping[str, Sequence[Tensor]], num_classes: int) -> ByClass:
    """Return the counts of a whole pass, once it is over: a GPU is waited for once a predictor, not once a batch."""
    known = labels.cpu()

    def count(found: Tensor) -> list[int]:
        each: list[int] = torch.bincount(found, minlength=num_classes).tolist()
        return each

    right, answered = {}, {}
    for name, parts in answers.items():
        answer = torch.cat(list(parts)).cpu() if parts else known[:0]
        right[name], answered[name] = count(known[answer == known]), count(answer)
    return ByClass(count(known), right, answered)
