"""Per-class counts of a client's predictions, balanced accuracy and macro-F1; areas under the ROC curve.

With T_k test samples of class k, R_k of them predicted correctly, and A_k samples predicted as k:

* the accuracy of class k is R_k/T_k, for T_k > 0 (its recall);
* balanced accuracy is the unweighted mean of these, over the classes with T_k > 0;
* macro-F1 is the unweighted mean of 2·R_k/(T_k + A_k), over the classes with T_k + A_k > 0.

Same as scikit-learn's ``balanced_accuracy_score`` and ``f1_score(average="macro")``: a class that occurs neither among
the labels nor among the predictions is ignored; one that occurs only among the predictions has F1 = 0 and is ignored
by balanced accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbfl_flwr.util.extras import require


@dataclass(frozen=True)
class Areas:
    """Areas under the ROC curve of a client's scores, one class against the rest.

    Attributes:
        macro: mean over the classes with test samples; None if all samples are of one class.
        micro: over all N·K pairs of a sample and a class, as HtFLlib and PFLlib compute it; None if K is 1.
    """

    macro: float | None
    micro: float | None


def areas(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> Areas:
    """Return the areas by scikit-learn's ``roc_auc_score``.

    Args:
        labels: (N,).
        scores: (N, K), larger for more likely classes.
    """
    require("auc = true", "sklearn")
    from sklearn.metrics import roc_auc_score  # slow to import

    truth = labels[:, None] == np.arange(scores.shape[1])
    mixed = [k for k in range(truth.shape[1]) if truth[:, k].any() and not truth[:, k].all()]
    macro = float(np.mean([roc_auc_score(truth[:, k], scores[:, k]) for k in mixed])) if mixed else None
    micro = float(roc_auc_score(truth.ravel(), scores.ravel())) if truth.any() and not truth.all() else None
    return Areas(macro, micro)


@dataclass(frozen=True)
class ByClass:
    """Counts over a client's test samples, K numbers each.

    Attributes:
        tested: T, test samples of each class.
        right: predictor -> R, correctly predicted test samples of each class.
        answered: predictor -> A, how often each class was predicted.
    """

    tested: Sequence[int]
    right: Mapping[str, Sequence[int]]
    answered: Mapping[str, Sequence[int]]

    def brief(self) -> dict[str, Any]:
        """Return the counts for the run's history, without classes for which all of them are zero."""
        rows = [self.tested, *self.right.values(), *self.answered.values()]
        classes = [label for label in range(len(self.tested)) if any(row[label] for row in rows)]

        def of_classes(row: Sequence[int]) -> list[int]:
            return [row[label] for label in classes]

        return {
            "classes": classes,
            "tested": of_classes(self.tested),
            "right": {name: of_classes(row) for name, row in self.right.items()},
            "answered": {name: of_classes(row) for name, row in self.answered.items()},
        }


def recalls(tested: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Return R/T (..., K), NaN for classes without test samples."""
    samples = np.asarray(tested, dtype=np.float64)
    shares: NDArray[np.float64] = np.full(samples.shape, np.nan)
    np.divide(right, samples, out=shares, where=samples > 0)
    return shares


def balanced_accuracy(tested: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Return the mean of R/T over the classes with T > 0, at least one, for every row (..., K)."""
    return np.asarray(np.nanmean(recalls(tested, right), axis=-1))


def macro_f1(tested: ArrayLike, right: ArrayLike, answered: ArrayLike) -> NDArray[np.float64]:
    """Return the mean of 2·R/(T + A) over the classes with T + A > 0, at least one, for every row (..., K)."""
    both = np.asarray(tested, dtype=np.float64) + np.asarray(answered)
    scores = np.divide(2 * np.asarray(right), both, out=np.full(both.shape, np.nan), where=both > 0)
    return np.asarray(np.nanmean(scores, axis=-1))


def statistics(clients: Sequence[ByClass], name: str) -> dict[str, Any]:
    """Return a predictor's scores over clients, each of which has test samples.

    ``balanced`` and ``macro_f1`` pool all test samples; ``balanced_mean`` and ``macro_f1_mean`` are unweighted means
    over clients. ``by_class`` has each class's accuracy over all test samples (None without any), ``tested`` their
    number per class.
    """
    tested = np.array([client.tested for client in clients])
    right, answered = (
        np.array([client[name] for client in counts])
        for counts in ([client.right for client in clients], [client.answered for client in clients])
    )
    all_tested, all_right, all_answered = (counts.sum(axis=0) for counts in (tested, right, answered))
    each = recalls(all_tested, all_right)
    return {
        "balanced": float(balanced_accuracy(all_tested, all_right)),
        "balanced_mean": float(balanced_accuracy(tested, right).mean()),
        "macro_f1": float(macro_f1(all_tested, all_right, all_answered)),
        "macro_f1_mean": float(macro_f1(tested, right, answered).mean()),
        "by_class": [None if np.isnan(value) else float(value) for value in each],
        "tested": all_tested.tolist(),
    }
