"""What is counted by class, and the metrics that follow from it."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from sklearn.preprocessing import label_binarize
from torch import Tensor

from pbfl_flwr.config import EvaluationSettings
from pbfl_flwr.training.class_metrics import (
    Areas,
    ByClass,
    areas,
    statistics,
)
from pbfl_flwr.training.evaluation import evaluate
from tests.training.test_loop import client, data

# Two clients, four classes, of which nobody tests the last one.
# Client 0: labels 0 0 0 1, answers 0 0 1 1; client 1: labels 0 2, answers 0 3.
FIRST = ByClass([3, 1, 0, 0], {"head": [2, 1, 0, 0]}, {"head": [2, 2, 0, 0]})


SECOND = ByClass([1, 0, 1, 0], {"head": [1, 0, 0, 0]}, {"head": [1, 0, 0, 1]})


def test_class_metrics_by_hand() -> None:
    result = statistics([FIRST, SECOND], "head")
    assert result["tested"] == [4, 1, 1, 0]
    assert result["by_class"] == [0.75, 1.0, 0.0, None]
    assert result["balanced"] == pytest.approx((0.75 + 1 + 0) / 3)
    # 2R/(T + A): 6/7, 2/3, 0/1 and 0/1, the last of a class that is only answered
    assert result["macro_f1"] == pytest.approx((6 / 7 + 2 / 3 + 0 + 0) / 4)
    # client 0 has recalls 2/3 and 1, client 1 has 1 and 0
    assert result["balanced_mean"] == pytest.approx(((2 / 3 + 1) / 2 + (1 + 0) / 2) / 2)
    # client 0: 4/5 and 2/3; client 1: 1, 0 and 0
    assert result["macro_f1_mean"] == pytest.approx(((4 / 5 + 2 / 3) / 2 + (1 + 0 + 0) / 3) / 2)


def counted(labels: Sequence[int], answers: Sequence[int], num_classes: int) -> ByClass:
    pairs = list(zip(labels, answers, strict=True))
    right = [sum(a == b == k for a, b in pairs) for k in range(num_classes)]
    tested, answered = ([list(row).count(k) for k in range(num_classes)] for row in (labels, answers))
    return ByClass(tested, {"head": right}, {"head": answered})


def test_class_metrics_agree_with_scikit_learn() -> None:
    drawn = np.random.default_rng(7)
    clients, labels, answers = [], [], []
    for size in (1, 2, 5, 40, 200):
        held = drawn.choice(12, size=min(size, 5), replace=False)  # classes 0..11 of 14
        labels.append(drawn.choice(held, size))
        answers.append(np.where(drawn.random(size) < 0.6, labels[-1], drawn.integers(0, 13, size)))
        clients.append(counted(labels[-1].tolist(), answers[-1].tolist(), 14))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of answers that are no label
        balanced = [balanced_accuracy_score(*pair) for pair in zip(labels, answers, strict=True)]
        together = balanced_accuracy_score(np.concatenate(labels), np.concatenate(answers))
    f1 = [f1_score(*pair, average="macro") for pair in zip(labels, answers, strict=True)]
    result = statistics(clients, "head")
    assert result["balanced_mean"] == pytest.approx(np.mean(balanced))
    assert result["macro_f1_mean"] == pytest.approx(np.mean(f1))
    assert result["balanced"] == pytest.approx(together)
    assert result["macro_f1"] == pytest.approx(
        f1_score(np.concatenate(labels), np.concatenate(answers), average="macro")
    )


def test_evaluation_counts_by_class() -> None:
    labels = data().test.labels
    fixed = torch.tensor([0, 1, 1, 0, 1, 2])[: len(labels)]
    seen = 0

    def oracle(features: Tensor, logits: Tensor) -> Tensor:
        nonlocal seen
        batch = fixed[seen % len(fixed) : seen % len(fixed) + len(features)]
        seen += len(features)
        return torch.eye(3)[batch]

    who = replace(client(), evaluation=EvaluationSettings(per_class=True, eval_batch_size=4))
    result = evaluate(who, {"head": oracle})
    expected = counted(labels.tolist(), fixed.tolist(), 3)
    assert result.by_class == expected
    assert sum(expected.right["head"]) == result.correct["head"]
    assert evaluate(client(), {"head": oracle}).by_class is None


def test_areas_are_those_of_htfllib_and_of_the_rank_statistic() -> None:
    rng = np.random.default_rng(0)
    labels, scores = (
        rng.integers(0, 3, 40),
        rng.integers(0, 6, (40, 4)).astype(float),
    )  # class 3 has no sample

    def mann_whitney(positive: np.ndarray, negative: np.ndarray) -> float:
        greater = (positive[:, None] > negative).mean()
        return float(greater + (positive[:, None] == negative).mean() / 2)

    one_hot = label_binarize(labels, classes=np.arange(4))
    of_classes = [mann_whitney(scores[labels == k, k], scores[labels != k, k]) for k in range(3)]
    assert areas(labels, scores).macro == pytest.approx(np.mean(of_classes))
    assert areas(labels, scores).micro == pytest.approx(roc_auc_score(one_hot, scores, average="micro"))
    assert areas(np.zeros(5, int), scores[:5]).macro is None


def test_evaluation_gives_the_areas_of_every_predictor() -> None:
    who = replace(client(), evaluation=EvaluationSettings(auc=True, eval_batch_size=4))
    labels = data().test.labels
    perfect = torch.eye(3)[labels]
    position = 0

    def oracle(features: Tensor, logits: Tensor) -> Tensor:
        nonlocal position
        position += len(features)
        return perfect[position - len(features) : position]

    result = evaluate(who, {"head": oracle, "global": lambda features, logits: torch.zeros_like(logits)})
    assert result.areas == {"head": Areas(1.0, 1.0), "global": Areas(0.5, 0.5)}
    assert evaluate(client(), {"head": lambda features, logits: logits}).areas is None
