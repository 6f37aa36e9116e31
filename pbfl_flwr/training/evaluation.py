"""Evaluation: all predictors of a client in one pass over its test samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pbfl_flwr.config import PREDICTORS, in_order
from pbfl_flwr.data import Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Predictor, WithInputs
from pbfl_flwr.training.class_metrics import Areas, ByClass, areas
from pbfl_flwr.training.loop import REMEDY, Diverged, each_batch
from pbfl_flwr.util.user_code import returned


@dataclass(frozen=True)
class Scores:
    """Scores of one pass over a client's test samples, and over its validation samples if it has any.

    Attributes:
        num_samples: test samples.
        correct: predictor -> number of correctly predicted samples.
        loss: mean cross-entropy of the predictor ``head``, or of the logits without it; 0 without samples.
        validation: scores on the validation samples; None without any.
        by_class: counts per class; None unless ``per-class`` is set.
        areas: predictor -> areas under the ROC curve; None unless ``auc`` is set.
    """

    num_samples: int
    correct: dict[str, int]
    loss: float
    validation: Scores | None = None
    by_class: ByClass | None = None
    areas: dict[str, Areas] | None = None


@torch.no_grad()  # not inference_mode: tensors cached by a network here must be usable in training
def evaluate(
    client: Client, predictors: Mapping[str, Predictor], predicts: Collection[str] = PREDICTORS
) -> Scores:
    """Score all predictors in one pass over the client's test shard, then the validation shard.

    Args:
        client: whose network and samples these are.
        predictors: of the method, by name.
        predicts: of the method, the names that it may use besides PREDICTORS.

    Raises:
        ValueError: if a predictor returns another shape than (B, K), or its name is not among these.
        Diverged: if a predictor returns scores that are not finite.
        PbflError: if a predictor changes what it reads in place.
    """
    known = in_order([*PREDICTORS, *predicts])
    if odd := [name for name in predictors if name not in known]:
        raise ValueError(
            f"predictor '{odd[0]}': must be one of {', '.join(known)}, or be in the method's predicts"
        )
    scores = _scores(client, client.data.test, predictors, client.evaluation.per_class, client.evaluation.auc)
    if client.data.validation is None:
        return scores
    return replace(scores, validation=_scores(client, client.data.validation, predictors))


def versions_of(tensors: Iterable[object]) -> list[int]:
    """Return how often each tensor was changed in place, but of those of inference mode, which keep no count."""
    return [each._version for each in tensors if isinstance(each, Tensor) and not each.is_inference()]


def _scores(
    client: Client,
    shard: Shard,
    predictors: Mapping[str, Predictor],
    per_class: bool = False,
    auc: bool = False,
) -> Scores:
    correct = dict.fromkeys(predictors, 0)
    answers: dict[str, list[Tensor]] = {name: [] for name in predictors}
    scored: dict[str, list[Tensor]] = {name: [] for name in predictors}
    loss = 0.0
    for inputs, labels in each_batch(client, shard):
        features = client.model.features(inputs)
        logits = client.model.head(features)
        answered = logits[: len(labels)]
        for name, predictor in predictors.items():
            read = (inputs, features, logits) if isinstance(predictor, WithInputs) else (features, logits)
            versions = versions_of(read)
            found = predictor(*read)
            if versions_of(read) != versions:
                raise PbflError(
                    f"predictor '{name}' changes its {'inputs, ' * (len(read) > 2)}features or logits in place; other "
                    "predictors read them after it, so they must stay as they are"
                )
            scores = returned(predictor, found, Tensor)
            if scores.shape != (len(inputs), client.task.num_classes):
                raise ValueError(
                    f"predictor '{name}' returns scores of shape {tuple(scores.shape)}, expected (B, K)"
                )
            scores = scores[: len(labels)]
            if not bool(torch.isfinite(scores).all()):
                fault, remedy = f"predictor '{name}' gives scores that are not finite", REMEDY
                if not bool((scores.isnan() | scores.isposinf()).any()):
                    remedy = f"a class that may not be predicted must have the score EXCLUDED, not -inf; else {REMEDY}"
                raise Diverged(f"{fault}; {remedy}")
            answer = scores.argmax(dim=1)
            correct[name] += int((answer == labels).sum())
            if per_class:
                answers[name].append(answer)
            if auc:
                scored[name].append(scores)
            if name == "head":
                answered = scores
        loss += float(nn.functional.cross_entropy(answered, labels, reduction="sum"))
    n = len(shard.labels)
    counted = _by_class(shard.labels, answers, client.task.num_classes) if per_class else None
    under = _areas(shard.labels, scored) if auc and n else None
    return Scores(n, correct, loss / n if n else 0.0, by_class=counted, areas=under)


def _areas(labels: Tensor, scored: Mapping[str, Sequence[Tensor]]) -> dict[str, Areas]:
    truth = labels.cpu().numpy()
    return {
        name: areas(truth, torch.cat(list(parts)).cpu().double().numpy()) for name, parts in scored.items()
    }


def _by_class(labels: Tensor, answers: Mapping[str, Sequence[Tensor]], num_classes: int) -> ByClass:
    """Return the counts of a whole pass. Done after it, so that the GPU is waited for once per predictor, not batch."""
    truth = labels.cpu()

    def count(classes: Tensor) -> list[int]:
        each: list[int] = torch.bincount(classes, minlength=num_classes).tolist()
        return each

    right, answered = {}, {}
    for name, parts in answers.items():
        answer = torch.cat(list(parts)).cpu() if parts else truth[:0]
        right[name], answered[name] = count(truth[answer == truth]), count(answer)
    return ByClass(count(truth), right, answered)
