"""Checks that every dataset must pass, whatever its loader."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.labels import HINT
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import MAX_AXES

_ROWS_AT_A_TIME = 4096


def validate(pool: Pool, name: str) -> None:
    """Check all fields of a pool.

    Raises:
        PbflError: if lengths disagree, an input has too many axes or an empty one, labels are not 0..K-1, K < 2, a
            class name is not UTF-8, an input is NaN or infinite, or a token id is not in the vocabulary.
    """
    rows = len(pool.labels)
    if len(pool.inputs) != rows or rows == 0:
        raise PbflError(
            f"dataset '{name}' has {len(pool.inputs)} inputs and {rows} labels; must be equally many, 1 or "
            "more"
        )
    if pool.owner is not None and len(pool.owner) != rows:
        raise PbflError(
            f"dataset '{name}' has {len(pool.owner)} entries in its client column for {rows} samples"
        )
    if not 1 <= len(pool.input_shape) <= MAX_AXES or min(pool.input_shape) < 1:
        raise PbflError(
            f"dataset '{name}' has inputs of shape {pool.input_shape}; must be 1 to {MAX_AXES} axes, none "
            "of length 0"
        )
    if pool.num_classes < 2:
        raise PbflError(
            f"dataset '{name}' has only the class '{', '.join(pool.label_names)}'; must be 2 classes or more; {HINT}"
        )
    check_labels(pool.labels, f"dataset '{name}'", pool.num_classes, "the number of its class names")
    if odd := next(
        (each for each in pool.label_names if each.encode(errors="replace").decode() != each), None
    ):
        raise PbflError(f"dataset '{name}': the name of the class {odd!a} is not UTF-8; rename it")
    if size := pool.vocabulary_size:
        low, high = int(pool.inputs.min()), int(pool.inputs.max())
        if low < 0 or high >= size:
            raise PbflError(f"dataset '{name}' has token ids {low} to {high}; must be 0..{size - 1}")
    if pool.inputs.dtype == np.float32:
        for start in range(0, rows, _ROWS_AT_A_TIME):
            finite = np.isfinite(pool.inputs[start : start + _ROWS_AT_A_TIME]).reshape(
                -1, int(np.prod(pool.input_shape))
            )
            if not finite.all():
                row = start + int(np.argmin(finite.all(axis=1)))
                raise PbflError(
                    f"dataset '{name}' holds NaN, infinity or a number beyond float32 (3.4e38), first in row {row}; "
                    "must be finite numbers"
                )


def check_labels(labels: NDArray[Any], where: str, num_classes: int, source: str) -> None:
    """Check that labels are 0..K-1.

    Args:
        labels: whole numbers, of any shape.
        where: named in errors.
        num_classes: K.
        source: where K comes from, for errors.

    Raises:
        PbflError: naming a label that is not, and where K comes from.
    """
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise PbflError(
            f"{where} has the label {outside[0]}; must be 0..{num_classes - 1}, since {source} is {num_classes}"
        )
