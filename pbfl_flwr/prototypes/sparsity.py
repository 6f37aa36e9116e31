"""Which of a class's d dimensions travel: those in a mask (CPS), or all of them.

Source: "Structured sparse prototypes" (CPS), Section 4.1; the masks are those of :mod:`~pbfl_flwr.prototypes.masks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from pbfl_flwr.config.keys import CpsScheme
from pbfl_flwr.prototypes import masks
from pbfl_flwr.task import Task


@dataclass(frozen=True)
class Sparsity:
    """The dimensions that travel in a run; server and clients derive the same masks.

    Attributes:
        size: s; 0 and d mean all dimensions.
        scheme: how the masks are allocated.
        seed: of the masks, the only thing about them that clients must agree on.
    """

    size: int
    scheme: CpsScheme
    seed: int

    def masks(self, task: Task) -> Tensor | None:
        """Return the masks (K, d) bool, None if all dimensions travel.

        Raises:
            PbflError: if there are no masks of this size.
        """
        if self.size in (0, task.feature_dim):
            return None
        return _allocated(self, task.num_classes, task.feature_dim)[0]

    def width(self, task: Task) -> int:
        """Return the length of a sent row; under scheme "block" it can be below s."""
        if self.size in (0, task.feature_dim):
            return task.feature_dim
        return _allocated(self, task.num_classes, task.feature_dim)[1]

    def compress(self, rows: Tensor, task: Task) -> Tensor:
        """Return the entries of rows that travel: (K, d) -> (K, width)."""
        table = self.masks(task)
        return rows if table is None else masks.compress(rows, table)

    def expand(self, sent: Tensor, task: Task) -> Tensor:
        """Return sent rows with zeros outside the masks: (K, width) -> (K, d)."""
        table = self.masks(task)
        return sent if table is None else masks.expand(sent, table)


@lru_cache(maxsize=8)
def _allocated(wanted: Sparsity, num_classes: int, feature_dim: int) -> tuple[Tensor, int]:
    """Return the masks and the number of ones in each; cached, since it takes seconds for many classes."""
    table = masks.allocate_masks(
        num_classes, feature_dim, wanted.size, scheme=wanted.scheme, seed=wanted.seed
    )
    return table, int(table[0].sum())
